# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set, as the C++ trainer takes them, and as padded batches where Python computes a step or an evaluation."""

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import _C

#: Collators that do what batching here does anyway: pad rows (here: lay them end to end) and take labels as they are.
DEFAULT_COLLATORS = (
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
    "default_data_collator",
    "PadRight",
)
#: Said of one of them that makes labels of input_ids, beside rows that mask something.
LABELS_ARE_KEPT = (
    "[Trainer] DataCollatorForLanguageModeling: the rows' labels are kept, with what they mask (-100). transformers' Trainer would "
    "replace them by input_ids, and learn the prompts as well; leave the column out for that. Leave the collator out for this."
)
#: Whose they are.
COLLATOR_PACKAGES = ("transformers", "trl", "qlorapp")
#: Rows that are looked at for masked labels.
_LOOKED_AT = 64
#: What a collator sees of a row with remove_unused_columns.
USED_COLUMNS = ("input_ids", "labels", "attention_mask")


def is_default_collator(collator: Any) -> bool:
    """@raises ValueError for one that makes masked-language-model labels."""
    if getattr(collator, "mlm", False):
        raise ValueError(
            "[Trainer] a masked-language-model collator (mlm=True) is not supported; this library trains causal models."
        )
    if collator is None:
        return True
    kind = collator if isinstance(collator, types.FunctionType) else type(collator)
    # A script's own class may have a name of theirs, and does something else.
    return kind.__name__ in DEFAULT_COLLATORS and str(kind.__module__).partition(".")[0] in COLLATOR_PACKAGES


def rewrites_labels(collator: Any) -> bool:
    """Does it make labels of input_ids where transformers runs it, whatever the rows have for labels?"""
    return type(collator).__name__ == "DataCollatorForLanguageModeling" and hasattr(collator, "mlm")


def say_that_labels_are_kept(dataset: Any, line: str = LABELS_ARE_KEPT) -> None:
    """Beside a collator that would make labels of input_ids: said where the first rows mask something."""
    if dataset is None or is_stream(dataset):
        return
    for i, row in enumerate(itertools.islice(each_row(dataset), _LOOKED_AT)):
        if not hasattr(row, "keys") or "input_ids" not in row or row.get("labels") is None:
            return
        where = f"[Trainer] train_dataset, row {i}: "
        ids, labels = column_of(row, "input_ids", where), column_of(row, "labels", where)
        kept = kept_tokens(row, len(ids), where)
        if -100 in labels[kept]:
            _C.log_warning_once(line)
            return


def column_of(row: Any, name: str, where: str) -> list[int]:
    """A column of a row as a list of numbers.  where: how a message begins, which names data set and row."""
    given = row[name]
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    first = values[0] if isinstance(values, list) and values else 0
    if not isinstance(values, list) or isinstance(first, (list, tuple)) or getattr(first, "ndim", 0) > 0:
        shape = f"shape {tuple(given.shape)}" if hasattr(given, "shape") else f"a list of {type(first).__name__}"
        raise ValueError(
            f"{where}{name} must be one row of numbers; got {shape}. tokenizer(…, return_tensors='pt') makes batches: leave return_tensors "
            f"out, or take {name}[0]."
        )
    return values


def kept_tokens(row: Any, count: int, where: str) -> slice:
    """Where a row's tokens are between its padding.

    @raises ValueError for a row that holds several: they would see each other, as a row is attended to as a whole.
    """
    kept = slice(0, count)
    if row.get("attention_mask") is not None:
        mask = column_of(row, "attention_mask", where)
        if len(mask) != count:
            raise ValueError(f"{where}attention_mask must be as long as input_ids, {count}; got {len(mask)}.")
        begin = next((i for i, bit in enumerate(mask) if bit), count)
        end = count - next((i for i, bit in enumerate(reversed(mask)) if bit), count)
        kept = slice(begin, max(begin, end))
        for i in range(begin, end):
            if mask[i] != 1:
                raise ValueError(
                    f"{where}attention_mask must be 1 for the row's tokens, which stand together, and 0 for padding beside them; got "
                    f"{mask[i]} at {i}. Masks with holes are not known here. Give rows that were packed into one as rows of their own, with "
                    "packing=True."
                )
    if row.get("position_ids") is not None:
        positions = column_of(row, "position_ids", where)[kept]
        if positions != list(range(kept.stop - kept.start)):
            i = next((i for i, position in enumerate(positions) if position != i), len(positions))
            raise ValueError(
                f"{where}position_ids must count the row's tokens from 0; got {positions[i] if i < len(positions) else 'nothing'} at {i}. "
                "Where they begin again the row holds several, which would see each other. Give them as rows of their own, with packing=True; "
                "else leave position_ids out."
            )
    if row.get("seq_lengths") is not None and len(lengths := column_of(row, "seq_lengths", where)) > 1:
        raise ValueError(
            f"{where}seq_lengths must be the length of one row; got {lengths}, rows that were packed, which would see each other. Give them "
            "as rows of their own, with packing=True."
        )
    return kept


def with_masked_end(kept: slice, labels: list[int]) -> slice:
    """The row's tokens, and the one behind them where its label alone of those on the padding asks for it: an EOS that is the padding, too,
    and was masked with it (as unpad() of the C++ side has it)."""
    behind = labels[kept.stop :]
    is_token = kept.start < kept.stop and behind and behind[0] != -100 and all(label == -100 for label in behind[1:])
    return slice(kept.start, kept.stop + 1) if is_token else kept


def tokens_and_labels(row: Any, name: str, i: int) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of a row, without the padding that an attention_mask of 0 marks.  @raises ValueError for several rows in one."""
    if not hasattr(row, "keys"):
        raise TypeError(f"[Trainer] {name}: a row must be a dict with input_ids (and labels); row {i} is {type(row).__name__}.")
    if "input_ids" not in row:
        raise TypeError(
            f"[Trainer] {name}: a row must have input_ids (and labels); row {i} has {sorted(row.keys())}. Tokenize the rows, or use "
            "SFTTrainer, which reads text, prompts and conversations."
        )
    where = f"[Trainer] {name}, row {i}: "
    ids = column_of(row, "input_ids", where)
    labels = column_of(row, "labels", where) if row.get("labels") is not None else ids
    if len(labels) != len(ids):
        raise ValueError(f"[Trainer] {name}: row {i} has {len(ids)} input_ids and {len(labels)} labels. They must pair up.")
    kept = kept_tokens(row, len(ids), where)
    if row.get("labels") is not None:
        kept = with_masked_end(kept, labels)
    return ids[kept], labels[kept]


def length_of(loader: Any) -> int | None:
    """Batches of a data loader, where that is known: one over a stream has a __len__ that fails."""
    try:
        return len(loader)
    except TypeError:
        return None


def is_stream(dataset: Any) -> bool:
    """Rows that come one after another, nobody knows how many."""
    return dataset is not None and not hasattr(dataset, "__len__")


def check_one_data_set(dataset: Any, name: str) -> None:
    """@raises TypeError for what a trainer would take for rows, and is several data sets or columns."""
    if not isinstance(dataset, Mapping):
        return
    if "input_ids" in dataset:
        raise TypeError(
            f"[Trainer] {name} must be rows; got columns ({', '.join(map(str, dataset))}). Use datasets.Dataset.from_dict(…)."
        )
    raise TypeError(f"[Trainer] {name} holds several data sets: {list(dataset)}. Give one of them.")


def each_row(dataset: Any) -> Iterator[Any]:
    """The rows of anything that a data loader takes.

    A data set with a length has that many rows, by their numbers: Python's own way to go over __getitem__ ends at an IndexError
    alone, which one that computes its rows never raises. One that is neither torch's nor indexed is iterated, which is faster for
    those of `datasets`.
    """
    maps = isinstance(dataset, torch.utils.data.Dataset) and not isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_stream(dataset) and (maps or not hasattr(dataset, "__iter__")):
        return (dataset[i] for i in range(len(dataset)))
    return iter(dataset)


def rows_of(dataset: Any, name: str, most: int | None = None) -> list[tuple[list[int], list[int]]]:
    """most: where reading a stream ends."""
    if dataset is None:
        return []
    check_one_data_set(dataset, name)
    return [tokens_and_labels(row, name, i) for i, row in enumerate(itertools.islice(each_row(dataset), most))]


def training_rows(dataset: Any, args: Any) -> list[tuple[list[int], list[int]]]:
    """The rows of a run: all of a data set, and of a stream what max_steps take."""
    if not is_stream(dataset):
        return rows_of(dataset, "train_dataset")
    if args.max_steps <= 0:
        raise ValueError(
            f"[Trainer] max_steps must be set where train_dataset is a stream ({type(dataset).__name__}), which has no length; got "
            f"{args.max_steps}. Set it, or give the rows: list(dataset.take(n))."
        )
    if args.packing:
        _refuse_packed_stream(dataset, "train_dataset")
    if args.group_by_length or args.train_sampling_strategy == "group_by_length":
        raise ValueError(
            f"[Trainer] train_sampling_strategy='group_by_length' needs the length of every row, and train_dataset is a stream "
            f"({type(dataset).__name__}), whose rows come in its own order. Leave it out, or give the rows: list(dataset.take(n))."
        )
    return rows_of(
        dataset, "train_dataset", args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size
    )


def _refuse_packed_stream(dataset: Any, name: str) -> None:
    raise ValueError(
        f"[Trainer] packing=True needs all rows, and {name} is a stream ({type(dataset).__name__}). Take what the run needs: "
        "list(dataset.take(n))."
    )


def packs_of(dataset: Iterable[Any], name: str, max_length: int, strategy: str) -> list[list[dict[str, list[int]]]]:
    """The packs that the C++ trainer makes of these rows, each as the list of its rows."""
    if is_stream(dataset):
        _refuse_packed_stream(dataset, name)
    packs = []
    for ids, labels, lengths in _C.pack(rows_of(dataset, name), max_length, strategy):
        rows, begin = [], 0
        for length in lengths or [len(ids)]:
            part = slice(begin, begin + length)
            rows.append({"input_ids": ids[part], "labels": labels[part], "attention_mask": [1] * length})
            begin += length
        packs.append(rows)
    return packs


def row_lengths(rows: Iterable[Any], column: str) -> list[int]:
    """Tokens of each row or pack: what the column says, as in transformers, else those of its input_ids."""
    if column in (getattr(rows, "column_names", None) or ()):
        return [int(length) for length in rows[column]]  # type: ignore[index]
    lengths = []
    for i, place in enumerate(each_row(rows)):
        parts = place if isinstance(place, list) else [place]
        if any("input_ids" not in row and column not in row for row in parts):
            raise ValueError(
                f"[Trainer] group_by_length needs the length of every row, and row {i} of train_dataset has {sorted(parts[0])}. Add a column "
                f"{column!r} (length_column_name) of their lengths, or tokenize the rows before the trainer is made."
            )
        lengths.append(sum(len(row["input_ids"]) if "input_ids" in row else int(row[column]) for row in parts))
    return lengths


class RowsOfPacks:
    """A collator of packs: their rows stand below each other in the batch, so none of them sees another."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, packs: list[list[Any]]) -> Any:
        return self.collator([row for pack in packs for row in pack])


class PadRight:
    """Rows to one batch: input_ids, labels and attention_mask, padded on the right to the longest row.

    makes_labels: rows without labels get their input_ids as such, to train on; else the batch has none.
    """

    def __init__(self, pad_token_id: int | None, makes_labels: bool = True) -> None:
        self.pad_token_id = pad_token_id if pad_token_id is not None else 0
        self.makes_labels = makes_labels

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        pairs = [tokens_and_labels(row, "batch", i) for i, row in enumerate(rows)]
        width = max(len(ids) for ids, _ in pairs)

        def padded(column: list[list[int]], fill: int) -> torch.Tensor:
            return torch.tensor([values + [fill] * (width - len(values)) for values in column])

        batch = {
            "input_ids": padded([ids for ids, _ in pairs], self.pad_token_id),
            "labels": padded([labels for _, labels in pairs], -100),
            "attention_mask": padded([[1] * len(ids) for ids, _ in pairs], 0),
        }
        if not self.makes_labels and all(row.get("labels") is None for row in rows):
            del batch["labels"]
        return batch


class UsedColumns:
    """A collator that is shown only the columns that a model takes."""

    def __init__(self, collator: Callable[[list[Any]], Any], columns: Iterable[str] = USED_COLUMNS) -> None:
        self.collator, self.columns = collator, set(columns)

    def __call__(self, rows: list[Any]) -> Any:
        if not rows or not hasattr(rows[0], "keys") or "input_ids" not in rows[0]:
            return self.collator(rows)  # raw rows, which the collator tokenizes: nothing to leave out
        return self.collator([{key: row[key] for key in row if key in self.columns} for row in rows])


class EpochSampler(torch.utils.data.Sampler[int]):
    """The C++ trainer's order of rows, which is transformers' for the same seed; set_epoch() before each epoch."""

    def __init__(self, rows: int, strategy: str, seed: int, group_size: int, lengths: list[int]) -> None:
        self.rows, self.strategy, self.seed, self.group_size, self.lengths = rows, strategy, seed, group_size, lengths
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return iter(_C.epoch_order(self.rows, self.epoch, self.strategy, self.seed, self.group_size, self.lengths))


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells whoever in a data loader wants to know."""
    holders: tuple[Any, ...] = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    for holder in holders:
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)


class Batches:
    """The batches of a data loader, epoch after epoch, from wherever a run stands."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None
        self._at = (-1, 0)  # epoch, batches taken of it

    def at(self, epoch: int, first: int) -> Iterator[Any]:
        """The batches of an epoch from number `first` on. Whoever takes some says so: took()."""
        if self._iterator is None or self._at != (epoch, first):
            set_epoch(self.loader, epoch)
            self._iterator = iter(self.loader)
            for _ in range(first):
                next(self._iterator, None)
            self._at = (epoch, first)
        return self._iterator

    def took(self, count: int) -> None:
        epoch, first = self._at
        self._at = (epoch, first + count)
