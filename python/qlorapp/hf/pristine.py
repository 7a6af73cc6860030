# SPDX-License-Identifier: Apache-2.0
"""Decides whether the engine computes the same as the model's modules.

A model is pristine if its module classes and forwards are unchanged since the engine was attached, no module has a hook, the base is frozen
and unchanged, and at most one adapter is active, which C++ can compute.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear

from .engine import AdapterLayer, Engine, Place
from .lora4bit import Lora4bitLinear

#: PEFT's layer, and ours over four bits. The code below reads children and parameters from the modules' dicts, because it runs in every
#: pass and torch's attribute access is ten times slower.
_KINDS: tuple[Any, ...] = (Linear, Lora4bitLinear)


def why_not(engine: Engine, model: Any, needs_gradients: bool, below: str = "") -> str:
    """The reason why the model is not pristine. Empty if it is; the engine's active adapter is then the model's.

    below: checks only modules under this path.
    """
    engine.checks += 1
    engine.take_head_back()
    for place in engine.places:
        if place.path.startswith(below) and (reason := _changed(place)):
            return reason
    for frozen in engine.base:
        if not frozen.path.startswith(below):
            continue
        parameter = frozen.holder.get(frozen.name)
        if parameter is not frozen.parameter or parameter.data_ptr() != frozen.pointer:
            return f"the memory of {frozen.path} was replaced"
        if needs_gradients and parameter.requires_grad:
            return f"{frozen.path} is trainable"
    return _adapters(engine)


def _changed(place: Place) -> str:
    module = place.holder.get(place.name)
    if module is not place.module or type(module) is not place.kind:
        return f"{place.path} was replaced"
    if place.kind.forward is not place.forward or module.__dict__.get("forward") is not place.own_forward:
        return f"the forward of {place.path} was replaced"
    return f"{place.path} has hooks" if has_hooks(module) else ""


def has_hooks(module: torch.nn.Module) -> bool:
    held = module.__dict__
    if held["_forward_pre_hooks"] or held["_backward_hooks"] or held["_backward_pre_hooks"]:
        return True
    hooks = held["_forward_hooks"]
    return bool(hooks) and any(not _changes_nothing(hook) for hook in hooks.values())


def _changes_nothing(hook: Any) -> bool:
    """Whether it is a hook of transformers or PEFT that only sets requires_grad on an embedding's output, or records outputs."""
    origin, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    asks_for_gradient = name.startswith("make_inputs_require_grad") and origin.startswith(("transformers.", "peft."))
    return asks_for_gradient or origin == "transformers.utils.output_capturing"


def _adapters(engine: Engine) -> str:
    """Activates the model's adapter in C++. Returns the reason if it cannot, else empty."""
    name: str | None = None
    layers: list[AdapterLayer] = []
    disabled: bool | None = None
    for place in engine.projections:
        module: Any = place.holder.get(place.name)
        if module is place.module:
            if reason := _changed(place):
                return reason
            continue
        if not _is_peft_linear(module) or module._modules["base_layer"] is not place.module:
            return f"{place.path} was replaced"
        if reason := _changed_below(place):
            return reason
        if module.merged_adapters:
            return f"adapters are merged into {place.path}"
        if disabled is None:
            disabled = module.disable_adapters
        elif disabled != module.disable_adapters:
            return "adapters are disabled only in some layers"
        known = module._modules["lora_A"]._modules
        active = [one for one in module.active_adapters if one in known]
        if not active:
            continue
        if len(active) > 1 or (name is not None and active[0] != name):
            return "several adapters are active"
        name = active[0]
        if isinstance(layer := _layer(place.path, module, name, engine.core.device), str):
            return layer
        layers.append(layer)
    if disabled or not layers:
        engine.show("", None)
        return ""
    assert name is not None
    if any(layer.dropout != layers[0].dropout for layer in layers):
        return "lora_dropout differs between layers"
    engine.show(name, layers)
    return ""


def _is_peft_linear(module: Any) -> bool:
    return type(module) in _KINDS and "forward" not in module.__dict__ and not has_hooks(module)


def _changed_below(place: Place) -> str:
    base = place.module
    if type(base) is not place.kind or place.kind.forward is not place.forward or "forward" in base.__dict__:
        return f"the forward of {place.path} was replaced"
    return f"{place.path} has hooks" if has_hooks(base) else ""


def _is_or_becomes_float32(parameter: Any) -> bool:
    """Whether the engine computes the adapter. TRL rounds those of four-bit models to bfloat16; the engine moves them into float32 memory."""
    if parameter.dtype == torch.float32:
        return True
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return False
    # DistributedDataParallel has made its buffers by now, in the dtype that the parameters had then.
    return (
        not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
        or torch.distributed.get_world_size() == 1
    )


def _layer(path: str, module: Any, name: str, device: torch.device) -> AdapterLayer | str:
    """The adapter's part over one projection, or the reason why C++ does not compute it. device: of the computation."""
    children = module._modules
    parts: Any = [children[kind]._modules[name] for kind in ("lora_A", "lora_B", "lora_dropout")]
    linear_a, linear_b, dropout = parts
    if name in module.lora_variant:
        return f"{type(module.lora_variant[name]).__name__} over {path}"
    if (
        type(linear_a) is not torch.nn.Linear
        or type(linear_b) is not torch.nn.Linear
        or linear_b._parameters["bias"] is not None
    ):
        return f"an adapter with bias over {path}"
    if type(dropout) not in (torch.nn.Dropout, torch.nn.Identity):
        return f"{type(dropout).__name__} over {path}"
    for part in parts:
        if "forward" in part.__dict__ or has_hooks(part):
            return f"the adapter over {path} has hooks"
    a: Any = linear_a._parameters["weight"]
    b: Any = linear_b._parameters["weight"]
    if not (_is_or_becomes_float32(a) and _is_or_becomes_float32(b)):
        return f"the adapter over {path} is not float32"
    here = children["base_layer"]._parameters["weight"].device
    if a.device != b.device or a.device not in (here, device):  # PEFT makes it beside the base, the engine moves it
        return f"the adapter over {path} is on another device"
    rate = dropout.p if type(dropout) is torch.nn.Dropout else 0.0
    return AdapterLayer(path, a, b, a.shape[0], float(module.scaling[name]), rate)
