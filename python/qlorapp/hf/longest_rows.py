# SPDX-License-Identifier: Apache-2.0
"""The longest rows of a data set, for plans and for the largest micro-batch."""

import heapq
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none
import pyarrow.compute  # type: ignore[import-untyped]  # it has none

from .rows import is_indexed


def lengths(data: Any, may_read: bool) -> list[int] | None:
    """Tokens of each row. None if they are not known before the rows come.

    may_read: reads rows that cannot be measured otherwise.
    """
    if not is_indexed(data):
        return None
    if isinstance(data, datasets.Dataset):
        if "input_ids" not in data.column_names or data.format["type"] == "custom":
            return None
        batches = data.select_columns("input_ids").with_format("arrow").iter(10_000)
        return [n for batch in batches for n in pyarrow.compute.list_value_length(batch.column("input_ids")).to_pylist()]
    if not may_read:
        return None
    rows = [data[i] for i in range(len(data))]
    return [len(row["input_ids"]) for row in rows] if all("input_ids" in row for row in rows) else None


def of_plan(trainer: Any) -> int:
    """The tokens of the longest row. @raises ValueError if they are not known before the rows come, and no argument says it."""
    found = lengths(trainer.get_train_dataloader().dataset, may_read=True)
    if found is not None:
        return max(found, default=0)
    most = getattr(trainer.args, "max_length", None)
    if most is None:
        raise ValueError(
            "[Trainer] memory_budget and auto_find_batch_size plan for the longest row, and the rows are not known before they come. Train on a "
            "data set that has a length and input_ids, or by SFTTrainer with max_length; or leave them out."
        )
    return int(most)


def largest_batch(trainer: Any) -> Any:
    """The micro-batch of a trainer's longest rows, collated; None if they are not known."""
    loader = trainer.get_train_dataloader()
    found = lengths(loader.dataset, may_read=False)
    if not found:
        return None
    longest = heapq.nlargest(trainer._train_batch_size, range(len(found)), key=found.__getitem__)
    return loader.collate_fn([loader.dataset[i] for i in longest])
