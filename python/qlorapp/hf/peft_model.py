# SPDX-License-Identifier: Apache-2.0
"""get_peft_model (PEFT's) and prepare_model_for_kbit_training."""

from typing import Any

from peft import get_peft_model

from . import lora4bit  # noqa: F401  (registers the layers over Linear4bit)

__all__ = ["get_peft_model", "prepare_model_for_kbit_training"]


def prepare_model_for_kbit_training(
    model: Any, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Any:
    """Freezes the model and turns checkpointing on, as PEFT's function of this name. @returns the model.

    Unlike PEFT's it leaves norms, embeddings and head in 16 bits. Norms and softmax compute in float32 for any stored dtype, and float32
    copies of embeddings and head would cost 2 GB at 8 billion parameters.
    """
    model.requires_grad_(False)
    if use_gradient_checkpointing:
        model.enable_input_require_grads()  # otherwise a re-entrant block of a frozen base computes no gradient
        # the name since transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(gradient_checkpointing_kwargs)
    return model
