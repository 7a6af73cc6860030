# SPDX-License-Identifier: Apache-2.0
"""The storage options of a BitsAndBytesConfig, for C++."""

from typing import Any

#: QLoRA's format, the default without a config (Dettmers et al. 2023, arXiv:2305.14314).
QLORA: dict[str, Any] = {"quant_type": "nf4", "double_quant": True, "skip_modules": []}


def of(config: Any) -> dict[str, Any]:
    """quant_type, double_quant and skip_modules of transformers' config; QLORA for None."""
    if config is None:
        return QLORA
    return {
        "quant_type": config.bnb_4bit_quant_type,
        "double_quant": config.bnb_4bit_use_double_quant,
        "skip_modules": config.llm_int8_skip_modules or [],
    }
