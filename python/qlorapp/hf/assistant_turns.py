# SPDX-License-Identifier: Apache-2.0
"""Rows of `assistant_only_loss` for chat templates without {% generation %}: what the command trains, for SFTTrainer.

A template that rewrites earlier turns, as one that removes their thoughts, gives several samples: one for each answer that the samples
behind it do not hold as it is served. src/data/answers.cpp is the same rule for the command.
"""

import datetime
import itertools
import json
import logging
from typing import Any

import transformers
from trl import chat_template_utils
from trl.data_utils import is_conversational, is_conversational_from_value, maybe_convert_to_chatml

from .. import _C
from .text_service import Range, Service, special_tokens

#: English names, as strftime() follows the locale.
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_log = logging.getLogger("qlorapp")


def is_needed(args: Any, tokenizer: Any) -> bool:
    """Whether TRL would raise, because neither the template has {% generation %} nor TRL knows another for it."""
    if not getattr(args, "assistant_only_loss", False) or not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        return False
    if tokenizer.chat_template is None or chat_template_utils.has_generation_markers(tokenizer.chat_template):
        return False
    try:
        chat_template_utils.get_training_chat_template(tokenizer)
    except ValueError:
        return True
    return False


def _thoughts_of(message: dict[str, Any]) -> str:
    keys = ("reasoning_content", "reasoning", "thinking")
    return next((message[key] for key in keys if isinstance(message.get(key), str)), "").strip("\n")


class Answers:
    """The answers of conversations, each as a server renders it."""

    def __init__(self, tokenizer: Any) -> None:
        self._service = Service.over(tokenizer)
        named = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        self._template = _C.ChatTemplate(tokenizer.chat_template, named, special_tokens(tokenizer))

    def samples(
        self, messages: list[dict[str, Any]], wanted: list[int], tools: list[Any] | None, variables: dict[str, Any]
    ) -> list[tuple[str, list[Range]]]:
        """Texts with their trained ranges in bytes, in the order of their answers. `wanted`: indices of answers, in order."""
        chosen = [i in wanted for i in range(len(messages))]
        given, more = (json.dumps(each, ensure_ascii=False) if each else "" for each in (tools, variables))
        day = datetime.date.today()
        today = f"{day.day:02} {MONTHS[day.month - 1]} {day.year}"
        found: list[tuple[str, list[Range]]] = self._template.trained_texts(
            json.dumps(messages, ensure_ascii=False), chosen, given, more, today
        )
        return found

    def tokens(self, text: str, trained: list[Range]) -> dict[str, list[int]]:
        """A token that contains a byte of a trained range is trained."""
        ids, ranges = self._served_tokens(text.encode(), trained[-1][0])
        mask = [int(any(begin < right and left < end for left, right in trained)) for begin, end in ranges]
        return {"input_ids": ids, "assistant_masks": mask}

    def _encoded(self, text: bytes) -> tuple[list[int], list[Range]]:
        encoded = self._service.encode(text.decode(), special=False)
        if text and not encoded["ranges"]:
            raise ValueError("the tokenizer must map tokens to characters for assistant_only_loss; load a fast tokenizer.")
        return encoded["ids"], encoded["ranges"]

    def _served_tokens(self, text: bytes, begin: int) -> tuple[list[int], list[Range]]:
        """White space before and behind the last answer's `begin` may be one token, which no server sends: then both are encoded apart."""
        ids, ranges = self._encoded(text)
        across = next(((left, right) for left, right in ranges if left < begin < right), None)
        if across is None or text[across[0] : across[1]].decode(errors="replace").strip():
            return ids, ranges
        head, answer = self._encoded(text[:begin]), self._encoded(text[begin:])
        end = 0
        for i, (left, right) in enumerate(answer[1]):
            # A tokenizer that puts a space in front of every text cannot encode the answer alone.
            if i and left < end and not text[begin : begin + right].decode(errors="replace").strip():
                return ids, ranges
            end = right
        return head[0] + answer[0], head[1] + [(left + begin, right + begin) for left, right in answer[1]]


def _conversation(example: dict[str, Any], completion_only: bool | None) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages, and which answers are trained."""
    prompt = example.get("prompt") or []
    messages = [*prompt, *example["completion"]] if prompt else example["messages"]
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    first = len(prompt) if completion_only in (None, True) else 0
    return messages, [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]


def prepared(dataset: Any, args: Any, tokenizer: Any) -> Any:
    """The rows of a data set of conversations as `input_ids` and `assistant_masks`; other data sets unchanged."""
    first = next(iter(dataset), None)
    if first is None or "input_ids" in first or not (is_conversational(first) or is_conversational_from_value(first)):
        return dataset

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        answers = Answers(tokenizer)  # here, as a process of its own may run it
        out: dict[str, list[list[int]]] = {"input_ids": [], "assistant_masks": []}
        for values in zip(*batch.values(), strict=True):
            example = maybe_convert_to_chatml(dict(zip(batch, values, strict=True)))
            messages, wanted = _conversation(example, args.completion_only_loss)
            if not wanted:
                raise ValueError(
                    "a conversation of assistant_only_loss must have a message of the assistant to train; one has none."
                )
            tools = example.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            variables = dict(example.get("chat_template_kwargs") or {})
            samples = answers.samples(messages, wanted, tools or None, variables)
            for i in wanted:
                thoughts = _thoughts_of(messages[i]).strip()
                if not any(thoughts in text for text, _ in samples):
                    raise ValueError(
                        f"the chat template must write the thoughts of an answer; it leaves out {thoughts[:40]!r} of message {i}. Put "
                        "them into 'content' between <think> and </think>, or remove them."
                    )
            for text, trained in samples:
                for key, value in answers.tokens(text, trained).items():
                    out[key].append(value)
        return out

    options: dict[str, Any] = {"batched": True, "remove_columns": list(first)}
    if hasattr(dataset, "num_rows"):
        options |= {"num_proc": args.dataset_num_proc, "desc": "Tokenizing the assistant's turns"}
    rows = dataset.map(tokenize, **options)
    if hasattr(dataset, "num_rows"):
        if len(rows) != len(dataset):
            _log.info(
                "The chat template rewrites earlier turns: %d conversations became %d samples, each as it is served.",
                len(dataset),
                len(rows),
            )
        ends = set(tokenizer.get_added_vocab().values())
        if not any(_last_trained(row) in ends for row in itertools.islice(rows, 1000)):
            _log.warning(
                "No answer ends in a special token, so the model does not learn to stop. Check the end of a turn in the chat template."
            )
    return rows


def _last_trained(row: dict[str, list[int]]) -> int | None:
    pairs = zip(reversed(row["input_ids"]), reversed(row["assistant_masks"]), strict=True)
    return next((token for token, trained in pairs if trained), None)
