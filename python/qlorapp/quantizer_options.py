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


def of_merge(config: Any, base: str | None) -> dict[str, Any]:
    """The same for a merge, whose base must need them. @raises ValueError."""
    if config is not None and not config.load_in_4bit:
        raise ValueError("[merge] quantization_config must have load_in_4bit=True. Leave it out for base='original'.")
    if config is not None and base != "dequantized":
        raise ValueError("[merge] quantization_config needs base='dequantized': original weights are not quantized.")
    return of(config)
