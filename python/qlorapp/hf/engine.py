# SPDX-License-Identifier: Apache-2.0
"""Engine: the C++ model behind a transformers model, in the same memory."""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .. import _C
from ..nn import Params4bit

_log = logging.getLogger("qlorapp")


@dataclasses.dataclass(frozen=True)
class Place:
    """A module of the tree at the time when the engine was attached."""

    path: str
    holder: dict[str, Any]
    name: str
    module: torch.nn.Module
    kind: type
    forward: Any
    #: The forward in the object's dict: None, or the engine's.
    own_forward: Any

    @classmethod
    def of(cls, path: str, parent: torch.nn.Module) -> "Place":
        name = path.rsplit(".", 1)[-1]
        module = parent._modules[name]
        assert module is not None
        return cls(path, parent._modules, name, module, type(module), type(module).forward, vars(module).get("forward"))


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A parameter of the base: the object, and the address of its memory."""

    path: str
    holder: dict[str, Any]
    name: str
    parameter: torch.nn.Parameter
    pointer: int


class AdapterLayer(NamedTuple):
    """One adapter's part of PEFT's layer over one projection."""

    path: str
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    r: int
    scaling: float
    dropout: float


@dataclasses.dataclass
class Bound:
    """An adapter in the C++ model's arena."""

    layers: list[AdapterLayer]
    pointers: list[int]


class Engine:
    """Computes the same as a pristine transformers model. attach() makes it. Storage is shared; nothing is copied.

    Holds the C++ model, the original module tree, and PEFT's adapters that were moved into the arena.
    """

    def __init__(self, model: torch.nn.Module, core: Any) -> None:
        self.core = core
        #: False makes transformers' forward compute, to compare results.
        self.enabled = True
        self.places: list[Place] = []
        self.projections: list[Place] = []
        linear, body = set(core.linear_names()), core.body

        def is_text(path: str) -> bool:  # a wrapper has other parts, which transformers computes
            return path.startswith(body) or body.startswith(path) or path.startswith("lm_head")

        for path, module in model.named_modules():
            for name in module._modules:
                place = Place.of(f"{path}.{name}" if path else name, module)
                if is_text(place.path):
                    (self.projections if place.path in linear else self.places).append(place)
        self.base = [
            Frozen(f"{path}.{name}" if path else name, module._parameters, name, parameter, parameter.data_ptr())
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and is_text(path)
        ]
        self._head = next(frozen for frozen in self.base if frozen.path == "lm_head.weight")
        self._blocks_on_host = False
        self.follow()
        self._bound: dict[str, Bound] = {}
        #: The number of adapters moved in so far; makes their names in C++.
        self._made = 0
        self._names: dict[str, str] = {}
        self._shown: list[AdapterLayer] = []
        #: The name in C++ of the adapter shown last; empty: the base alone.
        self.shown = ""
        #: On a GPU a pass starts before the modules are checked, if they were pristine the last time.
        self.runs_ahead = core.device.type == "cuda"
        #: What a glance showed when a check last found the model pristine; None: the last check did not.
        self._pristine: tuple[Any] | None = None
        #: Counts checks of the modules, which also set C++'s active adapter.
        self.checks = 0
        #: Held while C++'s loop generates. Another thread switches the adapter afterwards.
        self.loop = threading.RLock()
        self._keep = "everything"
        self._told: set[str] = set()

    @functools.cached_property
    def base_inputs(self) -> str:
        """C++'s base_inputs(). Of a base that is divided, every process asks."""
        return str(_C.base_inputs(self.core))

    @property
    def is_spread(self) -> bool:
        """Whether weights wait on the host, or on other processes."""
        return self._blocks_on_host or bool(self.core.is_sharded)

    def say_why(self, reason: str) -> None:
        """Logs a switch to transformers' forward, once per reason. @raises ValueError if only C++ has the whole base."""
        if self.core.is_sharded:
            raise ValueError(
                f"[forward] a base that is divided over processes (base_sharding) computes in C++ alone, which does not do this: {reason}. Change "
                "it, or load the model without base_sharding."
            )
        if reason not in self._told:
            self._told.add(reason)
            _log.info(
                "[forward] transformers' forward computes this model: %s. Results are the same; steps are slower.", reason
            )

    @contextlib.contextmanager
    def off_if(self, reason: str) -> Iterator[None]:
        """Makes transformers' code compute inside, if there is a reason, which is logged."""
        before = self.enabled
        if reason and before:
            self.say_why(reason)
            self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    def note_pristine(self, pristine: bool) -> None:
        """Records the outcome of a check, which decides whether the next pass may run ahead of its own."""
        self._pristine = (self._glance(),) if pristine else None

    def may_run_ahead(self) -> bool:
        """Whether the next check will probably find what the last one found, as far as one adapted layer shows."""
        return self.runs_ahead and self.seems_pristine()

    def seems_pristine(self) -> bool:
        """Whether the last check found the model pristine, and one adapted layer shows no change since."""
        return self._pristine is not None and self._pristine == (self._glance(),)

    def _glance(self) -> Any:
        """The adapters of the first layer that has any. Trainers with a reference model turn them off in every other pass."""
        for place in self.projections:
            module: Any = place.holder.get(place.name)
            if module is not place.module:
                return module, getattr(module, "disable_adapters", None), tuple(getattr(module, "active_adapters", ()))
        return None

    # --- adapters

    def show(self, name: str, layers: list[AdapterLayer] | None) -> None:
        """Activates the adapter, after moving PEFT's parameters into the arena if necessary. None: the base alone.

        PEFT's Parameter objects stay, with the arena's memory, which is float32. Optimizers made earlier keep working.
        """
        current = layers is not None and self._is_current(self._bound.get(name), layers)
        stays = self.shown == self._names[name] if current else layers is None and not self.shown
        with contextlib.nullcontext() if stays else self.loop:
            self._shown = layers or []
            self.core.enable_adapters(layers is not None)
            if layers is None:
                self.shown = ""
                return
            if not current:
                self._move_in(name, layers)
            self.shown = self._names[name]
            if self.core.active_adapter != self.shown:
                self.core.active_adapter = self.shown

    def active_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the adapter shown last."""
        return [parameter for layer in self._shown for parameter in (layer.a, layer.b)]

    @staticmethod
    def _is_current(bound: Bound | None, layers: list[AdapterLayer]) -> bool:
        return (
            bound is not None
            and len(bound.layers) == len(layers)
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
        if layers[0].a.dtype != torch.float32:
            _log.info("[forward] the adapter is in float32 from now on: %s loses small updates.", layers[0].a.dtype)
        slices = core.parameters(inside)
        with torch.no_grad():
            for i, (stored, held) in enumerate(zip(core.adapter_names(inside), slices, strict=True)):
                parameter = by_name.pop(stored)
                held.copy_(parameter)
                gradient, parameter.grad = parameter.grad, None  # a gradient must have the parameter's dtype
                parameter.data = held.detach()
                parameter.grad = None if gradient is None else gradient.to(held.dtype)
                core.adopt_parameter(i, parameter, inside)
        assert not by_name
        pointers = [parameter.data_ptr() for layer in layers for parameter in (layer.a, layer.b)]
        self._bound[name] = Bound(layers, pointers)

    # --- memory

    def follow(self) -> None:
        """Shares memory with C++'s weights again, after embedding_on_host or base_on_host moved them."""
        if self.core.is_sharded:  # no memory is shared
            return
        weights = dict(self.core.named_weights())
        for i, frozen in enumerate(self.base):
            weight = weights.get(frozen.path)
            values = weight.packed if isinstance(weight, _C.QuantizedTensor) else weight
            if values is None or frozen.pointer == values.data_ptr():
                continue
            if isinstance(frozen.parameter, Params4bit) and frozen.parameter.module is not None:
                frozen.parameter.module.quant_state = weight
            frozen.parameter.data = values
            self.base[i] = dataclasses.replace(frozen, pointer=values.data_ptr())
        self._blocks_on_host = any(weight.device != self.core.device for path, weight in weights.items() if ".layers." in path)

    def bring_embedding_back(self) -> None:
        """Moves the embedding to the model's device, where transformers' forward expects it."""
        if self.core.embedding_on_host:
            self.core.move_embedding(False)
            self.follow()

    def bring_back(self) -> None:
        """Moves all weights to the model's device, where transformers' forward expects them."""
        if self.core.is_sharded:
            self.say_why("the engine is off")
        self.bring_embedding_back()
        if self._blocks_on_host:
            self.core.move_blocks(False)
            self.follow()

    def lend_head(self) -> None:
        """Gathers the head of a sharded base, for a caller that multiplies by its weight (TRL), until take_head_back()."""
        if self.core.is_sharded:
            self._head.holder[self._head.name] = torch.nn.Parameter(self.core.gathered_head(), requires_grad=False)

    def take_head_back(self) -> None:
        """Ends lend_head(), which the next pass also does."""
        if self.core.is_sharded:
            self._head.holder[self._head.name] = self._head.parameter

    def keep(self, keep: str) -> None:
        """Sets the tensors that each block keeps for backward, in the syntax of parse_segments (nn/keep.hpp)."""
        if keep != self._keep:
            self.core.set_keep(keep)
            self._keep = keep

    def forget_keep(self) -> None:
        """Makes the next keep() set the model again. Call it after a C++ trainer has changed the setting."""
        self._keep = ""


def _config_of(layers: list[AdapterLayer]) -> dict[str, Any]:
    """The LoraConfig with these shapes and scalings: one rank and alpha per layer."""
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
