# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA layer over Linear4bit. Only merging differs: it quantizes to four bits again, and unmerging restores the exact codes.

Importing this module converts every such layer, because PEFT's dispatch knows only bitsandbytes' Linear4bit.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch.nn.modules.module import register_module_module_registration_hook

from ..nn import Linear4bit


class Lora4bitLinear(Linear):
    """merge() quantizes base plus update, as PEFT does over bitsandbytes' layers. unmerge() restores the exact codes and scales."""

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base: Any = self.get_base_layer()
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            if self.lora_bias[name]:
                raise ValueError(
                    "[merge] an adapter with lora_bias cannot be merged into a layer without bias. Unload it instead."
                )
            whole = base.dequantize().float()
            if name in self.lora_variant:
                whole = self.lora_variant[name].merge_safe(self, name, whole)
            else:
                whole = whole + self.get_delta_weight(name).float()
            if safe_merge and not bool(torch.isfinite(whole).all()):
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            if not self.merged_adapters:
                self._before = base.weight, base.quant_state
            base.weight = base.requantize(whole)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        if self.merged_adapters:
            base: Any = self.get_base_layer()
            base.weight, base.quant_state = self._before
            self.merged_adapters.clear()


def _over_linear4bit(parent: torch.nn.Module, name: str, module: Any) -> None:
    """torch calls it for each module that is registered as a child."""
    if type(module) is Linear and isinstance(module.base_layer, Linear4bit):
        module.__class__ = Lora4bitLinear


register_module_module_registration_hook(_over_linear4bit)
