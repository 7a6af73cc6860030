# SPDX-License-Identifier: Apache-2.0
"""merge(): a base and its adapter as one plain checkpoint."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch

from . import _C, quantizer_options
from .hub import adapter_folder, folder_of
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
    """Writes a folder without adapter and quantization that transformers loads; one weight is in memory at a time.

    model and adapter are folders or hub names, output a new or empty folder. base="original" merges into the checkpoint's own weights,
    base="dequantized" into what training saw: those weights quantized by quantization_config (NF4 with double quantization unless given)
    and dequantized. Left out, it is "original" where the checkpoint has its weights, and what is stored in four bits is dequantized.
    The sum is formed in float32 and rounded once to dtype, that of the checkpoint unless given.

    @raises ValueError if output is not empty or base is not there; FormatError naming file and tensor. Nothing is left behind then.
    """
    if quantization_config is not None and not quantization_config.load_in_4bit:
        raise ValueError("[merge] quantization_config must have load_in_4bit=True. Leave it out for base='original'.")
    if quantization_config is not None and base != "dequantized":
        raise ValueError("[merge] quantization_config needs base='dequantized': original weights are not quantized.")
    _C.merge(
        os.fspath(folder_of(os.fspath(model))),
        os.fspath(adapter_folder(adapter)),
        os.fspath(output),
        base=base,
        dtype=None if dtype is None else as_dtype(dtype, "dtype"),
        max_shard_size=_C.parse_bytes("max_shard_size", max_shard_size) if isinstance(max_shard_size, str) else max_shard_size,
        **quantizer_options.of(quantization_config),
        progress=cast(Any, progress),  # the binding's signature says SupportsInt, a caller's int
    )
