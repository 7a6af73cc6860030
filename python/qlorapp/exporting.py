# SPDX-License-Identifier: Apache-2.0
"""export(): writes a model, or a model with its adapter, for other programs."""

import os
from collections.abc import Callable
from typing import Any, cast

from . import _C, quantizer_options
from .hub import folder_of


def export(
    model: str | os.PathLike[str],
    *,
    gguf: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    type: str = "Q4_K_M",
    base: str | None = None,
    quantization_config: Any = None,
    chat_template: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes one GGUF file, with tokenizer and chat template, for llama.cpp, Ollama and LM Studio. Holds one weight in memory at a time.

    model, adapter: folders or hub names. gguf: the file. type: F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0.
    base, quantization_config: of the merge, as merge() has them.
    chat_template: Jinja; default: the adapter's, or the model's.

    @raises FormatError for what llama.cpp does not compute, by family, key and value; as merge(). Then no file is left.
    """
    _C.export_gguf(
        os.fspath(folder_of(model)),
        os.fspath(gguf),
        adapter="" if adapter is None else os.fspath(folder_of(adapter, wanted="adapter")),
        type=type,
        base=base,
        chat_template=chat_template,
        **quantizer_options.of_merge(quantization_config, base),
        progress=cast(Any, progress),  # the binding's signature says SupportsInt, a caller's int
    )
