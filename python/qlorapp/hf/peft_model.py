# SPDX-License-Identifier: Apache-2.0
"""get_peft_model, get_peft_config and prepare_model_for_kbit_training."""

import functools
from typing import Any

import peft

from . import lora4bit  # noqa: F401  (registers the layers over Linear4bit)
from .adapter_files import saves_together


@functools.wraps(peft.get_peft_model)
def get_peft_model(*args: Any, **options: Any) -> Any:
    # PEFT's, with its documentation. save_pretrained of the model replaces the files of an older adapter together.
    return saves_together(peft.get_peft_model(*args, **options))


def get_peft_config(given: Any) -> Any:
    """PEFT's function of this name for a dict, TRL's for a ModelConfig."""
    if isinstance(given, dict):
        return peft.get_peft_config(given)
    # Not at the top: only TRL's scripts have such a config.
    from trl import get_peft_config as of_trl  # type: ignore[attr-defined]

    return of_trl(given)


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
