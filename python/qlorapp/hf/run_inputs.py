# SPDX-License-Identifier: Apache-2.0
"""The base, options and rows of a run, compared when it is resumed, as the command compares its own (src/train/run_inputs.cpp)."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none

from .. import _C
from ..config_json import plain
from .forward import engine_of
from .loop_predicate import levels_of
from .training_arguments import has_budget

_log = logging.getLogger("qlorapp")
FILE = "run_inputs.json"
#: Of more rows, so many at equal distances are read.
MOST_ROWS = 1 << 16
#: Rows of a table that are read at a time.
_BLOCK = 64
#: They affect the results of a step. What decides rows (max_length, packing) shows in the rows.
_DECISIVE = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "seed", "data_seed",
    "bf16", "fp16", "dataloader_drop_last", "train_sampling_strategy", "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def write(trainer: Any, folder: str) -> None:
    """Adds the file to a checkpoint under construction."""
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        base = _base(trainer)
        json.dump(_of(trainer) | ({} if base is None else {"base": json.loads(base)}), file, indent=2)


def check(trainer: Any, folder: str | None) -> bool:
    """Whether data or decisive options differ from those of a checkpoint.

    @raises FormatError if they do, unless args.resume_with_changes; and if the file is malformed.
    """
    path = os.path.join(folder or "", FILE)
    is_there = folder is not None and os.path.isfile(path)
    base = _base(trainer) if is_there or trainer.args.world_size > 1 else None  # processes that share a base read it together
    if folder is None or not is_there:
        return False
    with open(path, encoding="utf-8") as file:
        try:
            before = json.load(file)
        except ValueError as error:
            raise _C.FormatError(f"[resume] {path} is not JSON: {error}. Resume from another checkpoint.") from None
    if not isinstance(before, dict) or not isinstance(before.get("options"), dict):
        raise _C.FormatError(f"[resume] {path} must hold an object 'options'. Resume from another checkpoint.")
    if base is not None and isinstance(before.get("base"), dict):
        _C.check_base(folder, json.dumps(before["base"]), base)
    now, was = _of(trainer), before["options"]
    changes = [
        f"{name} {json.dumps(was[name])} → {json.dumps(value)}"
        for name, value in now["options"].items()
        if name in was and was[name] != value
    ]
    if any(before.get(key) != now[key] for key in ("rows", "train_data")):
        changes.append("the training data (other rows, or another order of them)")
    if not changes:
        return False
    text = ", ".join(changes)
    if not getattr(trainer.args, "resume_with_changes", False):
        raise _C.FormatError(
            f"[resume] {folder} is of a run with other inputs: {text}. Give those of that run, or resume_with_changes=True to "
            "continue with the new ones."
        )
    _log.warning("[resume] this run continues %s with other inputs: %s.", folder, text)
    return True


def _base(trainer: Any) -> str | None:
    """What C++ knows of the base; None of a model that it does not compute."""
    engine = engine_of(levels_of(trainer.model)[-1])
    return None if engine is None else str(engine.base_inputs)


def _of(trainer: Any) -> dict[str, Any]:
    args, data = trainer.args, trainer.train_dataset
    options = {name: plain(getattr(args, name)) for name in _DECISIVE if hasattr(args, name)}
    options["per_device_train_batch_size"] = trainer._train_batch_size
    options["rows of a step"] = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    if has_budget(args):  # it may choose another way to the same product
        del options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
    options["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    return {
        "options": json.loads(json.dumps(options, default=str)),
        "rows": len(data) if hasattr(data, "__len__") else None,
        "train_data": fingerprint_of(trainer),
    }


def fingerprint_of(trainer: Any) -> str | None:
    """That of the training data, made once in a train()."""
    found: tuple[str | None] = trainer._fingerprint or (fingerprint(trainer.train_dataset),)
    trainer._fingerprint = found
    return found[0]


def fingerprint(data: Any) -> str | None:
    """SHA-256 of the rows. None if reading one twice may give two results, or if it holds more than numbers and text."""
    is_table = isinstance(data, datasets.Dataset) and data.format["type"] != "custom"
    if not is_table and not isinstance(data, list | tuple):
        return None
    picked = range(0, len(data), -(-len(data) // MOST_ROWS) or 1)
    sha256 = hashlib.sha256()
    try:
        for part in _of_table(data, picked) if is_table else _of_rows(data, picked):
            sha256.update(part)
    except (AttributeError, TypeError):
        return None
    return sha256.hexdigest()


def _of_rows(data: Any, picked: range) -> Iterator[bytes]:
    for i in picked:
        yield json.dumps(data[i], sort_keys=True, default=lambda value: value.tolist()).encode() + b"\n"


def _of_table(data: Any, picked: range) -> Iterator[bytes]:
    """From Arrow's memory: rows of tokens as Python's lists would take twenty times as long."""
    table = data.with_format("arrow")
    for begin in range(0, len(picked), _BLOCK):
        block = table[list(picked[begin : begin + _BLOCK])]
        for name in sorted(block.column_names):
            yield name.encode() + b"\n"
            yield _bytes_of(block.column(name).combine_chunks())


def _bytes_of(column: Any) -> bytes:
    """column: an Arrow array. Depends on its values alone, not on the width of integers."""
    import pyarrow  # type: ignore[import-untyped]  # datasets has it

    kind = column.type
    if pyarrow.types.is_list(kind) and pyarrow.types.is_integer(kind.value_type) and not column.null_count:
        values = column.flatten()
        if not values.null_count:
            return b"".join(each.cast(pyarrow.int64()).to_numpy().tobytes() for each in (column.value_lengths(), values))
    return json.dumps(column.to_pylist()).encode()
