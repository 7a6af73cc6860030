# SPDX-License-Identifier: Apache-2.0
"""What steps and evaluations in Python do when memory runs out: the batch is taken in parts, and nothing of the result changes.

The C++ loop does the same by itself (src/train/trainer_step.cpp); this is for what people have overridden, and for foreign models.
"""

import copy
import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch

_log = logging.getLogger("qlorapp")

#: Of errors without a type: torch's allocator for CPUs, the driver asked for pinned memory, cuBLAS. include/qlorapp/ops/device_memory.hpp.
_WORDS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation fail?"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def release_cached_memory(device: torch.device) -> None:
    """What nobody holds any more goes back to the driver. Call it behind the except block: the error holds its frames' tensors."""
    gc.collect()  # graphs that failed half-way may hold themselves
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rows_in(batch: Any) -> int | None:
    """How many rows a batch has that can be taken apart: a mapping whose tensors all have one entry a row. None: it is none."""
    if not isinstance(batch, Mapping):
        return None
    sizes = {value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def parts_of(batch: Any, most: int) -> list[Any]:
    """The batch in parts of at most `most` rows, which are views; whole for 0, and where it cannot be taken apart.

    Mappings are copies, as overrides take entries out of them.
    """
    rows = rows_in(batch)
    if most <= 0 or rows is None or rows <= most:
        return [copy.copy(batch) if isinstance(batch, Mapping) else batch]

    def part(begin: int) -> Any:
        chosen = slice(begin, begin + most)
        made = copy.copy(batch)  # of its own kind: overrides may read attributes of a BatchEncoding
        for key, value in batch.items():
            per_row = (isinstance(value, torch.Tensor) and value.dim() > 0) or (
                isinstance(value, (list, tuple)) and len(value) == rows
            )
            made[key] = value[chosen] if per_row else value
        return made

    return [part(begin) for begin in range(0, rows, most)]


class RandomState:
    """Torch's generators as they are now, for work that is taken again from here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)


class Work:
    """What is done with some batches, by parts_of each, and can be done again from its beginning."""

    batches: list[Any]

    def attempt(self) -> Any:
        raise NotImplementedError

    def start_again(self) -> None:
        """Takes back what a failed attempt has left."""

    def may_repeat(self) -> bool:
        """False where the error was a caller's own."""
        return True

    def why_whole(self) -> str | None:
        """Why the result would not be that of the parts; None if it is."""
        return None

    def way_out(self, rows: int) -> str:
        """What to do where so many rows at once do not fit."""
        raise NotImplementedError

    def made_smaller(self, rows: int) -> None:
        """From now on so many rows are taken at once."""


class InParts:
    """How many rows are taken at once: all of a batch until memory runs out, fewer from then on."""

    def __init__(self, where: str, device: torch.device) -> None:
        self._where, self._device = where, device
        self.most = 0  #: 0: as many as a batch has.

    def run(self, work: Work) -> Any:
        """work.attempt(), as often as it takes.  @raises torch.OutOfMemoryError if one row, or what must stay whole, does not fit."""
        state, again = RandomState(self._device), False
        while True:
            try:
                return work.attempt()
            except Exception as error:
                if not is_out_of_memory(error) or not work.may_repeat():
                    raise
                reason = first_line(error)
            release_cached_memory(self._device)
            work.start_again()
            state.restore()
            again = self._make_room(work, reason, again)

    def _make_room(self, work: Work, reason: str, again: bool) -> bool:
        """Whether the same is tried once more, as something else may have held the memory."""
        sizes = [rows_in(batch) for batch in work.batches]
        fullest = max(min(rows or 1, self.most or rows or 1) for rows in sizes)
        why_whole = None  # asked of what could be taken apart: the answer may take a row's forward pass
        if fullest > 1:
            why_whole = "not every tensor of a batch has one entry a row" if None in sizes else work.why_whole()
        if why_whole is None and fullest > 1:
            self.most = (fullest + 1) // 2
            _log.warning(
                "[%s] out of memory with %d rows at once (%s). From here on batches are taken in parts of at most %d; the effective batch and "
                "the weights of targets stay what they were.", self._where, fullest, reason, self.most,
            )  # fmt: skip
            work.made_smaller(self.most)
            return False
        if not again:
            return True
        held = "one row" if fullest == 1 else f"{fullest} rows"
        apart = f" They cannot be taken in parts: {why_whole}." if why_whole is not None else ""
        raise torch.OutOfMemoryError(
            f"[{self._where}] out of memory with {held} at once.{apart} {work.way_out(fullest)} {reason}"
        )
