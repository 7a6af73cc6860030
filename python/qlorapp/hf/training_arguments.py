# SPDX-License-Identifier: Apache-2.0
"""TrainingArguments and SFTConfig: transformers' and TRL's, with the options of C++'s steps as extra fields."""

import copy
import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
import transformers

from .. import _C
from ..config_json import plain
from .older_names import modern

#: Options that only C++ has. Type, default and help text come from C++'s field table.
OWN = (
    "checkpoint_keep", "loss_chunk_rows", "mlp_tile_rows", "weight_workspace", "embedding_on_host", "base_on_host", "memory_budget", "fp8",
    "cuda_graphs", "worst_case_first", "count_position_zero", "resume_with_changes", "on_non_finite", "ddp_sum_in_bf16",
)  # fmt: skip

#: transformers' options that C++ computes. Options outside of a step stay with transformers.
_OF_A_STEP = (
    "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "tf32", "torch_empty_cache_steps", "auto_find_batch_size",
    "train_sampling_strategy", "dataloader_drop_last", "seed", "data_seed", "full_determinism", "ignore_data_skip",
    "ddp_timeout",
)  # fmt: skip

#: Fields that memory_budget and auto_find_batch_size set, beside the batch size.
_CHOSEN = (
    "gradient_accumulation_steps",
    "checkpoint_keep",
    "loss_chunk_rows",
    "mlp_tile_rows",
    "weight_workspace",
    "embedding_on_host",
)


def has_budget(args: Any) -> bool:
    """Whether C++ chooses _CHOSEN."""
    return bool(getattr(args, "memory_budget", "") or args.auto_find_batch_size)


def take_choice(trainer: Any, arguments: str) -> None:
    """Puts what C++ chose, of its arguments in JSON, into a copy of the trainer's: the caller may use its own again."""
    chosen = json.loads(arguments)
    trainer.args = copy.copy(trainer.args)
    for name in _CHOSEN:
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, chosen[name])
    trainer._train_batch_size = trainer.args.per_device_train_batch_size = chosen["per_device_train_batch_size"]


def for_cpp(args: Any, batch_size: int | None = None) -> str:
    """The JSON that the C++ trainer reads. transformers logs, evaluates and saves.

    batch_size: rows of a micro-batch; None: per_device_train_batch_size.
    """
    told = {name: plain(getattr(args, name)) for name in (*_OF_A_STEP, *OWN) if hasattr(args, name)}
    told["per_device_train_batch_size"] = args.per_device_train_batch_size if batch_size is None else batch_size
    told["output_dir"] = args.output_dir or "."
    told["max_grad_norm"] = args.max_grad_norm or 0.0
    told["gradient_checkpointing"] = bool(args.gradient_checkpointing)
    if getattr(args, "activation_offloading", False):  # TRL's
        told["checkpoint_keep"] = ["input_on_host"]
    if args.lr_scheduler_kwargs:
        told["lr_scheduler_kwargs"] = plain(args.lr_scheduler_kwargs)
    return json.dumps({**told, "logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no"})


def for_plan(args: Any) -> dict[str, Any]:
    """The options of for_cpp with those that a plan also needs: the length of rows and the evaluations."""
    told: dict[str, Any] = json.loads(for_cpp(args))
    told["eval_strategy"] = plain(args.eval_strategy)
    told["per_device_eval_batch_size"] = args.per_device_eval_batch_size
    if getattr(args, "max_length", None) is not None:
        told["max_length"] = args.max_length
    return told


_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}


def _type(text: str) -> Any:
    """The type of a name in C++'s table: "int | None", "list[str] | str | None"."""
    if text.endswith(" | None"):
        return Optional[_type(text.removesuffix(" | None"))]  # noqa: UP045  (for HfArgumentParser)
    if " | " in text:
        return Union[tuple(_type(part) for part in text.split(" | "))]  # noqa: UP007
    if text.startswith("list["):
        return list[_type(text[5:-1])]  # type: ignore[misc]
    return _TYPES[text]


def _fields() -> list[tuple[str, Any, Any]]:
    """(name, type, field) of OWN for make_dataclass, in the table's order."""
    made = []
    for name, kind, default, doc, *_ in _C.training_arguments_fields():
        if name not in OWN:
            continue
        value, metadata = json.loads(default), {"help": doc.replace("%", "%%")}  # argparse expands %
        spec: Any = dataclasses.field(default=value, metadata=metadata)
        if isinstance(value, list):
            spec = dataclasses.field(default_factory=functools.partial(json.loads, default), metadata=metadata)
        made.append((name, _type(kind), spec))
    return made


def _with_own_options(name: str, base: type) -> type:
    """A subclass of transformers' or TRL's dataclass with OWN and the older names."""

    def __post_init__(self: Any) -> None:
        if isinstance(self.checkpoint_keep, str):
            self.checkpoint_keep = [self.checkpoint_keep]
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise transformers raises for bf16, TRL's default
        self.max_grad_norm = self.max_grad_norm or 0.0  # transformers compares it
        base.__post_init__(self)  # type: ignore[attr-defined]
        _C.check_training_arguments(json.dumps({option: plain(getattr(self, option)) for option in OWN}))

    doc = f"{base.__module__.partition('.')[0]}'s {base.__name__}, with the options of C++'s steps: {', '.join(OWN)}."
    made: Any = dataclasses.make_dataclass(
        name, _fields(), bases=(base,), namespace={"__post_init__": __post_init__, "__doc__": doc, "__module__": __name__}
    )
    known = {field.name for field in dataclasses.fields(made)}
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        plain_init(self, *args, **modern(name, known, options))

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


if TYPE_CHECKING:
    SFTConfig: Any
TrainingArguments: Any = _with_own_options("TrainingArguments", transformers.TrainingArguments)


def __getattr__(name: str) -> Any:
    """SFTConfig, whose TRL Trainer does without."""
    if name != "SFTConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl.trainer import sft_config

    globals()[name] = made = _with_own_options(name, sft_config.SFTConfig)
    return made
