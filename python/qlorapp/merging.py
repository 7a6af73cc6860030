# SPDX-License-Identifier: Apache-2.0
"""merge(): writes a base and its adapter as one plain checkpoint."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch

from . import _C, quantizer_options
from .hub import folder_of
from .precision import as_dtype


def merge(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    base: str | None = None,
    dtype: torch.dtype | str | None = None,
    quantization_config: Any = None,
    max_shard_size: int | str = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a folder of any family without adapter and quantization. Holds one weight in memory at a time.

    model, adapter: folders or hub names. output: a new or empty folder.
    base: "original" merges into the checkpoint's own weights. "dequantized" merges into the weights that training used: quantized by
    quantization_config (default: NF4 with double quantization) and dequantized. None: "original" for float weights; four-bit weights are
    dequantized.
    dtype: of the result; defaults to the checkpoint's. The sum is formed in float32 and rounded once.

    @raises ValueError if output is not empty or base is not available; FormatError that names file and tensor. Then it leaves no files.
    """
    _C.merge(
        os.fspath(folder_of(model)),
        os.fspath(folder_of(adapter, wanted="adapter")),
        os.fspath(output),
        base=base,
        dtype=None if dtype is None else as_dtype(dtype, "dtype"),
        max_shard_size=_C.parse_bytes("max_shard_size", max_shard_size) if isinstance(max_shard_size, str) else max_shard_size,
        **quantizer_options.of_merge(quantization_config, base),
        progress=cast(Any, progress),  # the binding's signature says SupportsInt, a caller's int
    )
