# SPDX-License-Identifier: Apache-2.0
"""The engine's keys and values as a transformers cache."""

import dataclasses
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import _C

#: The cache's name in forward's arguments and outputs: "cache" since transformers 5.24.
CACHE = next(field.name for field in dataclasses.fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


class EngineCache(Cache):
    """generate()'s cache while the engine computes: rows without padding, in C++.

    generate() reorders, repeats, selects and crops it as any cache. transformers' forward cannot read it; as_dynamic() converts it.
    """

    def __init__(self, core: Any, rows: int, capacity: int, private: bool = False) -> None:
        """private: one call of generate() owns the cache, and no one else sees it."""
        super().__init__(layers=[])
        self._core, self._rows, self._capacity = core, rows, capacity
        self.is_private = private
        #: The number of the engine's check that the last pass of a private cache relied on.
        self.check = -1
        #: None until the first tokens arrive; they set the number of rows.
        self.held: _C.GenerationCache | None = None
        #: Positions of the padded rows so far, and the left padding of each row.
        self.columns = 0
        self.padding: list[int] = []

    def forward(self, input_ids: torch.Tensor, counts: list[int], every_token: bool) -> torch.Tensor:
        """Appends tokens (M,) of all rows, end to end. Returns hidden states (rows, D), or (M, D) with every_token."""
        if self.held is None:
            self.held = _C.make_cache(self._core, len(counts), max(self._capacity, max(counts)))
            self.held.adapters_are_constant = self.is_private
        return _C.forward_cached(self._core, self.held, input_ids, counts, every_token)

    def __bool__(self) -> bool:
        return True  # transformers tests whether there is a cache; len() counts layers, of which this one has none

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # of no layers transformers would conclude that all are linear, and pass the whole prompt again

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.held is not None

    @property
    def is_croppable(self) -> bool:
        return True

    def reset(self) -> None:
        self.held, self.columns, self.padding = None, 0, []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.padding)) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        if self.held is not None:
            self.held.select_rows(rows)
            self.padding = [self.padding[row] for row in rows]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove positions: transformers passes a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(f"[cache] crop() requires a negative number of positions to remove; got {tokens_to_remove}.")
        if self.held is not None and tokens_to_remove < 0:
            self.held.remove_last(-tokens_to_remove)
            self.columns += tokens_to_remove

    def return_to(self, columns: int) -> None:
        """Restores the state with that many positions."""
        if columns == 0:
            self.reset()
        else:
            self.crop(columns - self.columns)

    def as_dynamic(self, config: Any) -> DynamicCache:
        """A copy for transformers' forward, with rows padded on the left again."""
        cache = DynamicCache(config=config)
        if self.held is None:
            return cache
        lengths = self.held.lengths
        slots: Any  # torch has no types for unflatten
        for layer, (keys, values) in enumerate(self.held.blocks()):
            padded = []
            for slots in (keys, values):
                rows = slots.unflatten(0, (len(lengths), -1))
                grid = slots.new_zeros((len(lengths), self.columns, *slots.shape[1:]))
                for row, length in enumerate(lengths):
                    grid[row, self.padding[row] :] = rows[row, :length]
                padded.append(grid.transpose(1, 2).contiguous())
            cache.update(padded[0], padded[1], layer)
        return cache
