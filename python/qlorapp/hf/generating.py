# SPDX-License-Identifier: Apache-2.0
"""Answers to many prompts at once, in C++."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from .forward import engine_of, served

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    #: Without special tokens.
    text: str
    token_ids: list[int]
    #: "stop" (a token that ends the text, which is in token_ids) or "length".
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
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    do_sample: bool | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 42,
    max_rows: int = 128,
    cache_memory: int = 0,
) -> Answers:
    """Answers prompts as `qlorapp generate` does: rows that end make room for those that wait, and common beginnings are computed once.

    Args:
        model: of transformers or PEFT. One that C++ does not compute answers row by row through its own generate().
        prompts: one or several: strings (a user's message each if the tokenizer has a chat template), conversations, or lists of token ids.
        tokenizer: None loads the one that lies beside the model.
        system: a message in front of strings.
        raw: strings are continued as they are.
        do_sample: None means True with temperature, top_k, top_p or min_p. Samples follow `seed` and the prompt's place in the list.
        max_rows: computed at once, at most.
        cache_memory: bytes of keys and values, at most. 0: what is free of a GPU.

    Raises:
        ValueError: for an option out of range, or a row that cache_memory does not hold.
    """
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    rows = [_ids_of(prompt, tokenizer, system, raw) for prompt in _as_list(prompts)]
    if do_sample is None:
        do_sample = (temperature, top_k, top_p, min_p) != (1.0, 0, 1.0, 0.0)
    sampling: dict[str, Any] = {
        "do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    options = _C.SamplingOptions(**sampling, seed=seed)
    ends = _ends_of(model, tokenizer)
    base = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    engine, found = engine_of(base), None
    began = time.perf_counter()
    with torch.no_grad():
        # Outside of served(): what C++ refuses here, transformers is not to try.
        if engine is not None and engine.enabled and not _has_virtual_tokens(model) and served(engine, base, lambda: True):
            found = _C.generate(
                engine.core, rows, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, eos_token_ids=ends,
                sampling=options, max_rows=max_rows, cache_bytes=cache_memory,
            )  # fmt: skip
        if found is None:
            torch.manual_seed(seed)
            given = {**sampling, "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens}
            found = [_through_transformers(model, row, ends, given) for row in rows]
    seconds = time.perf_counter() - began
    answers = Answers(
        Answer(tokenizer.decode(new, skip_special_tokens=True), new, "stop" if new[-1] in ends else "length", len(row))
        for row, new in zip(rows, found, strict=True)
    )
    answers.seconds = seconds
    return answers


def _as_list(prompts: Any) -> list[Any]:
    """Of prompts; one alone becomes a list."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (dict, int)))
    return [prompts] if one else list(prompts)


def _ids_of(prompt: Any, tokenizer: Any, system: str, raw: bool) -> list[int]:
    if isinstance(prompt, str):
        if raw or tokenizer.chat_template is None:
            if system:
                raise ValueError("[generate] system needs a tokenizer with a chat template, and raw=False.")
            return list(tokenizer(prompt)["input_ids"])
        prompt = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    if len(prompt) > 0 and isinstance(prompt[0], dict):
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
    return [int(token) for token in prompt]


def _ends_of(model: Any, tokenizer: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return ends if tokenizer.eos_token_id in ends or tokenizer.eos_token_id is None else [*ends, tokenizer.eos_token_id]


def _has_virtual_tokens(model: Any) -> bool:
    return any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())


def _through_transformers(model: Any, row: list[int], ends: list[int], given: dict[str, Any]) -> list[int]:
    ids = torch.tensor([row], device=model.device)
    sampling = ("temperature", "top_k", "top_p", "min_p")
    if not given["do_sample"]:
        given = {**given, **dict.fromkeys(sampling)}
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **given,
    )
    return list(out[0, len(row) :].tolist())
