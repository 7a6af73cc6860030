# SPDX-License-Identifier: Apache-2.0
"""The modules that a model shows: Hugging Face's tree, names and shapes, with PEFT's adapters in it.

The C++ model computes a whole forward pass in one call; these modules hold the very tensors that it uses, so that
named_modules, named_parameters and state_dict look as they do there. Each linear layer can also be called by itself. Hooks on
them do not run during the model's forward pass.
"""

from typing import Any

import torch

from . import _C


class Linear4bit(torch.nn.Module):
    """A linear layer whose weight is stored in four bits; state_dict has bitsandbytes' keys."""

    def __init__(self, weight: _C.QuantizedTensor) -> None:
        super().__init__()
        self.quant_state = weight
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight.packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_state.linear(x)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.quant_state.named_tensors(prefix + "weight"):
            destination[name] = tensor

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.quant_state.quant_type}"


def linear(weight: "torch.Tensor | _C.QuantizedTensor") -> torch.nn.Module:
    if isinstance(weight, _C.QuantizedTensor):
        return Linear4bit(weight)
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


class LoraLayer(torch.nn.Module):
    """A linear layer with PEFT's names for its adapter."""

    def __init__(
        self, base_layer: torch.nn.Module, a: torch.nn.Parameter, b: torch.nn.Parameter, scaling: float, dropout: float
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        drop = torch.nn.Dropout(dropout) if dropout > 0 else torch.nn.Identity()
        self.lora_dropout = torch.nn.ModuleDict({"default": drop})
        self.lora_A = torch.nn.ModuleDict({"default": _holding(a)})
        self.lora_B = torch.nn.ModuleDict({"default": _holding(b)})
        self.scaling = {"default": scaling}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.lora_A["default"](self.lora_dropout["default"](x.float()))
        return self.base_layer(x) + (self.lora_B["default"](u) * self.scaling["default"]).to(x.dtype)


def _holding(parameter: torch.nn.Parameter) -> torch.nn.Linear:
    module = torch.nn.Linear(parameter.shape[1], parameter.shape[0], bias=False, device="meta")
    module.weight = parameter
    return module


def _norm(weight: torch.Tensor, eps: float) -> torch.nn.RMSNorm:
    module = torch.nn.RMSNorm(weight.shape[0], eps=eps, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


class Group(torch.nn.Module):
    """A module that only holds others: the decoder, a block, an attention, an MLP."""


def build(root: torch.nn.Module, core: _C.CausalLM, rms_norm_eps: float) -> None:
    """Puts the frozen base under `root`: model.embed_tokens, model.layers.N.…, model.norm, lm_head."""
    root.model = Group()
    root.model.layers = torch.nn.ModuleList()
    for name, weight in core.named_weights():
        parent, leaf = _parent(root, name)
        if leaf == "embed_tokens":
            embedding = torch.nn.Embedding(*weight.shape, device="meta")
            embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
            parent.add_module(leaf, embedding)
        elif leaf == "lm_head" and core.tied:
            root.lm_head = _holding(root.model.embed_tokens.weight)
        elif leaf.endswith("norm"):
            parent.add_module(leaf, _norm(weight, rms_norm_eps))
        else:
            parent.add_module(leaf, linear(weight))


def _parent(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that is to hold `name`, made where it is missing."""
    *path, leaf = name.split(".")
    module: Any = root
    for part in path:
        if part.isdigit():
            while len(module) <= int(part):
                module.append(Group())
            module = module[int(part)]
        else:
            if not hasattr(module, part):
                module.add_module(part, Group())
            module = getattr(module, part)
    return module, leaf


def inject(
    root: torch.nn.Module, name: str, a: torch.nn.Parameter, b: torch.nn.Parameter, scaling: float, dropout: float
) -> LoraLayer:
    """Replaces the linear layer `name` by one with an adapter around it."""
    parent, leaf = _parent(root, name)
    layer = LoraLayer(getattr(parent, leaf), a, b, scaling, dropout)
    setattr(parent, leaf, layer)
    return layer
