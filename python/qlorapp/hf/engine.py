# SPDX-License-Identifier: Apache-2.0
"""Engine: the C++ model behind a model of transformers, in the same memory."""

import dataclasses
import json
import logging
from typing import Any, NamedTuple

import torch

_log = logging.getLogger("qlorapp")

#: Where the linear layers are in a block, in the order of transformers' module tree.
PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


@dataclasses.dataclass(frozen=True)
class Place:
    """A module of the tree as it was when the engine was attached."""

    path: str
    holder: dict[str, Any]
    name: str
    module: torch.nn.Module
    kind: type
    forward: Any
    #: What stood at the object's own forward: nothing, or the engine's.
    own_forward: Any

    @classmethod
    def of(cls, path: str, parent: torch.nn.Module) -> "Place":
        name = path.rsplit(".", 1)[-1]
        module = parent._modules[name]
        assert module is not None
        return cls(path, parent._modules, name, module, type(module), type(module).forward, vars(module).get("forward"))


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A parameter of the base: the object, and where its memory is."""

    path: str
    holder: dict[str, Any]
    name: str
    parameter: torch.nn.Parameter
    pointer: int


class AdapterLayer(NamedTuple):
    """What PEFT's layer over one projection holds under one adapter's name."""

    path: str
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    r: int
    scaling: float
    dropout: float


@dataclasses.dataclass
class Bound:
    """An adapter that lives in the C++ model's arena."""

    layers: list[AdapterLayer]
    pointers: list[int]


class Engine:
    """Computes what a pristine model of transformers computes. Built by attach(); shared storage, no copies.

    Holds the C++ model, the module tree as it was built, and the adapters of PEFT that were moved into the arena.
    """

    def __init__(self, model: torch.nn.Module, core: Any) -> None:
        self.core = core
        #: Set it to False to have transformers' forward compute, as to look for the cause of a difference.
        self.enabled = True
        self.places: list[Place] = []
        self.projections: list[Place] = []
        for path, module in model.named_modules():
            for name in module._modules:
                place = Place.of(f"{path}.{name}" if path else name, module)
                is_projection = place.path.startswith("model.layers.") and place.path.split(".", 3)[-1] in PROJECTIONS
                (self.projections if is_projection else self.places).append(place)
        self.base = [
            Frozen(f"{path}.{name}" if path else name, module._parameters, name, parameter, parameter.data_ptr())
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._bound: dict[str, Bound] = {}
        #: Counts adapters that were moved in: their names in C++.
        self._made = 0
        self._names: dict[str, str] = {}
        self._shown: list[AdapterLayer] = []
        #: The name in C++ of the adapter that was shown last; empty: the base alone.
        self.shown = ""
        #: A GPU computes a pass while the modules are looked at, as long as they were pristine the last time.
        self.runs_ahead = core.device.type == "cuda"
        self.was_pristine = False
        self._keep = "everything"
        self._told: set[str] = set()

    def say_why(self, reason: str) -> None:
        """Logs the first switch to transformers' forward for a reason."""
        if reason not in self._told:
            self._told.add(reason)
            _log.info(
                "[forward] transformers' forward computes this model: %s. Results are the same; steps are slower.", reason
            )

    # --- adapters

    def show(self, name: str, layers: list[AdapterLayer] | None) -> None:
        """Makes the adapter the active one, after moving PEFT's parameters into the arena if they are not there. None: the base alone.

        PEFT's Parameter objects stay; their memory becomes the arena's. Optimizers made before keep working.
        """
        self._shown = layers or []
        if layers is None:
            self.core.enable_adapters(False)
            self.shown = ""
            return
        self.core.enable_adapters(True)
        bound = self._bound.get(name)
        if bound is None or not self._is_current(bound, layers):
            self._move_in(name, layers)
        self.shown = self._names[name]
        if self.core.active_adapter != self.shown:
            self.core.active_adapter = self.shown

    def active_parameters(self) -> list[torch.nn.Parameter]:
        """Those of the adapter that was shown last; none without one."""
        return [parameter for layer in self._shown for parameter in (layer.a, layer.b)]

    @staticmethod
    def _is_current(bound: Bound, layers: list[AdapterLayer]) -> bool:
        return (
            len(bound.layers) == len(layers)
            and all(
                old.a is new.a and old.b is new.b and old.scaling == new.scaling and old.dropout == new.dropout
                for old, new in zip(bound.layers, layers, strict=True)
            )
            and all(
                parameter.data_ptr() == pointer
                for parameter, pointer in zip((p for layer in layers for p in (layer.a, layer.b)), bound.pointers, strict=True)
            )
        )

    def _move_in(self, name: str, layers: list[AdapterLayer]) -> None:
        core = self.core
        if name in self._names:
            core.delete_adapters(self._names[name])
        self._made += 1
        inside = f"adapter{self._made}"
        core.add_adapters(json.dumps(_config_of(layers)), 0, inside)
        self._names[name] = inside
        by_name = {}
        for layer in layers:
            by_name[f"base_model.model.{layer.path}.lora_A.weight"] = layer.a
            by_name[f"base_model.model.{layer.path}.lora_B.weight"] = layer.b
        slices = core.parameters(inside)
        with torch.no_grad():
            for i, (stored, held) in enumerate(zip(core.adapter_names(inside), slices, strict=True)):
                parameter = by_name.pop(stored)
                held.copy_(parameter)
                parameter.data = held.detach()
                core.adopt_parameter(i, parameter, inside)
        assert not by_name
        pointers = [parameter.data_ptr() for layer in layers for parameter in (layer.a, layer.b)]
        self._bound[name] = Bound(layers, pointers)

    # --- memory

    def follow(self) -> None:
        """Makes the embedding's parameter share memory with C++'s table again, which embedding_on_host moves."""
        table = self.core.embed_tokens
        for i, frozen in enumerate(self.base):
            if frozen.path == "model.embed_tokens.weight" and frozen.pointer != table.data_ptr():
                frozen.parameter.data = table
                self.base[i] = dataclasses.replace(frozen, pointer=table.data_ptr())

    def bring_embedding_back(self) -> None:
        """To the device of the rest, where transformers' forward and model.device expect it."""
        if self.core.embed_tokens.device != self.core.device:
            self.core.move_embedding(False)
            self.follow()

    def keep(self, keep: str) -> None:
        """What each block keeps for backward: parse_segments' language (nn/keep.hpp)."""
        if keep != self._keep:
            self.core.set_keep(keep)
            self._keep = keep

    def forget_keep(self) -> None:
        """To be called when a C++ trainer has told the model what to keep: the next keep() tells it again."""
        self._keep = ""


def _config_of(layers: list[AdapterLayer]) -> dict[str, Any]:
    """The LoraConfig that makes slots of these shapes and scalings: one rank and alpha per layer."""
    return {
        "r": layers[0].r,
        "lora_alpha": layers[0].scaling * layers[0].r,
        "lora_dropout": layers[0].dropout,
        "target_modules": [layer.path for layer in layers],
        "rank_pattern": {layer.path: layer.r for layer in layers if layer.r != layers[0].r},
        "alpha_pattern": {
            layer.path: layer.scaling * layer.r
            for layer in layers
            if layer.scaling * layer.r != layers[0].scaling * layers[0].r
        },
    }
