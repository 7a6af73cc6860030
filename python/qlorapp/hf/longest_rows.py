# SPDX-License-Identifier: Apache-2.0
"""The longest rows of a data set, for plans and for the largest micro-batch."""

import contextlib
import heapq
import random
from collections.abc import Iterator, Mapping
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none
import numpy
import pyarrow.compute  # type: ignore[import-untyped]  # it has none
import torch

from .rows import is_indexed


def lengths(data: Any, may_read: bool) -> list[int] | None:
    """Tokens of each row. None if they are not known before the rows come.

    may_read: reads rows that are made as they are read.
    """
    if not is_indexed(data):
        return None
    if isinstance(data, datasets.Dataset):
        if "input_ids" not in data.column_names or data.format["type"] == "custom":
            return None
        batches = data.select_columns("input_ids").with_format("arrow").iter(10_000)
        return [n for batch in batches for n in pyarrow.compute.list_value_length(batch.column("input_ids")).to_pylist()]
    if not may_read and not isinstance(data, list | tuple):
        return None
    found = []
    for i in range(len(data)):
        row = data[i]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return None
        found.append(len(row["input_ids"]))
    return found


def of_plan(trainer: Any) -> int | None:
    """The tokens of the longest row, at most max_length of the arguments. None: not known before the rows come."""
    found = lengths(trainer.get_train_dataloader().dataset, may_read=True)
    if found is not None:
        return max(found, default=0)
    most = getattr(trainer.args, "max_length", None)
    return None if most is None else int(most)


def largest_batch(trainer: Any) -> Any:
    """The micro-batch of a trainer's longest rows, collated; None if they are not known. A collator may draw random numbers, which come again."""
    loader = trainer.get_train_dataloader()
    found = lengths(loader.dataset, may_read=False)
    if not found:
        return None
    longest = heapq.nlargest(trainer._train_batch_size, range(len(found)), key=found.__getitem__)
    with _same_random_numbers():
        return loader.collate_fn([loader.dataset[i] for i in longest])


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    of_python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.random.set_rng_state(of_torch)
