# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model: named sets that C++ holds, as nn.Parameters in the module tree. One is active at a time."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from . import _C, module_tree
from .base_parameters import BaseParameters
from .layers import seed_from_torch
from .peft_config import LoraConfig, as_lora_config

#: (missing_keys, unexpected_keys): what torch's load_state_dict, and so PEFT, returns.
LoadResult = _IncompatibleKeys


def is_of_an_adapter(name: str) -> bool:
    """Of a tensor in state_dict()."""
    return ".lora_" in name or ".modules_to_save." in name


class ModelAdapters(torch.nn.Module):
    """Half of CausalLM: everything about its adapters."""

    _core: _C.CausalLM
    _folder: pathlib.Path | None
    name_or_path: str
    peft_config: dict[str, LoraConfig]
    #: Of each set, in the order of C++: where the parameter hangs in the tree, and the parameter that C++ holds.
    _adapters: dict[str, list[tuple[torch.nn.Module, torch.nn.Parameter]]]
    #: The others, which C++ has loaded.
    _base_parameters: BaseParameters
    _disabled = False

    def add_adapters(self, config: LoraConfig, seed: int | None = None, adapter_name: str = "default") -> None:
        """Adapters by PEFT's rules. The seed comes from torch's generator unless it is given. The first are active at once."""
        module_tree.check_targets(config.target_modules, self)
        weights = os.fspath(self._folder) if self._folder is not None else None
        seed = seed_from_torch() if seed is None else seed
        self._core.add_adapters(json.dumps(config.to_dict()), seed, adapter_name, weights)
        if self._core.base_was_changed:
            module_tree.refresh_weights(self, self._core)
            self._base_parameters = BaseParameters(self)
        self._show_adapters(adapter_name)
        self.set_trainable(adapter_name, adapter_name == self._core.active_adapter)

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str | None = None) -> None:
        """transformers' way to a trainable adapter: that of get_peft_model, without PEFT's level above the model."""
        config, name = as_lora_config(adapter_config), adapter_name or "default"
        self.add_adapters(config, adapter_name=name)
        self.set_adapter(name, trainable=not config.inference_mode)

    def active_adapters(self) -> list[str]:
        """The one that computes.  @raises ValueError where there is none, as transformers does."""
        if not self._core.active_adapter:
            raise ValueError(
                "[active_adapters] the model has no adapter. Add one: model.add_adapter(LoraConfig(…)), or get_peft_model(model, LoraConfig(…))."
            )
        return [self._core.active_adapter]

    @property
    def adapters_disabled(self) -> bool:
        """Does the base model compute alone, though there may be adapters?"""
        return self._disabled

    def disable_adapters(self) -> None:
        """The base model computes alone until enable_adapters()."""
        self._set_disabled(True)

    def enable_adapters(self) -> None:
        """The active adapter computes again."""
        self._set_disabled(False)

    def load_adapter(self, folder: str | os.PathLike[str], adapter_name: str = "default") -> LoadResult:
        """A PEFT folder's adapter under a name that the model does not have, or its values into an equal one. It is loaded whole or not at all:
        the keys that are missing or unexpected, which it returns as PEFT does, are none."""
        had = adapter_name in self.peft_config
        if had:
            self._rebind(adapter_name)
        self._core.load_adapter(os.fspath(folder), adapter_name)
        if not had:
            self._show_adapters(adapter_name)
        return LoadResult([], [])

    def get_adapter_state_dict(self, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Of one adapter, or of the active one, by the names that transformers has for them: PEFT's without base_model.model."""
        name = adapter_name or self.active_adapters()[0]
        self._rebind(name)
        return {key.removeprefix("base_model.model."): held.detach() for key, held in self._core.adapter_tensors(name)}

    def save_adapter(self, folder: str | os.PathLike[str], adapter_name: str = "default") -> None:
        """One adapter as a PEFT folder."""
        self._rebind(adapter_name)
        self._core.save_adapter(os.fspath(folder), self.name_or_path, adapter_name)

    def set_adapter(self, adapter_name: str | Sequence[str], trainable: bool = True) -> None:
        """Makes this the adapter that computes; the others are frozen.  @raises ValueError for several."""
        if not isinstance(adapter_name, str):
            if len(adapter_name) != 1:
                raise ValueError(f"[set_adapter] one adapter is active at a time; got {list(adapter_name)}. Name one.")
            adapter_name = adapter_name[0]
        self._core.active_adapter = adapter_name
        self._show_active()
        for name in self._adapters:
            self.set_trainable(name, trainable and name == adapter_name)

    def adapter_parameters(self) -> list[tuple[torch.nn.Module, torch.nn.Parameter]]:
        """Of the active adapter: where a parameter hangs in the tree, and the parameter."""
        return self._adapters[self._core.active_adapter] if self._core.active_adapter else []

    def set_trainable(self, adapter_name: str, trainable: bool) -> None:
        for _, parameter in self._adapters[adapter_name]:
            parameter.requires_grad_(trainable)

    def delete_adapter(self, adapter_name: str) -> None:
        """If it was the active one, the first of the others becomes that."""
        self._core.delete_adapters(adapter_name)
        del self._adapters[adapter_name], self.peft_config[adapter_name]
        for module in list(self.modules()):
            if isinstance(module, (module_tree.LoraLayer, module_tree.ModulesToSave)):
                module.remove(adapter_name)
        if not self._adapters:
            module_tree.unwrap(self)
        self._show_active()

    def _show_adapters(self, adapter_name: str) -> None:
        """Makes the nn.Parameters that C++ holds from now on, and puts them where PEFT has them."""
        core = self._core
        config = json.loads(core.lora_config_json(adapter_name))
        self.peft_config[adapter_name] = LoraConfig(**config)
        parts: dict[str, dict[str, torch.nn.Parameter]] = {}
        tables: dict[str, torch.nn.Parameter] = {}
        parameters = []
        for i, (full, tensor) in enumerate(zip(core.adapter_names(adapter_name), core.parameters(adapter_name), strict=True)):
            parameter = torch.nn.Parameter(tensor.detach())
            parameters.append(parameter)
            core.adopt_parameter(i, parameter, adapter_name)
            module, _, part = full.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            if part.startswith("lora_"):
                parts.setdefault(module, {})[part] = parameter
            else:
                tables[f"{module}.{part}".removeprefix(".")] = parameter
        for module, held in parts.items():
            layer = module_tree.lora_layer(self, module)
            scaling, rank = core.scaling_of(module, adapter_name), held["lora_A"].shape[0]
            alpha = scaling * (rank**0.5 if config["use_rslora"] else rank)
            layer.add(adapter_name, alpha, scaling, config["lora_dropout"], held)
        for module, parameter in tables.items():
            module_tree.module_to_save(self, module).add(adapter_name, parameter)
        for name, tensor in core.adapter_tensors(adapter_name):  # the head of a table that is both
            module = name.removeprefix("base_model.model.").removesuffix(".weight")
            if module in ("lm_head", "model.embed_tokens") and module not in tables:
                module_tree.module_to_save(self, module).add(adapter_name, next(p for p in parameters if p is tensor))
        self._adapters[adapter_name] = [(self._holder(self.full_name(name, adapter_name)), parameter)
                                        for name, parameter in zip(core.adapter_names(adapter_name), parameters, strict=True)]  # fmt: skip
        self._show_active()

    @staticmethod
    def full_name(name: str, adapter_name: str) -> str:
        """The name in PeftModel.state_dict() of what a file of the adapter calls `name`."""
        stem = name.removesuffix(".weight")
        if ".lora_" in name:
            return f"{stem}.{adapter_name}.weight"
        return f"{stem}.modules_to_save.{adapter_name}.weight"

    def _holder(self, full_name: str) -> torch.nn.Module:
        holder: torch.nn.Module = self.get_submodule(full_name.removeprefix("base_model.model.").removesuffix(".weight"))
        return holder

    def _show_active(self) -> None:
        active = [self._core.active_adapter] if self._core.active_adapter and not self._disabled else []
        for module in self.modules():
            if isinstance(module, (module_tree.LoraLayer, module_tree.ModulesToSave)):
                module.active_adapters = active

    def _rebind(self, adapter_name: str = "") -> None:
        """Notices parameters that were replaced, got other memory by `.data =`, or lost their gradient to zero_grad()."""
        self._base_parameters.put_back()
        name = adapter_name or self._core.active_adapter
        if not name:
            return
        held = self._adapters[name]
        for i, (holder, known) in enumerate(held):
            now: Any = holder.weight
            if now.dtype != torch.float32 and now.is_floating_point():
                module_tree.say_that_adapters_stay(now.dtype)
                now.data = now.detach().float()
            if now is not known:
                values = now.detach()
                now.data = known.detach()
                now.data.copy_(values)
                self._core.adopt_parameter(i, now, name)
                held[i] = (holder, now)
        self._core.bind_values(name)
        if torch.is_grad_enabled() and name == self._core.active_adapter:
            self._core.bind_gradients()

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model, for as long as the block runs."""
        before = self._disabled
        self._set_disabled(True)
        try:
            yield
        finally:
            self._set_disabled(before)

    def _set_disabled(self, disabled: bool) -> None:
        self._disabled = disabled
        self._core.enable_adapters(not disabled)
        self._show_active()
