# SPDX-License-Identifier: Apache-2.0
"""BitsAndBytesConfig: transformers' names and defaults for what Quantizer does."""

import dataclasses
import logging
from typing import Any

import torch

from . import _C

_log = logging.getLogger("qlorapp")

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(value: Any, option: str) -> torch.dtype:
    """A floating dtype from itself or its name, with or without "torch."."""
    dtype = COMPUTE_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype not in COMPUTE_DTYPES.values():
        raise ValueError(f"[{option}] must be one of {', '.join(COMPUTE_DTYPES)}; got {value!r}.")
    return dtype


@dataclasses.dataclass(kw_only=True)
class _Fields:
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: list[str] | None = None
    llm_int8_enable_fp32_cpu_offload: bool = False
    llm_int8_has_fp16_weight: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str | None = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: torch.dtype | str | None = None


class BitsAndBytesConfig(_Fields):
    """How the linear layers are stored.

    The defaults are transformers' own, fp4 without double quantization among them; QLoRA trains on
    `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`.
    The options of eight-bit layers have no effect in four bits; bnb_4bit_quant_storage only says how packed bytes are shown.
    """

    def __init__(self, **options: Any) -> None:
        known = [field.name for field in dataclasses.fields(_Fields)]
        for name in options:
            if name not in known:
                raise TypeError(f"[BitsAndBytesConfig] unknown option {name!r}.{_C.did_you_mean(name, known)}")
        super().__init__(**options)
        if self.load_in_8bit:
            raise ValueError("[BitsAndBytesConfig] load_in_8bit is not supported. Use load_in_4bit=True.")
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise ValueError(
                f"[BitsAndBytesConfig] bnb_4bit_quant_type must be 'nf4' or 'fp4'; got {self.bnb_4bit_quant_type!r}."
            )
        if self.bnb_4bit_compute_dtype is not None:
            self.bnb_4bit_compute_dtype = as_dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        if self.load_in_4bit and "bnb_4bit_quant_type" not in options:
            _log.warning("[BitsAndBytesConfig] bnb_4bit_quant_type is 'fp4' unless it is set; QLoRA trains on 'nf4'.")

    def to_dict(self) -> dict[str, Any]:
        """Dtypes by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Fields)}
        return {
            key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value for key, value in values.items()
        }
