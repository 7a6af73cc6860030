# SPDX-License-Identifier: Apache-2.0
"""AutoModelForCausalLM: transformers' own model over Linear4bit layers, filled by the C++ loader."""

import concurrent.futures
import logging
import os
import pathlib
import weakref
from typing import Any

import peft
import torch
import transformers
from transformers import BitsAndBytesConfig
from transformers.initialization import no_init_weights

from .. import _C, quantizer_options
from ..hub import folder_of, gguf_in
from ..nn import Linear4bit
from ..precision import as_dtype
from . import foreign, lora4bit  # noqa: F401  (PEFT's layers over Linear4bit)
from .adapter_files import saves_together
from .forward import attach
from .parameter_counts import count_by_elements
from .placement import device_of, group_to_shard_over, layers_on_host
from .quantizer import METHOD, quantizer_of
from .wrapped import load_other_parts, other_parts

_log = logging.getLogger("qlorapp")
_CONFIG: Any = BitsAndBytesConfig  # its methods have no types

#: transformers' options without effect on a model that C++ loads onto one device.
_NO_EFFECT = {
    "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers", "use_safetensors", "weights_only",
    "disable_mmap", "trust_remote_code", "return_dict",
}  # fmt: skip
#: transformers' options without effect if False.
_OFF = {"force_download", "ignore_mismatched_sizes", "output_loading_info"}


def _skeleton(config: Any) -> Any:
    """transformers' model of the config, on meta."""
    tables: Any = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    kinds = [auto._model_mapping[type(config)] for auto in tables if type(config) in auto._model_mapping]
    with torch.device("meta"), no_init_weights():
        return kinds[0](config)


def build(folder: pathlib.Path, model: Any, core: Any, quantized: BitsAndBytesConfig | None) -> Any:
    """Puts the C++ model's tensors into the skeleton, without a copy, and attaches the engine. Returns it in evaluation mode.

    A four-bit base is frozen. What a wrapper has beside its text is transformers', in the precision of the norms.
    """
    four_bit = False
    others = other_parts(model, core.body)
    name = type(model).__name__
    if others:
        load_other_parts(folder, model, core.body, core.dtype, core.device)
        parts = ", ".join(others)
        _log.info("[from_pretrained] %s: C++ computes its text, and transformers calls with images (%s).", name, parts)
    else:
        _log.info("[from_pretrained] %s: C++ computes it.", name)
    for path, weight in core.named_weights():
        owner, _, kind = path.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(weight, _C.QuantizedTensor):
            parent, _, name = owner.rpartition(".")
            setattr(model.get_submodule(parent), name, Linear4bit.of(weight, core.device, module.bias))
            four_bit = True
        else:
            module._parameters[kind] = torch.nn.Parameter(weight, requires_grad=True)
    for module in model.modules():
        computed = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in computed:  # from the config, stored nowhere
            module._buffers[name] = torch.empty_like(module._buffers[name], device=core.device)
        for parameter in module.parameters(recurse=False) if computed else ():
            parameter._is_hf_initialized = True  # transformers' function then leaves it
        if computed:
            model._init_weights(module)
    if core.tied:
        model.tie_weights()
    else:
        model.all_tied_weights_keys.pop("lm_head.weight", None)  # as transformers, for files with two tables
    if four_bit:
        model.requires_grad_(False)
        model.is_loaded_in_4bit = model.is_quantized = True
        fields = (quantized or _CONFIG(load_in_4bit=True)).to_dict()
        if others and not fields.get("llm_int8_skip_modules"):  # for readers of what save_pretrained writes
            fields["llm_int8_skip_modules"] = [*others, "lm_head"]
        model.config.quantization_config, model.hf_quantizer = quantizer_of(fields)
        model.quantization_method = METHOD
        count_by_elements(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    if attach(model, core).is_spread:
        model.hf_device_map = {"": core.device}  # trainers then leave the weights where they are
    return model


class AutoModelForCausalLM:
    """Loads Hugging Face folders and repositories. The model is of transformers' own class."""

    #: transformers' Auto class, if it differs from the checkpoint's own.
    _auto = ""
    #: Of float weights whose dtype is not given; None: the checkpoint's.
    _dtype: Any = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        quantization_config: Any = None,
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: Any = None,
        load_in_4bit: bool = False,
        config: Any = None,
        revision: str | None = None,
        token: Any = None,
        local_files_only: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        subfolder: str | None = None,
        attn_implementation: str | None = None,
        base_sharding: str = "no",
        gguf_file: str | None = None,
        **options: Any,
    ) -> Any:
        """Loads transformers' model in evaluation mode, with four-bit linear layers if quantization_config or the folder requests them.

        Families that C++ knows have an engine (docs/architecture.md). Others run in transformers' code over the same layers.
        dtype (older: torch_dtype): of activations, norms, embeddings and head. Defaults to bnb_4bit_compute_dtype, then the checkpoint's.
        device_map: one device. "auto" is the GPU if this build has kernels for it. {"": 0, "model.layers": "cpu"} leaves the frozen layers in
            host memory, from which the GPU copies each block while it computes the one before (base_on_host in docs/memory.md).
        base_sharding: "full" or "node" divides the frozen base over the processes of torchrun, all or those of each machine. The model is for
            training: each process holds a shard of every layer, and all make the same calls (docs/multi-gpu.md).
        gguf_file: a GGUF file of the folder or repository. Its blocks stay the frozen layers; with quantization_config they are quantized anew. The name of
            such a file in place of the folder's does the same.
        options: the config's attributes, as in transformers.
        For an adapter's folder it loads the base and then the adapter, by PEFT.

        @raises ValueError, FormatError, FileNotFoundError that name the folder or option.
        """
        hub: dict[str, Any] = {"token": token, "local_files_only": local_files_only, "cache_dir": cache_dir}
        if gguf_file is not None:
            pretrained_model_name_or_path = gguf_in(pretrained_model_name_or_path, gguf_file, revision=revision, **hub)
        folder = _model_or_adapter(
            os.fspath(pretrained_model_name_or_path), revision=revision, subfolder=subfolder or None, **hub
        )
        if _is_adapter(folder):
            known = {"quantization_config": quantization_config, "dtype": dtype, "torch_dtype": torch_dtype, "device_map": device_map,
                     "load_in_4bit": load_in_4bit, "config": config, "attn_implementation": attn_implementation, "base_sharding": base_sharding}  # fmt: skip
            return cls._with_adapter(folder, {**hub, **known, **options})
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"[from_pretrained] the model's folder must hold a config.json; {folder} has none.")
        for name in _NO_EFFECT & set(options):
            del options[name]
        if config is None:
            config, options = foreign.config_of(folder, attn_implementation=attn_implementation, **options)
        elif not isinstance(config, transformers.PreTrainedConfig):
            raise TypeError(f"[from_pretrained] config must be a config of transformers; got {type(config).__name__}.")
        options = {name: value for name, value in options.items() if value is not None and (value or name not in _OFF)}
        quantized = _quantization(quantization_config, load_in_4bit)
        keep_blocks = not quantized.load_in_4bit  # of a GGUF file
        of_gguf = keep_blocks and _C.gguf_of(str(folder)) != ""
        stored = getattr(config, "quantization_config", None)
        device_map, base_on_host = layers_on_host(device_map, config)
        device = device_of(device_map, quantized.load_in_4bit or stored is not None)
        wanted = next((d for d in (dtype, torch_dtype) if d not in (None, "auto")), None)
        if wanted is None and quantized.bnb_4bit_compute_dtype != torch.float32:  # transformers' default for "not given"
            wanted = quantized.bnb_4bit_compute_dtype
        if wanted is None and "auto" not in (dtype, torch_dtype) and not quantized.load_in_4bit and stored is None:
            wanted = cls._dtype
        wanted = as_dtype(wanted or config.dtype or torch.float32, "dtype")
        if options or cls._auto or foreign.is_foreign(config) or foreign.changed(config, folder):
            settled = quantized if quantized.load_in_4bit else None
            if file := _C.gguf_of(str(folder)):
                raise ValueError(
                    f"[from_pretrained] the GGUF file {file} is for AutoModelForCausalLM, with its own config and no further options; got "
                    f"{', '.join(options) or ('a changed config' if not cls._auto else cls.__name__)}. Load the checkpoint that the file was made of."
                )
            wanted = _C.dtype_on(str(device), wanted)
            if base_on_host or base_sharding != "no":
                raise ValueError(
                    "[from_pretrained] base_sharding, and device_map with layers on the CPU and the rest on a GPU, are for models that C++ "
                    "computes, without other options of transformers. Put this model on one device."
                )
            return foreign.load(folder, config, settled, wanted, device, cls._auto, config=config, **options)
        if base_on_host and not (quantized.load_in_4bit or of_gguf or stored is not None):
            raise ValueError(
                "[from_pretrained] device_map with layers on the CPU is for four-bit layers. Give quantization_config, or one device."
            )
        group = group_to_shard_over(base_sharding, device)
        config.dtype = config.get_text_config().dtype = wanted
        config._name_or_path = os.fspath(pretrained_model_name_or_path)
        with concurrent.futures.ThreadPoolExecutor(1) as beside:  # C++ stays on the main thread, for Ctrl-C
            skeleton = beside.submit(_skeleton, config)
            core = _C.load_model(
                str(folder),
                compute_dtype=wanted,
                load_in_4bit=quantized.load_in_4bit,
                keep_blocks=keep_blocks,
                device=device,
                base_on_host=base_on_host,
                shard_over=group,
                of_node=base_sharding == "node",
                **quantizer_options.of(quantized),
            )
        if isinstance(stored, dict) or not quantized.load_in_4bit:
            quantized = _CONFIG.from_dict(stored) if stored else _CONFIG(load_in_4bit=True)  # of blocks
        model = build(folder, skeleton.result(), core, quantized)
        if of_gguf and any(isinstance(layer, Linear4bit) for layer in model.modules()):
            model.save_pretrained = _saves_adapters_alone(
                model,
                "blocks of a GGUF file have no form in a checkpoint. Merge the adapter, or load the file with quantization_config",
            )
        if core.is_sharded:
            model.save_pretrained = _saves_adapters_alone(
                model, "a sharded base (base_sharding) cannot be written as one model"
            )
            weakref.finalize(model, core.leave_ranks)  # at the end of the program at the latest
        return model

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """transformers' function: a model with new weights, which transformers computes. Code of a repository never runs."""
        kind: Any = getattr(transformers, cls._auto or "AutoModelForCausalLM")
        return kind.from_config(config, **{**options, "trust_remote_code": False})

    @classmethod
    def _with_adapter(cls, folder: pathlib.Path, options: dict[str, Any]) -> Any:
        base = peft.PeftConfig.from_pretrained(os.fspath(folder)).base_model_name_or_path
        if not base:
            raise ValueError(
                f"[from_pretrained] base_model_name_or_path in {folder / 'adapter_config.json'} must name the base; it is empty. Load the "
                "base, then PeftModel.from_pretrained(base, adapter)."
            )
        model = cls.from_pretrained(base, **options)
        model.load_adapter(os.fspath(folder))
        return model.eval()


class AutoModelForSequenceClassification(AutoModelForCausalLM):
    """A reward model or classifier over four-bit layers, in transformers' code. Its new head is in float."""

    _auto = "AutoModelForSequenceClassification"


class AutoModelForImageTextToText(AutoModelForCausalLM):
    """A model that also reads images. C++ computes its text if it knows the family, on calls without images; transformers the rest."""


class AutoPeftModelForCausalLM(peft.AutoPeftModelForCausalLM):
    """PEFT's class. Loads the base by this library's AutoModelForCausalLM."""

    _target_class: Any = AutoModelForCausalLM

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """PEFT's. save_pretrained of the model replaces the files of an older adapter together."""
        return saves_together(super().from_pretrained(*args, **options))


def _saves_adapters_alone(model: Any, why: str) -> Any:
    """Returns save_pretrained() for a base that stays where it is. It writes adapters of transformers' own, and raises if the model has none."""
    here = weakref.ref(model)

    def save_pretrained(*args: Any, **options: Any) -> Any:
        model: Any = here()
        if not getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(f"[save_pretrained] {why}. Save the adapter: get_peft_model(model, …).save_pretrained(folder).")
        return type(model).save_pretrained(model, *args, **options)

    return save_pretrained


def _is_adapter(folder: pathlib.Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _model_or_adapter(name: str, **hub: Any) -> pathlib.Path:
    try:
        return folder_of(name, **hub)
    except FileNotFoundError:
        try:
            return folder_of(name, wanted="adapter", **hub)
        except FileNotFoundError:
            pass
        raise  # the error about the model


def _quantization(given: Any, load_in_4bit: bool) -> BitsAndBytesConfig:
    """transformers' config from a config, a dict, or load_in_4bit."""
    if given is None:
        given = _CONFIG(load_in_4bit=load_in_4bit)
    elif isinstance(given, dict):
        given = _CONFIG.from_dict(given)
    if not isinstance(given, BitsAndBytesConfig):
        raise TypeError(
            f"[from_pretrained] quantization_config must be a BitsAndBytesConfig or a dict; got {type(given).__name__}."
        )
    if given.load_in_8bit:
        raise ValueError(
            "[from_pretrained] load_in_8bit is not supported: layers are stored in four bits. Use load_in_4bit=True."
        )
    if given.load_in_4bit and given.bnb_4bit_quant_type == "fp4":
        _C.log_warning_once("[BitsAndBytesConfig] bnb_4bit_quant_type is 'fp4' unless it is set; QLoRA trains on 'nf4'.")
    return given
