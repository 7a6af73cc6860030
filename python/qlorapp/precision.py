# SPDX-License-Identifier: Apache-2.0
"""Compute dtypes, and the 16-bit dtype of a machine."""

from typing import Any

import torch

from . import _C

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(value: Any, option: str) -> torch.dtype:
    """A floating dtype from a dtype or its name, with or without "torch."."""
    dtype = COMPUTE_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in COMPUTE_DTYPES.values():
        raise ValueError(f"[{option}] must be one of {', '.join(COMPUTE_DTYPES)}; got {value!r}.")
    return dtype


def own_dtypes(device: torch.device) -> Any:
    """Turns autocast off: the model computes in the dtypes that it was loaded in, also under torch.autocast."""
    return torch.autocast(device.type, enabled=False)


def get_mixed_precision_dtype() -> str:
    """ "bf16" on GPUs from compute capability 8.0, "fp16" on older ones, "no" without a GPU. Prints the GPU's name.

    torch.cuda.is_bf16_supported() is also true on a T4, which emulates bf16 slowly.
    """
    if not torch.cuda.is_available():
        return "no"
    kind, line = _C.mixed_precision(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    print(line)
    return str(kind)
