# SPDX-License-Identifier: Apache-2.0
"""What PEFT's get_layer_status and get_model_status tell of a model's adapters."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch

from . import module_tree


@dataclasses.dataclass
class TunerLayerStatus:
    """Of one layer, by PEFT's names."""

    name: str
    module_type: str
    enabled: bool
    active_adapters: list[str]
    merged_adapters: list[str]
    requires_grad: dict[str, bool | Literal["irregular"]]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: None = None  # which PEFT's LoRA layers leave unset


@dataclasses.dataclass
class TunerModelStatus:
    """Of all layers together, by PEFT's names: "irregular" is what they disagree about."""

    base_model_type: str
    adapter_model_type: str
    peft_types: dict[str, str]
    trainable_params: int
    total_params: int
    num_adapter_layers: int
    enabled: bool | Literal["irregular"]
    active_adapters: list[str] | Literal["irregular"]
    merged_adapters: list[str] | Literal["irregular"]
    requires_grad: dict[str, bool | Literal["irregular"]]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: None = None


def _common(values: Iterable[Any]) -> Any:
    """What all of them are, or "irregular"."""
    first, *others = values
    return first if all(value == first for value in others) else "irregular"


def _parameters(module: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """{adapter: its parameters in this layer}."""
    kinds = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")
    found: dict[str, list[torch.nn.Parameter]] = {}
    for kind in kinds:
        for name, part in getattr(module, kind, {}).items():
            found.setdefault(name, []).extend(part.parameters())
    return found


def of_layers(root: Any) -> list[TunerLayerStatus]:
    """Of every layer below `root`, PEFT's level above the model, that has adapters."""
    told = []
    for name, module in root.named_modules():
        if not isinstance(module, (module_tree.LoraLayer, module_tree.ModulesToSave)):
            continue
        held = _parameters(module)
        kind = (
            f"lora.{type(module.base_layer).__name__}" if isinstance(module, module_tree.LoraLayer) else type(module).__name__
        )
        told.append(
            TunerLayerStatus(
                name=name,
                module_type=kind,
                enabled=not root.model.adapters_disabled,
                active_adapters=list(root.active_adapters),
                merged_adapters=[],
                requires_grad={adapter: _common(p.requires_grad for p in own) for adapter, own in held.items()},
                available_adapters=sorted(held),
                devices={adapter: sorted({p.device.type for p in own}) for adapter, own in held.items()},
            )
        )
    if not told:
        raise ValueError("[get_layer_status] the model has no adapter. Add one: get_peft_model(model, LoraConfig(…)).")
    return told


def of_model(model: Any) -> TunerModelStatus:
    """Of a PeftModel."""
    layers = of_layers(model.base_model)
    adapters = sorted({name for layer in layers for name in layer.available_adapters})
    trainable, total = model.get_nb_trainable_parameters()
    return TunerModelStatus(
        base_model_type=type(model.get_base_model()).__name__,
        adapter_model_type=type(model.base_model).__name__,
        peft_types=dict.fromkeys(model.peft_config, model.peft_type),
        trainable_params=trainable,
        total_params=total,
        num_adapter_layers=len(layers),
        enabled=_common(layer.enabled for layer in layers),
        active_adapters=_common(layer.active_adapters for layer in layers),
        merged_adapters=[],
        requires_grad={
            name: _common(layer.requires_grad[name] for layer in layers if name in layer.requires_grad) for name in adapters
        },
        available_adapters=adapters,
        devices={name: sorted({kind for layer in layers for kind in layer.devices.get(name, ())}) for name in adapters},
    )
