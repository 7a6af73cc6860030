# SPDX-License-Identifier: Apache-2.0
"""AutoModelForCausalLM: transformers' own model over Linear4bit layers, filled by the C++ loader."""

import os
import pathlib
from typing import Any

import torch
import transformers

from .. import _C, hf_models
from ..hf_layer import count_by_elements
from ..hub import folder_of
from ..quantization import BitsAndBytesConfig, as_dtype
from .forward import attach
from .linear4bit import Linear4bit


def build(folder: pathlib.Path, config: Any, core: Any, quantized: Any) -> Any:
    """transformers' model of the config around the C++ model's tensors, with the engine attached.

    Nothing is copied: parameters are the C++ model's tensors. In evaluation mode, the base frozen where it is in four bits.
    """
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # transformers' table of classes
    with torch.device("meta"):
        model = kind(config)
    frozen = False
    for path, weight in core.named_weights():
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if isinstance(weight, _C.QuantizedTensor):
            setattr(parent, name, Linear4bit.of(weight))
            frozen = True
        else:
            module = getattr(parent, name)
            module._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=True)
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # computed from the config, stored nowhere
            parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            setattr(parent, name, type(module)(config=config).to(core.device))
    if config.tie_word_embeddings:
        model.tie_weights()
    if frozen:
        model.requires_grad_(False)
        model.is_loaded_in_4bit = model.is_quantized = True
        model.quantization_method = hf_models.METHOD
        fields: Any = hf_models._register()(**quantized.to_dict())
        model.hf_quantizer = hf_models._ours[1](fields, pre_quantized=True)
        model.config.quantization_config = fields
        count_by_elements(model)
    model.name_or_path = config._name_or_path = os.fspath(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    attach(model, core)
    return model


class AutoModelForCausalLM:
    """from_pretrained() under transformers' name; the model is transformers' own class."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        quantization_config: Any = None,
        dtype: Any = None,
        device_map: Any = None,
        **hub: Any,
    ) -> Any:
        folder = folder_of(os.fspath(pretrained_model_name_or_path), **hub)
        config = transformers.AutoConfig.from_pretrained(folder)
        options = quantization_config or BitsAndBytesConfig()
        if hasattr(options, "to_dict") and not isinstance(options, BitsAndBytesConfig):
            options = BitsAndBytesConfig.from_dict(options.to_dict())
        wanted = dtype if dtype not in (None, "auto") else options.bnb_4bit_compute_dtype
        wanted = as_dtype(wanted if wanted is not None else (config.dtype or torch.float32), "dtype")
        core = _C.load_model(
            str(folder),
            compute_dtype=wanted,
            load_in_4bit=options.load_in_4bit,
            quant_type=options.bnb_4bit_quant_type,
            double_quant=options.bnb_4bit_use_double_quant,
            skip_modules=options.llm_int8_skip_modules or [],
            device=torch.device(device_map or "cpu"),
        )
        config.dtype = wanted
        return build(folder, config, core, options if options.load_in_4bit else None)
