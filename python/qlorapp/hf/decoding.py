# SPDX-License-Identifier: Apache-2.0
"""generate()'s loop over tokens in C++, for a call that has nothing but what C++'s loop knows."""

import math
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria

from .. import _C
from ..precision import own_dtypes
from . import passes
from .cache import CACHE, EngineCache
from .engine import Engine
from .pristine import why_not

#: What C++ does to logits, in its order, which is transformers'.
_KNOWN = (
    logits_process.RepetitionPenaltyLogitsProcessor, logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor, logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper, logits_process.MinPLogitsWarper,
)  # fmt: skip
_FIRST_WARPER = 3
#: The loop asks these after each token of a single row. A criterion of a user's own might change the model between tokens.
_ASKED = (stopping_criteria.MaxTimeCriteria, stopping_criteria.StopStringCriteria)


class Beyond(Exception):
    """Why C++'s loop does not compute a call."""


def generated(
    engine: Engine, model: Any, ids: torch.Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, given: dict[str, Any]
) -> torch.Tensor:  # fmt: skip
    """input_ids (B, T) with the new tokens behind them, as transformers' loop returns them.

    The arguments are those of that loop; given: of forward. Samples are torch's draws. @raises Beyond
    """
    if not engine.loop.acquire(blocking=False):
        raise Beyond("another thread generates")
    try:
        return _generated(engine, model, ids, processors, criteria, config, streamer, given)
    finally:
        engine.loop.release()


def _generated(
    engine: Engine, model: Any, ids: torch.Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, given: dict[str, Any]
) -> torch.Tensor:  # fmt: skip
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise Beyond("input_ids are no rows of tokens")
    cache, (rows, columns) = given.get(CACHE), ids.shape
    if not isinstance(cache, EngineCache) or not cache.is_private or cache.is_initialized:
        raise Beyond("the cache is given or returned, or not the engine's")
    if streamer is not None and rows > 1:
        raise Beyond("a streamer of several rows")
    if reason := passes.beyond(engine, model, {"input_ids": ids, **given}) or why_not(engine, model, needs_gradients=False):
        raise Beyond(reason)
    try:
        padding = passes.left_padding(given, rows, columns)
    except ValueError as error:
        raise Beyond(str(error)) from None
    most, ends, asked = _ends(criteria, columns, rows)
    pad = config._pad_token_tensor
    if ends and pad is None:
        raise Beyond("pad_token_id is None")
    if columns - min(padding) + most > engine.core.position_limit:
        raise Beyond("rows may get longer than the model's positions")
    sampling, least = _sampling(processors, config.do_sample, columns, padding, ends)
    heard = _Heard(engine, model, ids, most, streamer, asked) if streamer is not None or asked else None
    prompts = [row[begin:] for row, begin in zip(ids.tolist(), padding, strict=True)]
    random = _Random(engine.core.device) if config.do_sample else None
    try:
        with own_dtypes(engine.core.device):
            found = _C.generate(
                engine.core, prompts, max_new_tokens=most, min_new_tokens=least, eos_token_ids=ends, on_token=heard,
                sampling=_C.SamplingOptions(**sampling, do_sample=config.do_sample, torch_draws=True), max_rows=rows,
            )  # fmt: skip
    except (ValueError, torch.OutOfMemoryError) as error:  # such as a row whose most tokens the memory does not hold
        if heard is not None and heard.has_any:
            raise
        if random is not None:
            random.put_back()
        raise Beyond(str(error)) from None
    longest = max(map(len, found))
    new = torch.tensor([row + [int(pad)] * (longest - len(row)) if len(row) < longest else row for row in found])
    if streamer is not None:
        streamer.end()
    return torch.cat([ids, new.to(ids.device)], -1)


def _ends(criteria: Any, columns: int, rows: int) -> tuple[int, list[int], list[Any]]:
    """The most new tokens, the tokens that end a row, and the criteria to ask after each token."""
    most: list[int] = []
    ends: list[int] = []
    asked = []
    for one in criteria:
        if type(one) is stopping_criteria.MaxLengthCriteria:
            most.append(max(one.max_length - columns, 1))
        elif type(one) is stopping_criteria.EosTokenCriteria:
            ends += one.eos_token_id.flatten().tolist()
        elif type(one) in _ASKED and rows == 1:
            asked.append(one)
        else:
            raise Beyond(type(one).__name__)
    if not most:
        raise Beyond("no length ends a row")
    return min(most), ends, asked


def _sampling(
    processors: Any, do_sample: bool, columns: int, padding: list[int], ends: list[int]
) -> tuple[dict[str, Any], int]:
    """C++'s options for these processors, and the least new tokens."""
    unknown = [type(one).__name__ for one in processors if type(one) not in _KNOWN]
    if unknown:
        raise Beyond(", ".join(unknown))
    places = [_KNOWN.index(type(one)) for one in processors]
    if places != sorted(set(places)):
        raise Beyond("logits processors in another order")
    if places and places[-1] >= _FIRST_WARPER and not do_sample:
        raise Beyond("warpers without do_sample")
    options: dict[str, Any] = {}
    least = 0
    for place, one in zip(places, processors, strict=True):
        if getattr(one, "filter_value", -math.inf) != -math.inf or getattr(one, "min_tokens_to_keep", 1) != 1:
            raise Beyond(f"{type(one).__name__} with options of its own")
        if place == 0:
            ignored = one.prompt_ignore_length  # a count per row, of padding
            if (ignored.tolist() if isinstance(ignored, torch.Tensor) else [ignored or 0] * len(padding)) != padding:
                raise Beyond("repetition_penalty over a part of the prompt")
            options["repetition_penalty"] = one.penalty
        elif place < _FIRST_WARPER:
            if set(one.eos_token_id.flatten().tolist()) != set(ends):
                raise Beyond("min_length for other tokens than those that end a row")
            until = one.min_length if place == 1 else one.prompt_length_to_skip + one.min_new_tokens
            least = max(least, until - columns)
        else:
            name = ("temperature", "top_k", "top_p", "min_p")[place - _FIRST_WARPER]
            options[name] = getattr(one, name)
    return options, least


class _Random:
    """The state of torch's generator of a device."""

    def __init__(self, device: torch.device) -> None:
        self._of = torch.cuda if device.type == "cuda" else torch
        self._where = {"device": device} if device.type == "cuda" else {}
        self._state = self._of.get_rng_state(**self._where)

    def put_back(self) -> None:
        self._of.set_rng_state(self._state, **self._where)


class _Heard:
    """Passes the tokens of one row to streamer and criteria."""

    def __init__(self, engine: Engine, model: Any, ids: torch.Tensor, most: int, streamer: Any, criteria: list[Any]) -> None:
        self._engine, self._model, self._checks = engine, model, engine.checks
        self._row = torch.cat([ids.cpu(), torch.zeros(1, most, dtype=torch.long)], -1)
        self._begin = self._length = ids.shape[1]
        self._streamer, self._criteria = streamer, criteria
        self._kind = ids.device.type  # autocast is off around the loop, and not for what the caller passed
        self._autocast = torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)

    @property
    def has_any(self) -> bool:
        return self._length > self._begin

    def __call__(self, row: int, token: int) -> bool:
        enabled, dtype = self._autocast
        with torch.autocast(self._kind, dtype=dtype, enabled=enabled):
            return self._hear(token)

    def _hear(self, token: int) -> bool:
        self._row[0, self._length] = token
        self._length += 1
        ended = [bool(one(self._row[:, : self._length], None)) for one in self._criteria]
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self._engine.checks != self._checks:  # the streamer used the model, perhaps with another adapter
            if reason := why_not(self._engine, self._model, needs_gradients=False):
                raise RuntimeError(f"[generate] the streamer changed the model: {reason}.")
            self._checks = self._engine.checks
        return not any(ended)
