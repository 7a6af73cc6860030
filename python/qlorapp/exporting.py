# SPDX-License-Identifier: Apache-2.0
"""export(): writes a model, a model with its adapter, or an adapter for other programs. verify_export(): compares such forms."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

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
    importance: str | os.PathLike[str] = "",
    base: str | None = None,
    quantization_config: Any = None,
    verify: bool = True,
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
    importance: a file of rows, best those of the training: at most 512 of them run through the model, and rounding errors of the channels that
    they use most weigh most in Q6_K and below.
    base, quantization_config: of the merge, as merge() has them.
    verify: runs eight prompts through the model and what was written, by verify_export() on the CPU, logs a warning for each difference,
    and writes the receipt beside it: path.verify.json.

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
        importance=os.fspath(importance),
        base=base,
        **quantizer_options.of_merge(quantization_config, base),
        verify=verify,
        progress=cast(Any, progress),  # the binding's signature says SupportsInt, a caller's int
    )


def verify_export(
    reference: str | os.PathLike[str],
    *forms: str | os.PathLike[str],
    base: str | os.PathLike[str] = "",
    prompts: Sequence[str] = (),
    data: str | os.PathLike[str] = "",
    load_in_4bit: bool = True,
    device: Any = "cpu",
    max_new_tokens: int = 32,
) -> dict[str, Any]:
    """Runs the same prompts through the trained model and exported forms of it. Returns the receipt, whose "holds" is False if one differs.

    reference, forms: PEFT folders, models' folders, GGUF files of models or adapters. base: what adapters lie over.
    prompts: a user's messages; default: eight short ones. data: a file of rows, whose loss and perplexity are compared, too. load_in_4bit: the base of an adapter is in NF4, as in training.

    @raises ValueError, FormatError, FileNotFoundError that name the path.
    """
    paths = [os.fspath(path) for path in (reference, *forms)]
    text = _C.verify_export(
        paths,
        base=os.fspath(base),
        load_in_4bit=load_in_4bit,
        device=torch.device(device),
        prompts=list(prompts),
        data=os.fspath(data),
        max_new_tokens=max_new_tokens,
    )
    return cast(dict[str, Any], json.loads(text))
