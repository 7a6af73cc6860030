# SPDX-License-Identifier: Apache-2.0
"""LoraConfig and TrainingArguments: real dataclasses, made from the field tables of the C++ side.

Names, defaults, documentation and validation have one home there (include/qlorapp/core/field_table.hpp). A name that is not in
the table raises TypeError with the nearest one; older spellings are understood, and said once. dataclass_of_table makes the class
of any further table.
"""

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Optional, Union

import torch

from . import _C
from .peft_config import PeftConfig

_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict}


def _type(text: str) -> Any:
    """The type that a table spells: "int | None", "list[str] | str | None", "dict[str, float]"."""
    if text.endswith(" | None"):
        return Optional[_type(text.removesuffix(" | None"))]  # noqa: UP045  (HfArgumentParser knows typing's unions best)
    if " | " in text:
        return Union[tuple(_type(part) for part in text.split(" | "))]  # noqa: UP007
    if text.startswith("list["):
        return list[_type(text[5:-1])]
    if text.startswith("dict["):
        key, value = text[5:-1].split(", ")
        return dict[_type(key), _type(value)]
    return _TYPES[text]


def plain(value: Any) -> Any:
    """JSON's types for what people pass: sets, tuples, enums, paths, dtypes, other configs."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Table)):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    return os.fspath(value) if hasattr(value, "__fspath__") else value


class Table:
    """What the generated dataclasses share."""

    #: {field: (status, reason)}, status one of used, accepted_and_said, refused.
    field_status: dict[str, tuple[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def dataclass_of_table(
    name: str,
    doc: str,
    rows: list,
    aliases: dict[str, tuple[str, bool]],
    check: Callable[[str], None],
    *,
    bases: tuple[type, ...] = (Table,),
    none_is_default: tuple[str, ...] = (),
) -> type:
    """A dataclass with a field for each row of a C++ field table.

    rows: [(name, type, default as JSON, doc, status, reason)]. aliases: {other spelling: (name, whether it is an older one)}; they
    can be given and read, and are no fields. check: validates the JSON of an object, and says what has no effect. A base may have
    _settle(), called before the check. none_is_default: fields whose None means that they were not given.
    """
    fields, defaults = [], {}
    for field, type_text, default, text, status, reason in rows:
        defaults[field] = default
        text = f"{text} ({'no effect' if status == 'accepted_and_said' else status}: {reason})" if reason else text
        metadata = {"help": text.strip().replace("%", "%%")}  # HfArgumentParser hands it to argparse
        if isinstance(json.loads(default), (list, dict)):
            spec = dataclasses.field(default_factory=functools.partial(json.loads, default), metadata=metadata)
        else:
            spec = dataclasses.field(default=json.loads(default), metadata=metadata)
        fields.append((field, _type(type_text), spec))

    def __post_init__(self) -> None:
        for field in none_is_default:
            if getattr(self, field) is None:
                setattr(self, field, json.loads(defaults[field]))
        if hasattr(self, "_settle"):
            self._settle()
        check(json.dumps(self.to_dict()))

    namespace = {"__post_init__": __post_init__, "__doc__": doc}
    for alias, (field, _) in aliases.items():
        namespace[alias] = property(lambda self, field=field: getattr(self, field), doc=f"Another name of {field}.")
    made = dataclasses.make_dataclass(name, fields, bases=bases, namespace=namespace)
    made.__module__ = "qlorapp"
    made.field_status = {row[0]: (row[4], row[5]) for row in rows}
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def __init__(self, *args, **kwargs):
        given = {}
        for key, value in kwargs.items():
            field, older = aliases.get(key, (key, False))
            if field not in defaults:
                raise TypeError(f"[{name}] unknown option {key!r}.{_C.did_you_mean(key, [*defaults, *aliases])}")
            if key != field and value is None:
                continue  # an older name that was left unset
            if field in given:
                raise TypeError(f"[{name}] {key!r} and {field!r} are the same option. Give one of them.")
            if older:
                _C.say_older_name(name, key, field)
            given[field] = value
        plain_init(self, *args, **given)

    made.__init__ = __init__
    return made


class TrainingTable(Table):
    """What TrainingArguments and its kin have beside their fields: what transformers derives from them."""

    def _settle(self) -> None:
        """The values that transformers fills in, so that scripts and callbacks read what they expect."""
        self.output_dir = os.path.expanduser(os.fspath(self.output_dir))
        for field in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "fsdp_config", "accelerator_config"):
            if isinstance(value := getattr(self, field), str) and value.startswith("{"):
                setattr(self, field, json.loads(value))
        self.do_eval = self.do_eval or self.eval_strategy not in ("no", "NO")
        if plain(self.eval_strategy) == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        if isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        for field in ("lr_scheduler_type", "optim", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy"):
            setattr(self, field, plain(getattr(self, field)))
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not str(self.metric_for_best_model).endswith("loss")

    @property
    def device(self) -> torch.device:
        """Where a model goes that device_map="auto" places."""
        return torch.device("cpu" if self.use_cpu or not torch.cuda.is_available() else "cuda:0")

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    @property
    def n_gpu(self) -> int:
        return 0 if self.device.type == "cpu" else 1

    @property
    def world_size(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    local_process_index = process_index

    @property
    def should_log(self) -> bool:
        return True

    should_save = should_log

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return _C.warmup_steps(self.warmup_steps, self.warmup_ratio, num_training_steps)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """to_dict() with what is no number, string or bool as text."""
        return {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in self.to_dict().items()
        }


LoraConfig = dataclass_of_table(
    "LoraConfig",
    "Which linear layers get a low-rank adapter, and of what rank and weight: PEFT's names and rules.",
    _C.lora_config_fields(),
    _C.lora_config_aliases(),
    _C.check_lora_config,
    bases=(PeftConfig, Table),
)
TrainingArguments = dataclass_of_table(
    "TrainingArguments",
    """What a run is told: transformers' names, meanings and defaults, those of version 4 and of version 5.

    Every option is used, or said to have no effect, or refused with a reason; docs/configuration.md lists them all.
    """,
    _C.training_arguments_fields(),
    _C.training_arguments_aliases(),
    _C.check_training_arguments,
    bases=(TrainingTable,),
    none_is_default=("output_dir", "report_to", "gradient_checkpointing", "eval_strategy", "debug"),
)


class TaskType(str, enum.Enum):
    """PEFT's task types; this library trains causal language models."""

    CAUSAL_LM = "CAUSAL_LM"

    def __str__(self) -> str:
        return self.value
