# SPDX-License-Identifier: Apache-2.0
"""Which 16-bit format a machine trains in."""

from typing import Any

import torch

from . import _C


def own_dtypes(device: torch.device) -> Any:
    """A block in which autocast is off: what is computed here has the dtypes that it was loaded in, under torch.autocast as well."""
    return torch.autocast(device.type, enabled=False)


def get_mixed_precision_dtype() -> str:
    """ "bf16" on GPUs of compute capability 8.0 and up, "fp16" on older ones, "no" without a GPU; says which GPU it is.

    torch.cuda.is_bf16_supported() is true on a T4 as well, which emulates bf16, slowly.
    """
    if not torch.cuda.is_available():
        return "no"
    kind, line = _C.mixed_precision(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    print(line)
    return str(kind)
