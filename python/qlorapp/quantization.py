# SPDX-License-Identifier: Apache-2.0
"""BitsAndBytesConfig: transformers' names and defaults for what Quantizer does, from a field table of the C++ side."""

import logging
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from .field_table import Table, dataclass_of_table

_log = logging.getLogger("qlorapp")

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(value: Any, option: str) -> torch.dtype:
    """A floating dtype from itself or its name, with or without "torch."."""
    dtype = COMPUTE_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in COMPUTE_DTYPES.values():
        raise ValueError(f"[{option}] must be one of {', '.join(COMPUTE_DTYPES)}; got {value!r}.")
    return dtype


class QuantizationTable(Table):
    """What BitsAndBytesConfig has beside its fields."""

    def _settle(self) -> None:
        fields: Any = self  # which there are is the table's to say
        if fields.bnb_4bit_compute_dtype is not None:
            fields.bnb_4bit_compute_dtype = as_dtype(fields.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        if isinstance(fields.bnb_4bit_quant_storage, str):
            fields.bnb_4bit_quant_storage = getattr(torch, fields.bnb_4bit_quant_storage, fields.bnb_4bit_quant_storage)
        if hasattr(fields.quant_method, "value"):
            fields.quant_method = fields.quant_method.value
        if fields.load_in_4bit and fields.bnb_4bit_quant_type == "fp4":
            _C.log_warning_once("[BitsAndBytesConfig] bnb_4bit_quant_type is 'fp4' unless it is set; QLoRA trains on 'nf4'.")

    def quantization_method(self: Any) -> str | None:
        """nf4 or fp4, or None where nothing is to be quantized."""
        return str(self.bnb_4bit_quant_type) if self.load_in_4bit else None

    def is_quantizable(self: Any) -> bool:
        return bool(self.load_in_4bit)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From what to_dict() gives, or a config.json's quantization_config."""
        options = {key: value for key, value in {**config_dict, **kwargs}.items() if not key.startswith("_")}
        made = cls(**options)
        return (made, {}) if return_unused_kwargs else made


if TYPE_CHECKING:
    from ._config_types import BitsAndBytesConfig as BitsAndBytesConfig
else:
    BitsAndBytesConfig = dataclass_of_table(
        "BitsAndBytesConfig",
        """How the linear layers are stored.

        The defaults are transformers' own, fp4 without double quantization among them; QLoRA trains on
        `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`.
        """,
        _C.bits_and_bytes_config_fields(),
        _C.bits_and_bytes_config_aliases(),
        _C.check_bits_and_bytes_config,
        bases=(QuantizationTable,),
    )
