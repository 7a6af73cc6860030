# SPDX-License-Identifier: Apache-2.0
"""get_peft_model: PEFT's own, told which layer goes over Linear4bit; and what is done to a model before."""

from typing import Any

import peft

from ..nn import Linear4bit
from .lora4bit import Lora4bitLinear


def get_peft_model(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's PeftModel. LoRA layers over Linear4bit merge into four bits, and restore the exact codes."""
    over_linear4bit(peft_config)
    return peft.get_peft_model(model, peft_config, *args, **kwargs)


def over_linear4bit(peft_config: Any) -> None:
    """Tells a LoraConfig which layer goes over Linear4bit."""
    register = getattr(peft_config, "_register_custom_module", None)
    if register is not None:
        register({Linear4bit: Lora4bitLinear})


def prepare_model_for_kbit_training(
    model: Any, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Any:
    """Freezes the model and turns checkpointing on, as PEFT's function of this name. @returns the model.

    Unlike PEFT's it leaves norms, embeddings and head in 16 bits: norms and softmax are computed in float32 whatever they are stored in,
    and float32 copies of embeddings and head would cost 2 GB at 8 billion parameters.
    """
    model.requires_grad_(False)
    if use_gradient_checkpointing:
        model.enable_input_require_grads()  # a re-entrant block of a frozen base computes no gradient without it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)
    return model
