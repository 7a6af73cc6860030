# SPDX-License-Identifier: Apache-2.0
"""export(): writes a model, a model with its adapter, or an adapter for other programs."""

import os
from collections.abc import Callable
from typing import Any, cast

from . import _C, quantizer_options
from .hub import folder_of


def export(
    model: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    gguf: str | os.PathLike[str] = "",
    gguf_adapter: str | os.PathLike[str] = "",
    ollama: str | os.PathLike[str] = "",
    ollama_base: str = "",
    merged: str | os.PathLike[str] = "",
    adapter_for: str = "",
    output: str | os.PathLike[str] = "",
    type: str = "",
    chat_template: str = "",
    base: str | None = None,
    quantization_config: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Writes one target, whole or not at all, and returns its path. Holds one weight in memory at a time.

    model, adapter: folders or hub names.
    gguf: a file for llama.cpp, Ollama and LM Studio, with tokenizer and chat template: the model, with the adapter merged.
    gguf_adapter: a file: the adapter alone, for llama.cpp's --lora over a GGUF file of its base.
    ollama: a new folder with a GGUF file and a Modelfile. ollama_base: the model there over which the adapter alone is to run.
    merged: a new folder, as merge() writes it.
    adapter_for: "peft", "transformers", "vllm", "sglang" or "llama.cpp"; output: a new folder with the adapter as it reads it; for llama.cpp
    a file.
    type: of a model's weights F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M (default) or Q4_0; of an adapter F32 (default), F16 or BF16.
    chat_template: a name or a .jinja file; default: the adapter's, or the model's.
    base, quantization_config: of the merge, as merge() has them.

    @raises ValueError for no target, or two; FormatError for what the target does not compute or hold, by key or tensor; as merge().
    """
    return _C.export_model(
        os.fspath(folder_of(model)),
        "" if adapter is None else os.fspath(folder_of(adapter, wanted="adapter")),
        gguf=os.fspath(gguf),
        gguf_adapter=os.fspath(gguf_adapter),
        ollama=os.fspath(ollama),
        ollama_base=ollama_base,
        merged=os.fspath(merged),
        adapter_for=adapter_for,
        output=os.fspath(output),
        type=type,
        chat_template=chat_template,
        base=base,
        **quantizer_options.of_merge(quantization_config, base),
        progress=cast(Any, progress),  # the binding's signature says SupportsInt, a caller's int
    )
