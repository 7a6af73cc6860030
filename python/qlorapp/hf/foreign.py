# SPDX-License-Identifier: Apache-2.0
"""Loads models of families that C++ does not know: by transformers, with four-bit linear layers over this library's operators."""

import json
import logging
import pathlib
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from .. import _C
from ..precision import as_dtype
from .parameter_counts import count_parameters, elements_in_four_bits
from .quantizer import as_ours, register, says_what_is_damaged

_log = logging.getLogger("qlorapp")


def is_foreign(config: Any) -> bool:
    """Whether transformers computes this causal language model. Models that also read images count.

    @raises ValueError for an architecture that is neither native nor causal in transformers.
    """
    names, native = getattr(config, "architectures", None) or [], [*_C.native_architectures(), *_C.wrapped_architectures()]
    if not names or any(name in native or f"{name.removesuffix('Model')}ForCausalLM" in native for name in names):
        return beyond_native(config) != ""
    if getattr(config, "is_encoder_decoder", False) or not (names[0].endswith("ForCausalLM") or _auto_class(names[0])):
        raise ValueError(
            f"[from_pretrained] architectures must name a causal model: {', '.join(_C.native_architectures())} (computed in C++) or another causal "
            f"model of transformers (computed by transformers over four-bit layers); got {names[0]}. Load it with transformers."
        )
    return True


def _auto_class(architecture: str) -> str:
    """transformers' Auto class for causal models of this architecture; empty if there is none."""
    for auto, names in (
        ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageTextToText", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for name in names.values():
            if architecture in ((name,) if isinstance(name, str) else name):
                return auto
    return ""


def beyond_native(config: Any) -> str:
    """The part of a native architecture that only transformers computes; empty if there is none."""
    line = _C.why_unsupported(json.dumps(config.to_dict(), default=str))
    return line.removeprefix("[config.json] ").partition(". Python's")[0]


def config_of(folder: pathlib.Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """transformers' config of a folder, and the options that it does not know. Its dtype may be "auto", or begin with "torch."."""
    raw, _ = transformers.PreTrainedConfig.get_config_dict(folder)
    stored = raw.get("dtype") or raw.get("torch_dtype")
    odd = isinstance(stored, str) and (stored == "auto" or stored.startswith("torch."))
    if odd:  # transformers reads config.json's dtype only as torch's attribute
        options["dtype"] = torch.float32
    config, rest = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, return_unused_kwargs=True, **options
    )
    if odd:
        config.dtype = None if stored == "auto" else as_dtype(stored, "dtype")
    return config, rest


def changed(config: Any, folder: pathlib.Path) -> str:
    """The keys in which the config differs from the folder's config.json, which C++ reads; empty if there are none."""
    stored, _ = config_of(folder)
    text, read = config.get_text_config(), stored.get_text_config()
    names = [name for name in _C.config_keys() if getattr(text, name, None) != getattr(read, name, None)]
    return ", ".join(f"{name}={getattr(text, name)!r}" for name in names)


def refuse_missing(folder: pathlib.Path, names: list[str]) -> None:
    """@raises FormatError if there are any: transformers would continue with random values."""
    if names:
        raise _C.FormatError(
            f"[from_pretrained] {folder} lacks {', '.join(names[:3])}{' …' if len(names) > 3 else ''}, which its config.json asks for. Check "
            "that config.json belongs to this model."
        )


def load(
    folder: pathlib.Path,
    config: Any,
    options: transformers.BitsAndBytesConfig | None,
    dtype: Any,
    device: torch.device,
    auto: str = "",
    /,
    **more: Any,
) -> Any:
    """Loads transformers' model of the folder and logs that. more: options of transformers' from_pretrained.

    auto: the Auto class, if it differs from the checkpoint's own. The head is then new.
    """
    quantize = options is not None and options.load_in_4bit
    stored: Any = getattr(config, "quantization_config", None)
    four_bit = isinstance(stored, dict) and bool(stored.get("load_in_4bit", stored.get("_load_in_4bit")))
    if stored is not None and not four_bit and quantize:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        raise ValueError(
            f"[from_pretrained] the folder is quantized already, by {method!r}. Leave out quantization_config, or start from float weights."
        )
    if four_bit:  # bitsandbytes' format: the codes are kept
        more["config"] = more.get("config") or config_of(folder)[0]
        more["config"].quantization_config = as_ours(stored)
    elif options is not None and quantize:  # an explicit None would be an error in transformers
        more["quantization_config"] = register()(**options.to_dict())
    beyond, asked = (
        beyond_native(config),
        changed(config, folder) or ", ".join(sorted(set(more) - {"config", "quantization_config"})),
    )
    why = f" ({beyond})" if beyond else f" with {asked}" if asked else ""
    _log.warning(
        "[from_pretrained] %s%s: transformers' own code, %s. C++ computes these, faster: %s.",
        config.architectures[0],
        why if config.architectures[0] in _C.native_architectures() else "",
        "with linear layers in four bits by this library" if four_bit or quantize else "as it is",
        ", ".join(_C.native_architectures()),
    )
    if device.type != "cpu":
        more["device_map"] = {"": device}
    with_report = more.pop("output_loading_info", False)
    of_text = {name: more.pop(name) for name in ("use_cache", "output_attentions") if name in more}
    more["trust_remote_code"] = False  # otherwise transformers asks on stdin
    kind: Any = getattr(transformers, auto or _auto_class(config.architectures[0]) or "AutoModelForCausalLM")
    read: Any = kind.from_pretrained  # its type covers one of the two results
    with says_what_is_damaged(folder):
        model, found = read(folder, dtype=dtype, output_loading_info=True, **more)
    missing = sorted(name for name in found["missing_keys"] if not auto or name.startswith(f"{model.base_model_prefix}."))
    refuse_missing(folder, missing)
    for name, value in of_text.items():  # a model that reads images has them in its text config
        setattr(model.config.get_text_config(), name, value)
    if four_bit or quantize:
        _say_share(model)
    return (model.eval(), found) if with_report else model.eval()


def _say_share(model: Any) -> None:
    """Logs the share of parameters in four bits; warns if it is less than half.

    @raises ValueError if it is zero: the model would need four times the requested memory.
    """
    packed, total = elements_in_four_bits(model), count_parameters(model)
    kinds: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in packed:
            kind = re.sub(r"\.\d+(?=\.)", ".*", name)
            kinds[kind] = kinds.get(kind, 0) + parameter.numel()
    largest = ", ".join(sorted(kinds, key=lambda kind: -kinds[kind])[:3])
    if not packed:
        raise ValueError(
            f"[from_pretrained] quantization_config must find linear layers to put in four bits; {type(model).__name__} has none outside of "
            f"llm_int8_skip_modules: its weights are {largest}. Leave out quantization_config, which loads the model in float, or those modules."
        )
    share = sum(packed.values()) / total
    if share >= 0.5:
        _log.info("[from_pretrained] %.1f %% of the %s parameters are in four bits.", 100 * share, f"{total:,}")
        return
    _log.warning(
        "[from_pretrained] only %.1f %% of the %s parameters are in four bits: layers that are not linear, or are in llm_int8_skip_modules, "
        "stay in %s. Largest: %s. Plan for that memory.",
        100 * share,
        f"{total:,}",
        str(model.dtype).removeprefix("torch."),
        largest,
    )
