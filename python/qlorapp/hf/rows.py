# SPDX-License-Identifier: Apache-2.0
"""Rows and batches of a trainer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none
import torch

#: Keys of batches that are read here.
_READ = {"input_ids", "labels", "attention_mask", "position_ids"}
#: Keys of packed batches that repeat their position_ids.
REPEATED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths"}


def is_indexed(data: Any) -> bool:
    """Whether rows can be read by their number. A streamed data set has a __getitem__ for columns."""
    is_stream = isinstance(data, (torch.utils.data.IterableDataset, datasets.IterableDataset))
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_stream


@dataclasses.dataclass(frozen=True)
class OfOneLength:
    """A trainer's default collator, for rows of any length: those with a label per token are padded on the right, by TRL's collator.

    Other rows go to `theirs`: those with one label, with position_ids (of packed rows), or padded already.
    """

    theirs: Callable[[list[Any]], Any]
    pad_id: int

    def __call__(self, rows: list[Any]) -> Any:
        if not all(map(_has_label_per_token, rows)) or len({len(row["input_ids"]) for row in rows}) == 1:
            return self.theirs(rows)
        from trl.trainer import sft_trainer  # not at the top: only these rows need it

        return sft_trainer.DataCollatorForLanguageModeling(self.pad_id)(
            [{name: list(row[name]) for name in ("input_ids", "labels")} for row in rows]
        )


def _has_label_per_token(row: Any) -> bool:
    if not isinstance(row, Mapping) or not _READ - {"position_ids"} >= row.keys() >= {"input_ids", "labels"}:
        return False
    labels = row["labels"]
    if not isinstance(labels, Sequence) and getattr(labels, "ndim", 0) != 1:
        return False
    return len(labels) == len(row["input_ids"]) and 0 not in row.get("attention_mask", ())
