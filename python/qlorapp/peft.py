# SPDX-License-Identifier: Apache-2.0
"""PEFT's way to adapters: get_peft_model, PeftModel, prepare_model_for_kbit_training."""

import os
from typing import Any

import torch

from .configs import LoraConfig
from .modeling import CausalLM


class LoraModel(torch.nn.Module):
    """The level between PeftModel and the model, for the names alone: base_model.model.…"""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class PeftModel(torch.nn.Module):
    """A CausalLM with adapters under PEFT's names. What it does not have itself it asks the model for."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.base_model = LoraModel(model)
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model.model, name)

    def get_base_model(self) -> CausalLM:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As CausalLM.forward."""
        return self.base_model.model(*args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, safe_serialization: bool = True, **ignored: Any) -> None:
        """adapter_model.safetensors and adapter_config.json, which PEFT and vLLM load. Nothing else is ever written."""
        if not safe_serialization:
            raise ValueError("[save_pretrained] adapters are written as safetensors only. Leave out safe_serialization=False.")
        if unknown := set(ignored) - {"push_to_hub", "selected_adapters", "token"} or ignored.get("push_to_hub"):
            raise TypeError(
                f"[save_pretrained] {sorted(unknown) if isinstance(unknown, set) else 'push_to_hub'} is not supported."
            )
        model = self.base_model.model
        model._rebind()
        model.core.save_adapter(os.fspath(save_directory), model.name_or_path)

    @classmethod
    def from_pretrained(cls, model: CausalLM, model_id: str | os.PathLike, is_trainable: bool = False) -> "PeftModel":
        """The model with the adapters of a PEFT folder: for use, in evaluation mode, unless is_trainable."""
        model.load_adapter(model_id)
        wrapped = cls(model)
        if not is_trainable:
            for _, parameter in model._adapters:
                parameter.requires_grad_(False)
        return wrapped.train(is_trainable)


def get_peft_model(model: CausalLM, peft_config: LoraConfig, seed: int | None = None) -> PeftModel:
    """Adds trainable adapters to `model` and returns it under PEFT's names, in training mode.

    A is random and B zero, as in PEFT. The values come from torch's generator (torch.manual_seed) unless `seed` is given.
    """
    model.add_adapters(peft_config, seed)
    return PeftModel(model).train()


def prepare_model_for_kbit_training(
    model: CausalLM, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> CausalLM:
    """Turns checkpointing on. The base is frozen from the start.

    Unlike PEFT's it leaves norms, embeddings and head in 16 bits: norms and softmax are computed in float32 whatever they are
    stored in, and float32 copies of embeddings and head would cost 2 GB at 8 billion parameters.
    """
    if use_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)
    return model
