# SPDX-License-Identifier: Apache-2.0
"""The frozen base's parameters: what a script does to them that C++ would not see."""

from typing import Any

import torch

from . import _C
from .module_tree import ModulesToSave, is_of_the_base


class BaseParameters:
    """Every parameter of the base with the memory that C++ computes with, listed once: a forward pass looks at each of them."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        for module in root.modules():
            if is_of_the_base(module):
                weight: Any = module.weight
                self._held.append((weight, weight.detach(), weight.data_ptr()))

    def put_back(self) -> None:
        """Notices parameters that got other memory by `.data =`. Casts of old notebooks pass, and change nothing.

        @raises ValueError for one that got other values: they would be shown, and never computed with.
        """
        for shown, known, pointer in self._held:
            if shown.data_ptr() == pointer and shown.dtype == known.dtype:
                continue
            now = shown.detach()
            # Compared in what it was cast to: rounding to bfloat16 is a cast as well.
            if now.shape != known.shape or not torch.equal(now, known.to(now.device, now.dtype)):
                raise ValueError(
                    f"[modules] {self._name_of(shown)}.data must stay the tensor that was loaded, with which C++ computes; got another one of "
                    f"shape {tuple(now.shape)} and {now.dtype} with other values. Put `.data` back, and write into it: "
                    "module.weight.data.copy_(…)."
                )
            if now.dtype != known.dtype:
                _C.log_warning_once(
                    f"[modules] a cast of base weights to {now.dtype} has no effect: they stay in {known.dtype}, as they were loaded. Norms are "
                    "computed in float32 anyway; dtype= of from_pretrained chooses for the others."
                )
            shown.data = known

    def trainable(self) -> str | None:
        """The first that requires a gradient, by its name. One that an adapter's copy stands for is not computed with."""
        if not any(shown.requires_grad for shown, _, _ in self._held):
            return None
        replaced = {
            id(module.original_module.weight)
            for module in self._root.modules()
            if isinstance(module, ModulesToSave) and module.active_adapters
        }
        return next(
            (self._name_of(shown) for shown, _, _ in self._held if shown.requires_grad and id(shown) not in replaced), None
        )

    def _name_of(self, wanted: torch.nn.Parameter) -> str:
        return next(name for name, parameter in self._root.named_parameters() if parameter is wanted)


def why_not_trained(name: str) -> str:
    """The rule and the way out, for a base parameter that requires a gradient."""
    return (
        f"requires_grad=True on {name} has no effect: the base is frozen, and C++ computes no gradient for it. To train embed_tokens or "
        f"lm_head, name it in LoraConfig(modules_to_save=[…]); for others load the model by transformers, whose autograd trains them, and "
        f"add adapters by get_peft_model. Else call requires_grad_(False) on it."
    )
