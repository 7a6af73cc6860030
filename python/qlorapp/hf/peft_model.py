# SPDX-License-Identifier: Apache-2.0
"""get_peft_model: PEFT's own, told which layer goes over Linear4bit."""

from typing import Any

import peft

from .linear4bit import Linear4bit
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
