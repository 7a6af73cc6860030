# SPDX-License-Identifier: Apache-2.0
"""Rows of text, conversations or tokens become {"input_ids", "labels"}: TRL's formats and rules.

  text               the text, EOS appended where it is missing; all of it is trained
  prompt, completion strings or lists of messages; the completion is trained (completion_only_loss)
  messages           rendered by the tokenizer's chat template; all of it, or with assistant_only_loss the assistant's turns
  conversations      the same with "from" and "value", as ShareGPT writes them
  input_ids          tokens; labels as given, else made from completion_mask and assistant_masks

Labels are the ids, or -100 where nothing is learnt, not shifted.
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from .batches import column_of, each_row, kept_tokens, with_masked_end
from .hf_text import GENERATION, assistant_range, special_tokens
from .sft_config import SFTConfig

_log = logging.getLogger("qlorapp")

IGNORED = -100
Row = dict[str, list[int]]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


def as_rows(dataset: Any, name: str) -> list[Mapping[str, Any]]:
    """The rows of a list, a datasets.Dataset or torch's."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (str, bytes)) or not (indexed or isinstance(dataset, Iterable)):
        raise TypeError(
            f"[SFTTrainer] {name} must be a list of dicts, a datasets.Dataset or a torch.utils.data.Dataset; got {type(dataset).__name__}."
        )
    if isinstance(dataset, Mapping):
        raise TypeError(f"[SFTTrainer] {name} holds several data sets: {list(dataset)}. Give one of them.")
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"[SFTTrainer] {name} is a stream ({type(dataset).__name__}), and rows are tokenized once and kept. "
            "Take what the run needs: list(dataset.take(n))."
        )
    rows = list(each_row(dataset))
    if not rows:
        raise ValueError(f"[SFTTrainer] {name} must have a row; it is empty.")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"[SFTTrainer] {name}: a row must be a dict; row {i} is {type(row).__name__}.")
    return rows


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """role and content, whatever they were called. Keys that are None (datasets fills them in) are left out."""
    known = {key: value for key, value in message.items() if value is not None}
    if "from" in known:
        role = known.pop("from")
        known["role"] = _SHAREGPT_ROLES.get(role, role)
    if "value" in known:
        known["content"] = known.pop("value")
    return known


def _normalized(row: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(row)
    if isinstance(out.get("conversations"), (list, tuple)) and "messages" not in out:
        out["messages"] = out.pop("conversations")
    for key in ("messages", "prompt", "completion"):
        if _is_conversation(out.get(key)):
            out[key] = [_message(message) for message in out[key]]
    return out


def _refuse_preferences(row: Mapping[str, Any], where: str) -> None:
    """@raises ValueError for rows that compare answers: as SFT rows, only their questions would be trained."""
    if "chosen" in row and "rejected" in row:
        raise ValueError(
            f"{where}'chosen' and 'rejected' are preference data: train with TRL's DPOTrainer. To train on the chosen answers alone, "
            "remove 'rejected' and rename 'chosen' to 'completion', or to 'messages' if it holds whole conversations."
        )
    judged = ("prompt" in row and "completion" in row) or "messages" in row or "conversations" in row
    for name in ("label", "kto_tag"):
        if isinstance(row.get(name), bool) and (judged or name == "kto_tag"):
            raise ValueError(
                f"{where}{name!r} marks answers as wanted or not, which is preference data: train with TRL's KTOTrainer. To train on "
                "all answers, good or bad, remove the column."
            )


@dataclasses.dataclass
class Summary:
    """What was read, for people."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    cut: int = 0
    dropped: int = 0
    end_in_eos: int = 0

    def line(self, name: str) -> str:
        kept = self.rows - self.dropped
        text = f"{name}: {kept} rows, {self.tokens} tokens, {self.trained} trained; longest {self.longest}"
        if self.cut:
            text += f"; {self.cut} cut at max_length"
        if self.dropped:
            text += f"; {self.dropped} left out with nothing to learn"
        return text + f"; {100 * self.end_in_eos / max(1, kept):.1f} % end in a trained EOS"


class RowEncoder:
    """Tokenizes rows as a config says. One for the training and the evaluation rows, so that both are read the same way."""

    def __init__(self, tokenizer: Any, config: SFTConfig, completion_only: bool, stop_ids: set[int]) -> None:
        self.tokenizer, self.config, self.completion_only, self.stop_ids = tokenizer, config, completion_only, stop_ids
        self._said: set[str] = set()

    def prepare(
        self, dataset: Any, name: str, packed: bool, formatting_func: Callable[[Any], str] | None, keep_all: bool = False
    ) -> list[Row]:
        """All rows, cut (packing cuts by itself), without those that have nothing to learn, and a line about them in the log.

        keep_all: those with nothing to learn, too, and in the order given: predictions are compared with their rows.
        """
        rows, summary = [], Summary()
        for i, row in enumerate(as_rows(dataset, name)):
            where = f"[SFTTrainer] {name}, row {i}: "
            if formatting_func is not None and "input_ids" not in row:
                text = formatting_func(row)
                if isinstance(text, list) and len(text) == 1:  # as for older TRL
                    text = text[0]
                if not isinstance(text, str):
                    got = f"a list of {len(text)}" if isinstance(text, list) else type(text).__name__
                    raise TypeError(
                        f"{where}formatting_func must return a string; got {got}. It is given one row, not a batch as in older TRL: return "
                        "that row's text."
                    )
                row = {self.config.dataset_text_field: text}
            encoded = self.encode(row, where)
            summary.rows += 1
            if not packed:
                encoded = self._cut(encoded, summary)
            if not keep_all and all(label == IGNORED for label in encoded["labels"][1:]):
                summary.dropped += 1
                continue
            self._count(encoded, summary)
            rows.append(encoded)
        if not rows:
            raise ValueError(
                f"[SFTTrainer] {name}: a row must have something to learn; none of {summary.rows} has a label behind its first "
                "token. Raise max_length, or check prompts and labels."
            )
        _log.info("[SFTTrainer] %s", summary.line(name))
        if self.stop_ids and summary.end_in_eos == 0:
            self._warn_once(
                f"{name}: 0 % of the rows end in a trained EOS: the model will not learn to stop. Append EOS, raise max_length, "
                "or check eos_token."
            )
        if self.config.shuffle_dataset and not keep_all:
            import numpy

            rows = [rows[i] for i in numpy.random.default_rng(self.config.seed).permutation(len(rows))]
        return rows

    def encode(self, row: Mapping[str, Any], where: str = "") -> Row:
        """One row, not cut. Columns that are None are missing: datasets fills rows up with them."""
        row = {key: value for key, value in row.items() if value is not None}
        if "image" in row or "images" in row:
            raise ValueError(
                f"{where}rows with images need a vision model; this library trains causal language models on text."
            )
        if "input_ids" in row:
            return self._labelled(row, where)
        _refuse_preferences(row, where)
        row = _normalized(row)
        self._check_conversations(row, where)
        if "messages" in row:
            return self._conversation(row, where)
        if "prompt" in row and "completion" in row:
            return self._completion(row, where)
        if self.config.dataset_text_field in row:
            if self.config.assistant_only_loss:
                raise ValueError(f"{where}assistant_only_loss needs conversations ('messages'). Leave it out.")
            ids = self._tokens(self._with_eos(row[self.config.dataset_text_field], where))
            return self._labelled({"input_ids": ids}, where)
        raise ValueError(
            f"{where}must have '{self.config.dataset_text_field}' (dataset_text_field), 'messages', 'prompt' and 'completion', or "
            f"'input_ids'; it has {list(row)}. Rename a column, or give formatting_func."
        )

    def _check_conversations(self, row: Mapping[str, Any], where: str) -> None:
        """@raises ValueError for a conversation without a message, and where no template says how one is written."""
        used = ("messages",) if "messages" in row else ("prompt", "completion") if "completion" in row else ()
        for name in used:
            if isinstance(value := row.get(name), (list, tuple)) and not value:
                raise ValueError(f"{where}{name!r} must have a message; it is empty. Remove the row.")
        template = getattr(self.tokenizer, "chat_template", "unknown") or (row.get("chat_template_kwargs") or {}).get(
            "chat_template"
        )
        if not template and any(_is_conversation(row.get(name)) for name in used):
            raise ValueError(
                f"{where}a conversation needs a chat template, and the tokenizer has none, as those of base models. Take the chat model's: "
                "SFTConfig(chat_template_path=…), or set tokenizer.chat_template."
            )

    # --- formats

    def _with_eos(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise TypeError(f"{where}text must be a string; got {type(text).__name__}.")
        eos = self.tokenizer.eos_token
        return text if not eos or text.endswith(eos) else text + eos

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _template_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tools = row.get("tools")
        if isinstance(tools, str):
            tools = json.loads(tools)
        return {"tools": tools or None, **(row.get("chat_template_kwargs") or {})}

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any], **more: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options, **more))

    def _render_tokens(self, messages: list[dict[str, Any]], options: dict[str, Any], **more: Any) -> dict[str, list[int]]:
        encoded = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options, **more)
        return cast("dict[str, list[int]]", encoded)

    def _conversation(self, row: Mapping[str, Any], where: str) -> Row:
        messages, options = row["messages"], self._template_options(row)
        if not _is_conversation(messages):
            raise TypeError(f"{where}'messages' must be a list of {{'role', 'content'}}; got {type(messages).__name__}.")
        if self.config.assistant_only_loss:
            return self._labelled(self._assistant_masked(messages, options, where), where)
        return self._labelled({"input_ids": self._render_tokens(messages, options)["input_ids"]}, where)

    def _completion(self, row: Mapping[str, Any], where: str) -> Row:
        prompt, completion = row["prompt"], row["completion"]
        if _is_conversation(prompt) != _is_conversation(completion):
            raise TypeError(f"{where}prompt and completion must both be strings, or both lists of messages.")
        encoded: dict[str, Any]
        if _is_conversation(prompt):
            options = self._template_options(row)
            start = self._render_tokens(prompt, options, add_generation_prompt=True)["input_ids"]
            if self.config.assistant_only_loss:
                encoded = self._assistant_masked([*prompt, *completion], options, where)
            else:
                encoded = {"input_ids": self._render_tokens([*prompt, *completion], options)["input_ids"]}
        else:
            if self.config.assistant_only_loss:
                raise ValueError(
                    f"{where}assistant_only_loss needs conversations; prompt and completion are strings. Leave it out."
                )
            start = self._tokens(prompt)
            encoded = {"input_ids": self._tokens(prompt + self._with_eos(completion, where))}
        ids = encoded["input_ids"]
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
        if common < len(start) and self.tokenizer.decode(start[common:]) != (self.tokenizer.eos_token or ""):
            self._warn_once(
                f"a prompt alone ends in other tokens ({self.tokenizer.decode(start[common:])!r}) than with its completion behind "
                "it; what differs counts as completion. Move white space from the end of prompts to the completions."
            )
        encoded["completion_mask"] = [0] * common + [1] * (len(ids) - common)
        return self._labelled(encoded, where)

    # --- assistant_only_loss

    def _assistant_masked(self, messages: list[dict[str, Any]], options: dict[str, Any], where: str) -> dict[str, list[int]]:
        template = self.tokenizer.chat_template
        if isinstance(template, str) and GENERATION.search(template):
            rendered = self._render_tokens(messages, options, return_assistant_tokens_mask=True)
            out = {"input_ids": list(rendered["input_ids"]), "assistant_masks": list(rendered["assistant_masks"])}
        else:
            text = self._render(messages, options)
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            mask = token_mask(encoding["offset_mapping"], self.assistant_ranges(messages, options, text, where))
            out = {"input_ids": list(encoding["input_ids"]), "assistant_masks": mask}
        if 1 not in out["assistant_masks"]:
            raise ValueError(f"{where}assistant_only_loss needs a turn of the assistant; there is none. Remove the row.")
        return out

    def assistant_ranges(
        self, messages: list[dict[str, Any]], options: dict[str, Any], text: str, where: str
    ) -> list[tuple[int, int]]:
        """Where in the rendered text the model has to produce: from where generation would begin to behind the end-of-turn token.

        For templates without {% generation %}: the text up to a turn, with the header of the answer behind it, must be how the
        whole text begins. A template for which that is not so would be masked wrongly, and is refused. Tool calls are produced too.
        """

        def render(some: list[dict[str, Any]], **more: Any) -> str:
            return self._render(some, options, **more)

        ranges = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            found = assistant_range(render, messages, i, text, special_tokens(self.tokenizer))
            if found is None:
                raise ValueError(
                    f"{where}assistant_only_loss cannot tell turn {i} in what this chat template renders. "
                    "Put {% generation %} … {% endgeneration %} around the assistant's turn in the template."
                )
            if not found[1]:
                self._warn_once("the assistant's turn ends in no special token here: the model may not learn to stop.")
            ranges.append(found[0])
        return ranges

    # --- labels

    def _labelled(self, row: Mapping[str, Any], where: str) -> Row:
        ids = column_of(row, "input_ids", where)
        if row.get("labels") is not None:
            labels = column_of(row, "labels", where)
        else:
            masks = [column_of(row, "assistant_masks", where)] if row.get("assistant_masks") is not None else []
            if self.completion_only and row.get("completion_mask") is not None:
                masks.append(column_of(row, "completion_mask", where))
            if any(len(mask) != len(ids) for mask in masks):
                raise ValueError(
                    f"{where}a mask must be as long as input_ids, {len(ids)}; got {[len(mask) for mask in masks]}."
                )
            labels = [token if all(bits) else IGNORED for token, *bits in zip(ids, *masks, strict=True)]
        if len(labels) != len(ids):
            raise ValueError(f"{where}labels must be as long as input_ids; got {len(labels)} and {len(ids)}.")
        kept = kept_tokens(row, len(ids), where)
        if row.get("labels") is not None and ids[kept.stop : kept.stop + 1] == [self.tokenizer.eos_token_id]:
            kept = with_masked_end(kept, labels)
        return {"input_ids": ids[kept], "labels": labels[kept]}

    def _cut(self, row: Row, summary: Summary) -> Row:
        limit = self.config.max_length
        if limit is None or len(row["input_ids"]) <= limit:
            return row
        summary.cut += 1
        kept = slice(None, limit) if self.config.truncation_mode == "keep_start" else slice(-limit, None)
        return {key: values[kept] for key, values in row.items()}

    def _count(self, row: Row, summary: Summary) -> None:
        ids, labels = row["input_ids"], row["labels"]
        summary.tokens += len(ids)
        summary.trained += sum(label != IGNORED for label in labels[1:])
        summary.longest = max(summary.longest, len(ids))
        for token, label in zip(reversed(ids), reversed(labels), strict=True):
            if token in self.stop_ids:
                summary.end_in_eos += label != IGNORED
                break
            if self.tokenizer.decode([token]).strip():  # white space may follow the end of a turn
                break

    def _warn_once(self, line: str) -> None:
        kind = line[:40]
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("[SFTTrainer] %s", line)


def token_mask(offsets: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> list[int]:
    """1 for each token that holds a character of one of the ranges, which are sorted and disjoint."""
    mask, following = [], 0
    for begin, end in offsets:
        while following < len(ranges) and ranges[following][1] <= begin:
            following += 1
        mask.append(int(following < len(ranges) and begin < end and end > ranges[following][0]))
    return mask


def sample_parts(row: Row, tokenizer: Any) -> list[tuple[str, bool]]:
    """The row's text in runs: [(text, whether it is trained)]. The first token is predicted by nothing and never trained."""
    flags = [i > 0 and label != IGNORED for i, label in enumerate(row["labels"])]
    parts = []
    for trained, run in itertools.groupby(range(len(flags)), key=flags.__getitem__):
        parts.append((tokenizer.decode([row["input_ids"][i] for i in run]), trained))
    return parts
