# SPDX-License-Identifier: Apache-2.0
"""Reads rows through the trainer's collator, for C++: tokens, labels, and the lengths of packed rows."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none
import torch
import transformers

#: transformers' collators that give a row the same tokens and labels alone and in a batch. Subclasses are excluded.
_OF_TRANSFORMERS = (
    transformers.DefaultDataCollator, transformers.DataCollatorWithPadding, transformers.DataCollatorForLanguageModeling,
    transformers.DataCollatorForSeq2Seq, transformers.DataCollatorWithFlattening,
)  # fmt: skip
#: Keys of batches that are read here.
_READ = {"input_ids", "labels", "attention_mask", "position_ids"}
#: Keys of packed batches that repeat their position_ids.
REPEATED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths"}
_IGNORED = -100


class OtherRowsError(Exception):
    """C++ would read the rows differently than transformers; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row without padding."""

    input_ids: list[int]
    labels: list[int]
    #: Lengths of the packed rows; a single length: not packed.
    lengths: list[int]


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


def is_known(collator: Any) -> bool:
    """Whether the collator can make rows one at a time."""
    if isinstance(collator, OfOneLength):
        collator = collator.theirs
    kind = type(collator)
    if collator is transformers.default_data_collator or kind in _OF_TRANSFORMERS:
        return not getattr(collator, "mlm", False)
    loaded = sys.modules.get("trl.trainer.sft_trainer")
    return loaded is not None and kind is loaded.DataCollatorForLanguageModeling


def read(dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int) -> list[Row]:
    """Reads every row of a data set. @raises OtherRowsError with the reason."""
    rows = []
    for i in range(len(dataset)):
        found = rows_in(collate([dataset[i]]))
        if len(found) != 1:
            raise OtherRowsError(f"row {i} of the data set is collated into {len(found)}")
        rows.append(found[0])
    if batch_size > 1 and len(rows) > 1:
        _check_batching(dataset, collate, rows, batch_size)
    return rows


def _check_batching(dataset: Any, collate: Callable[[list[Any]], Any], rows: list[Row], batch_size: int) -> None:
    """Checks that a batch of the longest and shortest rows equals them alone: left padding makes other targets."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    first_counts = [i for i in order if rows[i].labels[0] != _IGNORED]
    some = list(dict.fromkeys([*first_counts[:1], *order[:1], *reversed(order[1:])]))[:batch_size]
    try:
        together = rows_in(collate([dataset[i] for i in some]))
    except ValueError as error:
        raise OtherRowsError(f"the collator cannot put rows of different lengths into a batch: {error}") from None
    if _laid_out(together) != _laid_out([rows[i] for i in some]):
        raise OtherRowsError("the collator makes different rows in a batch and one by one")


def _laid_out(rows: list[Row]) -> tuple[list[int], list[int], list[int]]:
    """All rows, end to end. Ignores the labels of first tokens, which nothing predicts."""
    ids, labels, lengths = [], [], []
    for row in rows:
        ids += row.input_ids
        lengths += row.lengths
        begin = 0
        for length in row.lengths:
            labels += [_IGNORED, *row.labels[begin + 1 : begin + length]]
            begin += length
    return ids, labels, lengths


def blank_tokens(tokenizer: Any, rows: list[Row]) -> list[int]:
    """The rows' last tokens that are white space, as ChatML's behind EOS."""
    decode = getattr(tokenizer, "decode", None)
    last = {row.input_ids[-1] for row in rows}
    return [token for token in last if decode and not str(decode([token])).strip()]


def rows_in(batch: Any) -> list[Row]:
    """The rows of a collated batch. @raises OtherRowsError if transformers would count labels that C++ does not see."""
    if unknown := sorted(set(batch.keys()) - _READ - REPEATED):
        raise OtherRowsError(f"batches have {', '.join(unknown)}")
    if "labels" not in batch:
        raise OtherRowsError("batches have no labels")
    ids, labels = batch["input_ids"], batch["labels"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape != labels.shape:
        raise OtherRowsError("input_ids and labels do not have the same shape (B, T)")
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = batch.get("position_ids")
    return [_row(ids[i], labels[i], mask[i], None if positions is None else positions[i]) for i in range(len(ids))]


def _row(ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None) -> Row:
    if mask.shape != ids.shape:
        raise OtherRowsError("attention_mask is not (B, T)")
    here = mask.nonzero().flatten()
    if len(here) == 0:
        raise OtherRowsError("a row has no tokens")
    begin, end = int(here[0]), int(here[-1]) + 1
    if end - begin != len(here):
        raise OtherRowsError("an attention_mask has holes")
    outside = torch.cat([labels[:begin], labels[end:]])
    if bool((outside != _IGNORED).any()) or (begin > 0 and int(labels[begin]) != _IGNORED):
        raise OtherRowsError("padding, or a first token after padding, has labels. Mask them with -100, and pad on the right")
    tokens, targets = ids[begin:end].tolist(), labels[begin:end].tolist()
    lengths = [len(tokens)] if positions is None else _lengths(positions[begin:end].tolist())
    for start in itertools.accumulate(lengths[:-1]):
        if targets[start] != _IGNORED:
            raise OtherRowsError("a packed row's first token is a target of the row before it")
    return Row(tokens, targets, lengths)


def _lengths(positions: list[int]) -> list[int]:
    """The lengths of a pack's rows, from position_ids that count each row's tokens from 0."""
    starts = [i for i, position in enumerate(positions) if position == 0]
    lengths = [end - start for start, end in itertools.pairwise([*starts, len(positions)])]
    if [i for length in lengths for i in range(length)] != positions:
        raise OtherRowsError("position_ids do not count each row's tokens from 0")
    return lengths
