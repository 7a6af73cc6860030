# SPDX-License-Identifier: Apache-2.0
"""AutoModelForCausalLM: from a checkpoint's folder or name to a model, this library's own or transformers' over its layers."""

import json
import logging
import os
import pathlib
from typing import Any, cast

import torch

from . import _C, generation
from .hf_models import is_foreign
from .hf_models import load as load_foreign
from .hub import adapter_folder, folder_of
from .load_options import IGNORES, config_values, foreign_config, refuse_unsupported, take_config
from .model_config import ModelConfig
from .modeling import CausalLM, refuse_unknown
from .peft_config import PeftConfig
from .quantization import BitsAndBytesConfig, as_dtype

_log = logging.getLogger("qlorapp")


def _config_of(folder: pathlib.Path) -> ModelConfig:
    with open(folder / "config.json", encoding="utf-8") as file:
        values = json.load(file)
    values.setdefault("use_cache", True)
    return ModelConfig(**values)


def _device_of(device_map: Any, quantized: bool) -> torch.device:
    """ "auto" is the GPU where there is one that this build has kernels for; a map must name one device.

    Without a map a four-bit model goes where "auto" does, as transformers puts it, and any other to the CPU.
    """
    if isinstance(device_map, dict):
        places = set(map(str, device_map.values()))
        if len(places) != 1:
            raise ValueError(f"[from_pretrained] device_map must put the model on one device; got {sorted(places)}.")
        device_map = next(iter(device_map.values()))
    if device_map is None:
        device_map = "auto" if quantized else "cpu"
    usable = torch._C._dispatch_has_kernel_for_dispatch_key("qlorapp::dequantize_4bit", "CUDA") and torch.cuda.is_available()
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda", 0) if usable else torch.device("cpu")
    device = torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
    if device.type == "cuda" and not usable:
        why = "this build has no kernels for it" if torch.cuda.is_available() else "there is no GPU here"
        _log.warning("[from_pretrained] device_map asks for %s, but %s: the model is on the CPU.", device, why)
        return torch.device("cpu")
    if device.index is not None and 0 < torch.cuda.device_count() <= device.index:
        raise ValueError(
            f"[from_pretrained] device_map asks for {device}; this machine has {torch.cuda.device_count()} GPU(s)."
        )
    return device


def _is_adapter(folder: pathlib.Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _model_or_adapter(name: str, **hub: Any) -> pathlib.Path:
    try:
        return folder_of(name, **hub)
    except FileNotFoundError:
        try:
            return adapter_folder(name, **hub)
        except FileNotFoundError:
            pass
        raise  # a model is what was asked for


class AutoModelForCausalLM:
    """Loads Hugging Face folders of the families that this library knows."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        quantization_config: Any = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        load_in_4bit: bool = False,
        use_cache: bool | None = None,
        revision: str | None = None,
        token: Any = None,
        local_files_only: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        subfolder: str | None = None,
        config: Any = None,
        **ignored: Any,
    ) -> CausalLM:
        """A model in evaluation mode, its linear layers in four bits if quantization_config or the folder says so.

        dtype (older: torch_dtype) is that of activations, norms, embeddings and head; without it bnb_4bit_compute_dtype
        decides, and without that the checkpoint's own ("auto"). quantization_config: a BitsAndBytesConfig, transformers' own too, or a dict.
        subfolder: where in the folder or repository the model is. config: transformers', model.config or a dict, of the same model; its
        use_cache and quantization_config count. The folder or name of an adapter gives its base with the adapter, frozen.
        """
        if ignored.get("load_in_8bit"):
            raise ValueError(
                "[from_pretrained] load_in_8bit is not supported: layers are stored in four bits. Use load_in_4bit=True."
            )
        if ignored.pop("trust_remote_code", False):
            _log.warning("[from_pretrained] trust_remote_code has no effect: code of a checkpoint is never run.")
        refuse_unsupported(ignored)
        refuse_unknown("from_pretrained", ignored, IGNORES, cls.from_pretrained)
        name = os.fspath(pretrained_model_name_or_path)
        hub: dict[str, Any] = {"token": token, "local_files_only": local_files_only, "cache_dir": cache_dir}
        folder = _model_or_adapter(name, revision=revision, subfolder=subfolder or None, **hub)
        if subfolder:
            if not folder.is_dir():
                raise FileNotFoundError(
                    2, f"[from_pretrained] subfolder must be a folder in {name}; there is no {subfolder!r}", os.fspath(folder)
                )
            name = os.fspath(folder)  # where its tokenizer is, and what an adapter names as its base
        if _is_adapter(folder):
            known = {"quantization_config": quantization_config, "dtype": dtype, "torch_dtype": torch_dtype, "device_map": device_map,
                     "load_in_4bit": load_in_4bit, "use_cache": use_cache, "config": config}  # fmt: skip
            return cls._with_adapter(folder, {**hub, **known, **ignored})
        given, config = config, _config_of(folder)
        if given is not None:
            if quantization_config is None and not hasattr(config, "quantization_config"):
                quantization_config = config_values(given).get("quantization_config")
            take_config(given, config, folder)
        if not isinstance(quantization_config, (dict, BitsAndBytesConfig)) and hasattr(quantization_config, "load_in_4bit"):
            quantization_config = quantization_config.to_dict()  # transformers' own class
        if isinstance(quantization_config, dict):
            quantization_config = BitsAndBytesConfig.from_dict(quantization_config)
        if quantization_config is None and load_in_4bit:
            quantization_config = BitsAndBytesConfig(load_in_4bit=True)
        if quantization_config is not None and not isinstance(quantization_config, BitsAndBytesConfig):
            raise TypeError(
                f"[from_pretrained] quantization_config must be a qlorapp.BitsAndBytesConfig; got {type(quantization_config)}."
            )
        options = quantization_config or BitsAndBytesConfig()
        wanted = dtype if dtype is not None else torch_dtype
        if wanted is None:
            wanted = options.bnb_4bit_compute_dtype
        if wanted is None or wanted == "auto":
            wanted = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
        device = _device_of(device_map, options.load_in_4bit or hasattr(config, "quantization_config"))
        if is_foreign(config):
            theirs: dict[str, Any] = {
                name: ignored[name] for name in ("attn_implementation", "output_attentions") if name in ignored
            }
            if use_cache is not None:
                theirs["use_cache"] = use_cache
            if given is not None:
                theirs["config"] = foreign_config(given)
            foreign = load_foreign(
                folder, config, quantization_config, _C.dtype_on(str(device), as_dtype(wanted, "dtype")), device, **theirs
            )
            return cast(CausalLM, foreign)  # transformers' own, with the same surface
        if (attention := ignored.get("attn_implementation")) not in (None, "sdpa", "eager"):
            _C.log_warning_once(
                f"[from_pretrained] attn_implementation={attention!r} has no effect: the fastest attention of the device is always used."
            )
        core = _C.load_model(
            str(folder),
            compute_dtype=as_dtype(wanted, "dtype"),
            load_in_4bit=options.load_in_4bit,
            quant_type=options.bnb_4bit_quant_type,
            double_quant=options.bnb_4bit_use_double_quant,
            skip_modules=options.llm_int8_skip_modules or [],
            device=device,
        )
        if use_cache is not None:
            config.use_cache = use_cache
        quantized = options if options.load_in_4bit and not hasattr(config, "quantization_config") else None
        model = CausalLM(core, config, name, folder, quantized)
        model.generation_config = generation.config_of_folder(folder)
        if quantized is not None:
            config.quantization_config = quantized
        return model

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> CausalLM:
        """@raises NotImplementedError always: there is nothing to add adapters to in random weights."""
        raise NotImplementedError(
            "[from_config] a model is read from a checkpoint, as adapters are trained over weights that have learnt something. Use from_pretrained; "
            "for random weights, save them by transformers first: transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)."
        )

    @classmethod
    def _with_adapter(cls, folder: pathlib.Path, options: dict[str, Any]) -> CausalLM:
        """The base that adapter_config.json names, with the folder's adapter: for use, as transformers has it."""
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path
        if not base:
            raise ValueError(
                f"[from_pretrained] base_model_name_or_path in {folder / 'adapter_config.json'} must name the base; got nothing. Load the "
                "base, then PeftModel.from_pretrained(base, adapter)."
            )
        model = cls.from_pretrained(base, **options)
        if isinstance(model, CausalLM):
            model.load_adapter(folder)
            model.set_adapter("default", trainable=False)
        else:
            model.load_adapter(os.fspath(folder))  # transformers' own
        return model.eval()
