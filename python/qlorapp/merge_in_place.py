# SPDX-License-Identifier: Apache-2.0
"""merge_and_unload(): an adapter added to weights that are in memory, where these are not in four bits."""

from typing import TYPE_CHECKING, Any

import torch

from . import module_tree

if TYPE_CHECKING:
    from .modeling import CausalLM

#: What is said where the base is in four bits, and where an adapter is to be taken out again.
TO_A_FOLDER = (
    "qlorapp.merge(model_folder, adapter_folder, output) writes base and saved adapter as one 16-bit checkpoint; for use, the adapter "
    "folder serves beside the base as it is."
)


def _merged(layer: module_tree.LoraLayer, name: str) -> torch.Tensor:
    """The layer's weight with the adapter, summed in float32, as merge() and the forward pass have it."""
    values: Any = layer
    update = layer.scaling[name] * (values.lora_B[name].weight.float() @ values.lora_A[name].weight.float())
    whole: torch.Tensor = values.base_layer.weight.float() + update
    if name in layer.lora_magnitude_vector:
        whole = whole * (values.lora_magnitude_vector[name].weight / torch.linalg.norm(whole, dim=1)).unsqueeze(1)
    return whole


def _tables(model: "CausalLM") -> list[tuple[str, Any]]:
    """Embedding and head where an adapter trains them."""
    both = (("embed_tokens", model.model.embed_tokens), ("lm_head", model.lm_head))
    return [(leaf, module) for leaf, module in both if isinstance(module, module_tree.ModulesToSave)]


def _refuse(model: "CausalLM", names: list[str]) -> None:
    for name in names:
        if name not in model.peft_config:
            raise ValueError(
                f"[PeftModel] merge_and_unload: there is no adapter {name!r}; the model has {list(model.peft_config)}."
            )
        tables = {
            leaf: module.modules_to_save[name].weight for leaf, module in _tables(model) if name in module.modules_to_save
        }
        if model.core.tied and tables and (len(tables) == 1 or tables["embed_tokens"] is not tables["lm_head"]):
            raise NotImplementedError(
                f"[PeftModel] merge_and_unload: the adapter trains {' and '.join(tables)} away from the table that embedding and head share, "
                f"and in memory they go on sharing it. {TO_A_FOLDER}"
            )
    if model.is_loaded_in_4bit:
        raise NotImplementedError(
            "[PeftModel] merge_and_unload: a merge cannot stay exact in place: four-bit weights would be quantized a second time. Load the "
            f"base in 16 bits to merge in memory; {TO_A_FOLDER}"
        )


@torch.no_grad()
def merge_and_unload(model: "CausalLM", names: list[str], safe_merge: bool) -> "CausalLM":
    """The model with these adapters in its weights, each sum rounded once to the model's dtype, and without any adapter.

    safe_merge: weights that would not be finite are an error, and nothing of that adapter is in them then.
    """
    _refuse(model, names)
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, module_tree.LoraLayer)]
    for name in names:
        model._rebind(name)
        held = [(path, layer) for path, layer in layers if name in layer.lora_A]
        if safe_merge and (broken := [path for path, layer in held if not bool(_merged(layer, name).isfinite().all())]):
            raise ValueError(
                f"[PeftModel] merge_and_unload: with the adapter {name!r}, {broken[0]} is not finite. Nothing of it was merged."
            )
        for _, layer in held:
            weight: Any = layer.base_layer.weight
            weight.copy_(_merged(layer, name))
        for _, module in _tables(model):
            if name in module.modules_to_save:
                table: Any = module.original_module
                table.weight.copy_(module.modules_to_save[name].weight)
    for name in list(model.peft_config):
        model.delete_adapter(name)
    return model
