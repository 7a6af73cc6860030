# SPDX-License-Identifier: Apache-2.0
"""LoraConfig and TrainingArguments: real dataclasses, made from the field tables of the C++ side.

Names, defaults, documentation and validation have one home there (include/qlorapp/core/field_table.hpp). A name that is not in
the table raises TypeError with the nearest one; older spellings are understood.
"""

import dataclasses
import enum
import functools
import json
from typing import Any, Optional, Union

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


def _plain(value: Any) -> Any:
    """JSON's types for what people pass: sets, tuples, enums, paths."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.__fspath__() if hasattr(value, "__fspath__") else value


class _Table:
    """What the generated dataclasses share."""

    def to_dict(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def _from_table(name: str, doc: str, rows: list, aliases: dict[str, str], check, bases: tuple[type, ...] = ()) -> type:
    fields = []
    for field, type_text, default, text, status, reason in rows:
        value = json.loads(default)
        text = f"{text} ({'no effect' if status == 'accepted_and_said' else status}: {reason})" if reason else text
        metadata = {"help": text.strip().replace("%", "%%")}  # HfArgumentParser hands it to argparse
        if isinstance(value, (list, dict)):
            spec = dataclasses.field(default_factory=functools.partial(json.loads, default), metadata=metadata)
        else:
            spec = dataclasses.field(default=value, metadata=metadata)
        fields.append((field, _type(type_text), spec))

    def __post_init__(self) -> None:
        check(json.dumps(self.to_dict()))

    made = dataclasses.make_dataclass(
        name, fields, bases=(*bases, _Table), namespace={"__post_init__": __post_init__, "__doc__": doc}
    )
    made.__module__ = "qlorapp"
    plain_init, known = made.__init__, [row[0] for row in rows]

    @functools.wraps(plain_init)
    def __init__(self, *args, **kwargs):
        given = {}
        for key, value in kwargs.items():
            field = aliases.get(key, key)
            if field not in known:
                raise TypeError(f"[{name}] unknown option {key!r}.{_C.did_you_mean(key, [*known, *aliases])}")
            if field in given:
                raise TypeError(f"[{name}] {key!r} and {field!r} are the same option. Give one of them.")
            given[field] = value
        plain_init(self, *args, **given)

    made.__init__ = __init__
    return made


LoraConfig = _from_table(
    "LoraConfig",
    "Which linear layers get a low-rank adapter, and of what rank and weight: PEFT's names and rules.",
    _C.lora_config_fields(),
    _C.lora_config_aliases(),
    _C.check_lora_config,
    bases=(PeftConfig,),
)
TrainingArguments = _from_table(
    "TrainingArguments",
    "What a run is told: transformers' names and defaults. Every option is used, said to have no effect, or refused.",
    _C.training_arguments_fields(),
    _C.training_arguments_aliases(),
    _C.check_training_arguments,
)


class TaskType(str, enum.Enum):
    """PEFT's task types; this library trains causal language models."""

    CAUSAL_LM = "CAUSAL_LM"

    def __str__(self) -> str:
        return self.value
