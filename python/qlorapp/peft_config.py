# SPDX-License-Identifier: Apache-2.0
"""PEFT's configs: LoraConfig, from the field table of the C++ side, and adapter_config.json as a config, and back."""

import dataclasses
import enum
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

from . import _C
from .field_table import Table, dataclass_of_table, plain
from .hub import adapter_folder


@dataclasses.dataclass
class LoftQConfig:
    """loftq_config of LoraConfig: rounds of quantizing and decomposing, into four bits."""

    loftq_bits: int = 4
    loftq_iter: int = 1


class PeftConfig:
    """What PEFT's configs have in common. The one kind here is LoraConfig, which from_pretrained() returns from either."""

    is_prompt_learning = False
    is_adaption_prompt = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], subfolder: str | None = None, **options: Any
    ) -> Any:
        """The config of a PEFT folder or hub repository; base_model_name_or_path says what it was trained on."""
        hub = {name: options.pop(name) for name in ("revision", "token", "local_files_only", "cache_dir") if name in options}
        folder = adapter_folder(pretrained_model_name_or_path, subfolder, wanted=("adapter_config.json",), **hub)
        return LoraConfig(**{**json.loads(_C.read_adapter_config(os.fspath(folder))), **options})

    def save_pretrained(self: Any, save_directory: str | os.PathLike[str]) -> None:
        """adapter_config.json, as PEFT writes it."""
        folder = pathlib.Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(_C.adapter_config_json(json.dumps(self.to_dict())), encoding="utf-8")


if TYPE_CHECKING:
    from ._config_types import LoraConfig as LoraConfig
else:
    LoraConfig = dataclass_of_table(
        "LoraConfig",
        "Which linear layers get a low-rank adapter, and of what rank and weight: PEFT's names and rules.",
        _C.lora_config_fields(),
        _C.lora_config_aliases(),
        _C.check_lora_config,
        bases=(PeftConfig, Table),
    )


class TaskType(str, enum.Enum):
    """PEFT's task types; this library trains causal language models."""

    CAUSAL_LM = "CAUSAL_LM"

    def __str__(self) -> str:
        return self.value


def as_lora_config(config: Any) -> LoraConfig:
    """A LoraConfig as it is, and PEFT's own as one of this library.  @raises TypeError for the config of another method."""
    if isinstance(config, LoraConfig):
        return config
    if str(plain(getattr(config, "peft_type", ""))) != "LORA":
        raise TypeError(
            f"[get_peft_model] peft_config must be a qlorapp.LoraConfig; got {type(config).__module__}.{type(config).__name__}. Adapters here "
            "are LoRA."
        )
    return LoraConfig(**plain(config.to_dict()))


#: Options that say where an adapter comes from and what it is for, and nothing of its form.
_ORIGIN = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}


def differing_options(one: Any, other: Any) -> list[str]:
    """The names of what makes another adapter of the one config than of the other. Both may be PEFT's own."""
    values = [as_lora_config(config).to_dict() for config in (one, other)]
    first, second = ({name: sorted(v) if isinstance(v, list) else v for name, v in each.items()} for each in values)
    return [name for name in first if name not in _ORIGIN and first[name] != second[name]]
