# SPDX-License-Identifier: Apache-2.0
"""Configs as real dataclasses, made from field tables.

Names, defaults and documentation have one home, the table: of C++ (include/qlorapp/core/field_table.hpp), or, for a config that only
Python has, a list of the same rows (sft_config.py). A name that is not in the table raises TypeError with the nearest one; older
spellings are understood, and said once.
"""

import dataclasses
import enum
import functools
import inspect
import json
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar, Optional, Union, cast

import torch

from . import _C

_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict}


def _type(text: str) -> Any:
    """The type that a table spells: "int | None", "list[str] | str | None", "dict[str, float]"."""
    if text.endswith(" | None"):
        return Optional[_type(text.removesuffix(" | None"))]  # noqa: UP045  (HfArgumentParser knows typing's unions best)
    if " | " in text:
        return Union[tuple(_type(part) for part in text.split(" | "))]  # noqa: UP007
    if text.startswith("list["):
        return list[_type(text[5:-1])]  # type: ignore[misc]
    if text.startswith("dict["):
        key, value = text[5:-1].split(", ")
        return dict[_type(key), _type(value)]  # type: ignore[misc]
    return _TYPES[text]


def _is_scalar_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def plain(value: Any) -> Any:
    """JSON's types for what people pass: sets, tuples, enums, paths, dtypes, numbers of numpy, other configs."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
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


#: (name, type, default as JSON, doc, status, reason); status one of used, accepted_and_said, refused.
Row = tuple[str, str, str, str, str, str]


def _number_of(text: str, kind: str) -> Any:
    """The number that a string spells, where a field takes numbers alone; else the string, which the check refuses by name."""
    number: Callable[[str], Any] | None = {"int": int, "float": float}.get(kind.removesuffix(" | None"))
    try:
        value = number(text) if number is not None else text
    except ValueError:
        return text
    return value if isinstance(value, str) or math.isfinite(value) else text


class Table:
    """What the generated dataclasses share."""

    #: The table.
    field_rows: ClassVar[list[Row]]
    #: {field: (status, reason)}
    field_status: ClassVar[dict[str, tuple[str, str]]]
    #: {other spelling: (field, whether it is an older one)}
    field_aliases: ClassVar[dict[str, tuple[str, bool]]]
    #: {name of a release before those of the table: (status, reason)}: it can be given, and is no field.
    gone: ClassVar[dict[str, tuple[str, str]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Other spellings set their field. Scripts may keep what they like in an object; that it is no option is said once."""
        cls = type(self)
        field, older = cls.field_aliases.get(name, (name, False))
        if older:
            _C.say_older_name(cls.__name__, name, field)
        if field not in getattr(cls, "__dataclass_fields__", {}) and not field.startswith("_") and not hasattr(cls, field):
            known = [*cls.field_status, *cls.field_aliases]
            _C.log_warning_once(
                f"[{cls.__name__}] {field!r} is no option: setting it changes no run.{_C.did_you_mean(field, known)}"
            )
        super().__setattr__(field, value)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {name: plain(getattr(self, name)) for name in self.field_status}

    def to_json_string(self) -> str:
        """to_dict() as JSON, indented."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def modern_names(cls, options: dict[str, Any], where: str = "") -> dict[str, Any]:
        """Options by the names of the fields; older names are said once.

        where: who was given them, for the message.
        @raises TypeError for a name that is none, with the nearest one, and for an option that is given by two names; ValueError for one
        that is gone and would have changed the run.
        """
        where = where or cls.__name__
        given: dict[str, Any] = {}
        for key, value in options.items():
            if key in cls.gone:
                status, reason = cls.gone[key]
                if value and status == "refused":
                    raise ValueError(f"[{where}] {key} is not supported: {reason}")
                if value:
                    _C.log_warning_once(f"[{where}] {key} has no effect: {reason}")
                continue
            field, older = cls.field_aliases.get(key, (key, False))
            if field not in cls.field_status:
                known = [*cls.field_status, *cls.field_aliases]
                raise TypeError(f"[{where}] unknown option {key!r}.{_C.did_you_mean(key, known)}")
            if key != field and value is None:
                continue  # an older name that was left unset
            if field in given:
                raise TypeError(f"[{where}] {key!r} and {field!r} are the same option. Give one of them.")
            if older:
                _C.say_older_name(where, key, field)
            given[field] = value
        return given

    def _settle(self) -> None:
        """Fills in what follows from other fields, before the values are checked."""


def apply_field_status(where: str, config: Table, rows: list[Row]) -> None:
    """Carries out the status column for values that are neither the default nor unset, as the tables of C++ do for theirs.

    @raises ValueError for the first field that is refused, with its reason.
    """
    for name, _, default, _, status, reason in rows:
        if status == "used" or getattr(config, name) in (json.loads(default), None):
            continue
        if status == "refused":
            raise ValueError(f"[{where}] {name} is not supported: {reason}")
        _C.log_warning_once(f"[{where}] {name} has no effect: {reason}")


def dataclass_of_table(
    name: str,
    doc: str,
    rows: list[Row],
    aliases: dict[str, tuple[str, bool]],
    check: Callable[[str], None],
    *,
    bases: tuple[type, ...] = (Table,),
    none_is_default: tuple[str, ...] = (),
) -> type:
    """A dataclass with a field for each row of a field table.

    aliases: {other spelling: (name, whether it is an older one)}; they can be given and read, and are no fields. check: validates
    the JSON of an object, and says what has no effect. none_is_default: fields whose None means that they were not given.
    """
    fields: list[tuple[str, Any, Any]] = []
    defaults: dict[str, str] = {}
    for field, type_text, default, text, status, reason in rows:
        defaults[field] = default
        text = f"{text} ({'no effect' if status == 'accepted_and_said' else status}: {reason})" if reason else text
        metadata = {"help": text.strip().replace("%", "%%")}  # HfArgumentParser hands it to argparse
        spec: Any
        if isinstance(json.loads(default), (list, dict)):
            spec = dataclasses.field(default_factory=functools.partial(json.loads, default), metadata=metadata)
        else:
            spec = dataclasses.field(default=json.loads(default), metadata=metadata)
        fields.append((field, _type(type_text), spec))

    kinds = {row[0]: row[1] for row in rows}

    def __post_init__(self: Any) -> None:
        for field, kind in kinds.items():
            if isinstance(value := getattr(self, field), str):  # YAML reads 2e-4 as a string
                setattr(self, field, _number_of(value, kind))
            elif _is_scalar_of_numpy(value):
                setattr(self, field, value.item())
        for field in none_is_default:
            if getattr(self, field) is None:
                setattr(self, field, json.loads(defaults[field]))
        for field, (status, _) in self.field_status.items():
            if status == "refused" and not getattr(self, field) and not json.loads(defaults[field]):
                setattr(self, field, json.loads(defaults[field]))  # "", [], False, 0: off in another spelling
        self._settle()
        check(json.dumps(self.to_dict()))

    options = [
        f"    {name}: {kind} = {json.loads(default)!r}\n        {spec.metadata['help'].replace('%%', '%')}"
        for (name, kind, default, *_), (_, _, spec) in zip(rows, fields, strict=True)
    ]
    namespace: dict[str, Any] = {
        "__post_init__": __post_init__,
        "__doc__": "\n".join([inspect.cleandoc(doc), "", "Options:", *options]),
        "field_rows": rows,
        "field_status": {row[0]: (row[4], row[5]) for row in rows},
        "field_aliases": aliases,
    }
    for alias, (field, _) in aliases.items():
        namespace[alias] = property(lambda self, field=field: getattr(self, field), doc=f"Another name of {field}.")  # type: ignore[misc]
    made: Any = dataclasses.make_dataclass(name, fields, bases=bases, namespace=namespace)
    made.__module__ = "qlorapp"
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **made.modern_names(kwargs))

    made.__init__ = __init__
    return cast(type, made)
