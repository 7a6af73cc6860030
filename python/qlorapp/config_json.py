# SPDX-License-Identifier: Apache-2.0
"""Converts configs of other packages to JSON for C++. A LoraConfig keeps only the fields that C++ knows."""

import dataclasses
import enum
import json
import os
from typing import Any

import torch

from . import _C


def plain(value: Any) -> Any:
    """Converts sets, tuples, enums, paths, dtypes, numpy numbers and configs to JSON's types."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    return os.fspath(value) if hasattr(value, "__fspath__") else value


def lora_config(config: Any) -> str:
    """PEFT's LoraConfig as JSON for C++; None gives the defaults."""
    if config is None:
        return "{}"
    known, values = {row[0] for row in _C.lora_config_fields()}, plain(config)
    kind: Any = type(config)
    neutral = plain(kind()) if dataclasses.is_dataclass(config) else {}
    if others := sorted(name for name, value in values.items() if name not in known and value and value != neutral.get(name)):
        _C.log_warning_once(
            f"[LoraConfig] {', '.join(others)}: PEFT's code computes it, and the plan does not count its memory."
        )
    return json.dumps({name: value for name, value in values.items() if name in known})
