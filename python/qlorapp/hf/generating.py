# SPDX-License-Identifier: Apache-2.0
"""Answers to many prompts at once, in C++."""

import dataclasses
import logging
import numbers
import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..memory import _bytes
from ..precision import own_dtypes
from .forward import engine_of, served

Message = dict[str, Any]

_log = logging.getLogger("qlorapp")

_UNSET = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class Answer:
    #: Without special tokens.
    text: str
    token_ids: list[int]
    #: "stop" (a token or one of stop_strings ended the text, and is in it) or "length".
    finish_reason: str
    prompt_tokens: int


class Answers(list[Answer]):
    """In the order of the prompts."""

    #: From the first pass to the last token.
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self) / self.seconds


def generate(
    model: Any,
    prompts: str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]] | Sequence[Sequence[int]],
    tokenizer: Any = None,
    *,
    system: str = "",
    raw: bool = False,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    do_sample: bool | None = None,
    temperature: float | None = 1.0,
    top_k: int | None = 0,
    top_p: float | None = 1.0,
    min_p: float | None = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 42,
    stop_strings: str | Sequence[str] = (),
    max_rows: int = 128,
    cache_memory: int | str = 0,
    deterministic: bool = False,
    fits_positions: bool | None = None,
) -> Answers:
    """Answers prompts as `qlorapp generate` does: rows that end make room for those that wait, and common beginnings are computed
    and stored once.

    Args:
        model: of transformers or PEFT. One that C++ does not compute answers row by row through its own generate().
        prompts: one or several: strings (a user's message each if the tokenizer has a chat template), conversations, or lists of token ids.
        tokenizer: None loads the one that lies beside the model.
        system: a message in front of strings and of conversations that do not begin with one.
        raw: strings are continued as they are.
        max_new_tokens: of each answer. None: 128, or fewer where the model has no more positions.
        do_sample: None means True with temperature, top_k, top_p or min_p, of which each may be None, as in transformers. Samples follow `seed` and the prompt's place in the list.
        stop_strings: an answer ends with the token that completes one of them, as in transformers' generate(); the string stays in the
            text. One that never ends an answer is logged.
        max_rows: computed at once, at most.
        cache_memory: bytes of keys and values, at most, or as "4GB". 0: the memory that is free on the model's device, less a tenth.
        deterministic: rows are computed one after the other, so that each has the bits of its prompt alone. Slower with several prompts.
        fits_positions: an answer has as many tokens as the model's positions leave it, if those are fewer than max_new_tokens. None: without
            max_new_tokens.

    Raises:
        ValueError: for an option out of range, a prompt that with max_new_tokens has more tokens than the model has positions, or a row that
            cache_memory does not hold.
        TypeError: for a model or prompts of another form, or an option of another type.
    """
    if not hasattr(model, "generation_config"):
        raise TypeError(f"[generate] model must be a model of transformers or PEFT that generates; got {type(model).__name__}.")
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    most = 128 if max_new_tokens is None else max_new_tokens
    warpers: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    warpers = {name: _UNSET[name] if value is None else value for name, value in warpers.items()}
    sampling: dict[str, Any] = {"do_sample": do_sample, **warpers, "repetition_penalty": repetition_penalty}
    if do_sample is None:
        sampling["do_sample"] = warpers != _UNSET
    counts = {
        "max_new_tokens": most,
        "min_new_tokens": min_new_tokens,
        "max_rows": max_rows,
        "top_k": warpers["top_k"],
        "seed": seed,
    }
    for name, count in counts.items():
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise TypeError(f"[generate] {name} must be an integer; got {count!r}.")
        if name != "seed" and not -(2**63) <= count < 2**63:
            raise ValueError(f"[generate] {name} must be below 2^63; got {count}.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"[generate] seed must be in [0, 2^64); got {seed}.")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if isinstance(sampling[name], bool) or not isinstance(sampling[name], numbers.Real):
            raise TypeError(f"[generate] {name} must be a number; got {sampling[name]!r}.")
    texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"[generate] stop_strings must be a string or a list of them; got {stop_strings!r}.")
    rows = [_ids_of(prompt, tokenizer, system, raw) for prompt in _as_list(prompts)]
    fits = max_new_tokens is None if fits_positions is None else fits_positions
    options = _C.SamplingOptions(**sampling, seed=seed)
    ends = ends_of(model, tokenizer)
    stops = _C.StopStrings(texts, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    for number, row in enumerate(rows):
        stops.begin(number, row)
    base = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    engine, found = engine_of(base), None
    began = time.perf_counter()
    if engine is not None and engine.enabled and not _has_virtual_tokens(model):
        with torch.no_grad(), engine.loop, own_dtypes(engine.core.device):
            # Outside of served(): what C++ refuses here, transformers is not to try.
            if served(engine, base, lambda: True):
                found = _C.generate(
                    engine.core, rows, max_new_tokens=most, min_new_tokens=min_new_tokens, eos_token_ids=ends,
                    sampling=options, on_token=(lambda row, token: not stops.add(row, token)) if texts else None, max_rows=max_rows,
                    cache_bytes=_bytes("cache_memory", cache_memory) or 0, deterministic=deterministic, fits_positions=fits,
                )  # fmt: skip
    if found is None:
        torch.manual_seed(seed)
        limit = getattr(model.config, "max_position_embeddings", None) if fits else None
        found = []
        for number, row in enumerate(rows):
            own = most if limit is None else max(1, min(most, limit - len(row)))
            given = {**sampling, "max_new_tokens": own, "min_new_tokens": min_new_tokens}
            found.append(_through_transformers(model, row, ends, _Stops(stops, number), given))
    seconds = time.perf_counter() - began
    for line in stops.unmatched():
        _log.warning("[generate] %s", line)
    answers = Answers()
    for number, (row, new) in enumerate(zip(rows, found, strict=True)):
        stopped = new[-1] in ends or stops.ended(number)
        text = tokenizer.decode(new, skip_special_tokens=True)
        answers.append(Answer(text, new, "stop" if stopped else "length", len(row)))
    answers.seconds = seconds
    return answers


def _as_list(prompts: Any) -> list[Any]:
    """Of prompts; one alone becomes a list."""
    prompts = _plain(prompts)
    if not isinstance(prompts, Sequence):
        raise TypeError(f"[generate] prompts must be a string or a list; got {type(prompts).__name__}. {_FORMS}")
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (dict, numbers.Integral)))
    return [prompts] if one else list(prompts)


def _plain(tokens: Any) -> Any:
    """A tensor or an array as lists."""
    return tokens.tolist() if hasattr(tokens, "tolist") else tokens


#: What a prompt may be.
_FORMS = "A prompt is a string, a list of messages ({'role': ..., 'content': ...}), or a list of token ids."


def _ids_of(prompt: Any, tokenizer: Any, system: str, raw: bool) -> list[int]:
    if isinstance(prompt, str):
        if raw or tokenizer.chat_template is None:
            if system:
                raise ValueError("[generate] system needs a tokenizer with a chat template, and raw=False.")
            return list(tokenizer(prompt)["input_ids"])
        prompt = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    prompt = _plain(prompt)
    if not isinstance(prompt, Sequence) or not all(isinstance(one, dict) or hasattr(one, "__index__") for one in prompt):
        raise TypeError(f"[generate] a prompt has another form: {prompt!r:.80}. {_FORMS}")
    if len(prompt) > 0 and isinstance(prompt[0], dict):
        if not all(isinstance(message, dict) and "role" in message for message in prompt):
            raise TypeError(f"[generate] a message must have a role; got {prompt!r:.80}. {_FORMS}")
        if system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
    return [int(token) for token in prompt]


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return ends if tokenizer.eos_token_id in ends or tokenizer.eos_token_id is None else [*ends, tokenizer.eos_token_id]


def _has_virtual_tokens(model: Any) -> bool:
    return any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())


class _Stops:
    """A stopping criterion of transformers over one row."""

    def __init__(self, stops: _C.StopStrings, row: int) -> None:
        self._stops, self._row = stops, row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([self._stops.add(self._row, int(input_ids[0, -1]))], device=input_ids.device)


def _through_transformers(model: Any, row: list[int], ends: list[int], stops: _Stops, given: dict[str, Any]) -> list[int]:
    ids = torch.tensor([row], device=model.device)
    if not given["do_sample"]:
        given = {**given, **dict.fromkeys(_UNSET)}
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        stopping_criteria=[stops],
        **given,
    )
    return list(out[0, len(row) :].tolist())
