# SPDX-License-Identifier: Apache-2.0
"""Models of other families: transformers' own code, with its linear layers in four bits over this library's operators.

A quantizer of the name "qlorapp" is registered at transformers' extension point when it is first needed; nothing of transformers is
patched. Weights are quantized one by one while they are read, or taken with their codes from a folder that bitsandbytes wrote. Adapters are PEFT's, which wraps these layers as any linear layer.
"""

import functools
import logging
import os
import pathlib
import re
import weakref
from typing import Any

import torch

from . import _C
from .hf.linear4bit import Linear4bit
from .hf_layer import (
    count_by_elements,
    count_parameters,
    elements_in_four_bits,
    is_plain_linear,
    weight_of_tensors,
)
from .modeling import TrainableParameters
from .module_tree import check_targets
from .peft_config import LoraConfig
from .quantization import BitsAndBytesConfig

_log = logging.getLogger("qlorapp")
METHOD = "qlorapp"
#: What was wrong with the weights that are being read: transformers only prints it, and raises a line of its own.
_damaged: list[_C.FormatError] = []
#: The classes that are registered, once they are.
_ours: list[type] = []


def _register() -> type:
    """The config class of the method; registers it and its quantizer at the first call.

    @raises ValueError where another package has taken the name.
    """
    from transformers.core_model_loading import ConversionOps
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
    from transformers.utils.quantization_config import QuantizationConfigMixin

    there = [mapping.get(METHOD) for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)]
    if _ours and there == _ours:
        return _ours[0]
    for known in there:
        if known is not None and known.__module__ != __name__:
            raise ValueError(
                f"[from_pretrained] {known.__module__}.{known.__qualname__} is registered with transformers under the name {METHOD!r}, which is this "
                "library's quantizer's. Leave out the import that registers it, or quantization_config, which loads the model in float."
            )
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        mapping.pop(METHOD, None)  # of this module before it was loaded again, whose layers are of other classes

    @register_quantization_config(METHOD)
    class QlorappConfig(QuantizationConfigMixin):
        """bitsandbytes' fields, under another method."""

        def __init__(self, **fields: Any) -> None:
            for name, value in fields.items():
                setattr(self, name, value)
            self.load_in_4bit = True
            self.quant_method: Any = METHOD  # whatever the fields say

        def to_dict(self) -> dict[str, Any]:
            """As a folder's config.json has it: the weights beside it are in bitsandbytes' format."""
            return {**super().to_dict(), "quant_method": "bitsandbytes"}

    class Quantize(ConversionOps):
        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
            result = {}
            for name, value in input_dict.items():
                value = value[0] if isinstance(value, list) else value
                module, _ = get_module_from_name(model, name)
                result[name] = module.quantize(self.hf_quantizer.core, value)
                module._is_hf_initialized = True
            return result

    class Read(ConversionOps):
        """The tensors of a folder's weight, or what else has this name: a norm's weight, a table."""

        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(
            self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **kwargs: Any
        ) -> dict[str, Any]:
            tensors = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
            module, leaf = get_module_from_name(model, full_layer_name)
            if not isinstance(module, Linear4bit):
                return {name: value.to(getattr(module, leaf).dtype) for name, value in tensors.items()}
            layer: Any = module  # torch's types know no attributes of this kind
            layer._is_hf_initialized = True
            if len(tensors) == 1:  # of a folder that says that it is quantized, in float after all
                return {"weight": module.quantize(self.hf_quantizer.core, tensors["weight"])}
            try:
                return {"weight": module.take(weight_of_tensors(tensors, full_layer_name))}
            except _C.FormatError as error:
                _damaged.append(error)
                raise

    @register_quantizer(METHOD)
    class QlorappQuantizer(HfQuantizer):
        quantized_element_size = 0.5
        serialized_names = {  # noqa: RUF012  (transformers' own form)
            "weight": [
                "weight",
                *(f"weight.{part}" for part in ("nested_absmax", "nested_quant_map", "quant_map", "absmax")),
                *(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")),
            ]
        }

        @property
        def core(self) -> _C.Quantizer:
            """Made when it is used: transformers copies what holds a quantizer, one for each weight."""
            options: Any = self.quantization_config
            return _C.Quantizer(quant_type=options.bnb_4bit_quant_type, double_quant=options.bnb_4bit_use_double_quant)

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            options: Any = self.quantization_config
            skipped = self.get_modules_to_not_convert(model, options.llm_int8_skip_modules, model._keep_in_fp32_modules)
            for name, module in list(model.named_modules()):
                if not (isinstance(module, Conv1D) or is_plain_linear(module)) or not should_convert_module(name, skipped):
                    continue
                parent, leaf = get_module_from_name(model, name)
                if isinstance(module, Conv1D):
                    layer = Linear4bit(module.nx, module.nf, True, of_conv1d=True)
                else:
                    layer = Linear4bit(module.in_features, module.out_features, module.bias is not None)
                setattr(parent, leaf, layer)

        def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **kwargs: Any) -> bool:
            module, name = get_module_from_name(model, param_name)
            return isinstance(module, Linear4bit) and name == "weight"

        def get_quantize_ops(self) -> Quantize:
            return Quantize(self)

        def get_load_operations(self) -> dict[str, type]:
            return {"deserialize": Read}

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            """A save would run what was read backwards; here state_dict() has the tensors by the names that they are stored under."""
            known = getattr(model, "_weight_conversions", None) or []
            kept = [entry for entry in known if not any(isinstance(op, Read) for op in getattr(entry, "operations", ()))]
            model._weight_conversions = kept or None
            model.is_loaded_in_4bit = any(isinstance(module, Linear4bit) for module in model.modules())
            if model.is_loaded_in_4bit:
                count_by_elements(model)
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    _ours[:] = [QlorappConfig, QlorappQuantizer]
    return QlorappConfig


def is_foreign(config: Any) -> bool:
    """A causal language model that this library does not compute itself, one that reads images too among them.

    @raises ValueError for an architecture that is neither native nor one of transformers' causal ones, with what there is.
    """
    names = getattr(config, "architectures", None) or []
    if len(names) != 1 or names[0] in _C.native_architectures():
        return len(names) == 1 and beyond_native(config) != ""
    if getattr(config, "is_encoder_decoder", False) or not (names[0].endswith("ForCausalLM") or _auto_class(names[0])):
        raise ValueError(
            f"[from_pretrained] architectures must name one of {', '.join(_C.native_architectures())}, which are computed here, or any "
            f"…ForCausalLM or other causal model of transformers, which computes it over four-bit layers; got {names[0]}. Use transformers itself "
            "for it."
        )
    return True


def _auto_class(architecture: str) -> str:
    """The Auto class of transformers that makes causal models of this architecture; empty without one, or without transformers."""
    try:
        from transformers.models.auto import modeling_auto
    except ModuleNotFoundError:
        return ""
    for auto, names in (
        ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageTextToText", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for name in names.values():
            if architecture in ((name,) if isinstance(name, str) else name):
                return auto
    return ""


def beyond_native(config: Any) -> str:
    """What of a native architecture is not built here, and in transformers is; empty: nothing."""
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False) is True:
            return f"{key}=True"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    return f"rope_type={kind!r}" if kind in ("linear", "dynamic", "yarn", "longrope") else ""


def load(
    folder: pathlib.Path, config: Any, options: BitsAndBytesConfig | None, dtype: Any, device: torch.device, /, **more: Any
) -> Any:
    """transformers' model of the folder. Says once that it takes this way. more: options of transformers' from_pretrained."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            f"[from_pretrained] {config.architectures[0]} is computed by transformers, which is not installed: pip install "
            "'qlorapp[hf]'. Natively there are " + ", ".join(_C.native_architectures()) + "."
        ) from error
    quantize = options is not None and options.load_in_4bit
    stored: Any = getattr(config, "quantization_config", None)
    four_bit = isinstance(stored, dict) and bool(stored.get("load_in_4bit", stored.get("_load_in_4bit")))
    if stored is not None and not four_bit and quantize:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        raise ValueError(
            f"[from_pretrained] the folder is quantized already, by {method!r}. Leave out quantization_config, or start from float weights."
        )
    if four_bit:  # in bitsandbytes' format: its codes are taken as they are
        fields = {**BitsAndBytesConfig.from_dict(stored).to_dict(), "quant_method": METHOD}
        del fields["load_in_4bit"]  # by this name transformers knows bitsandbytes' folders, before it looks at the method
        _register()
        more["config"] = more.get("config") or transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        more["config"].quantization_config = fields
    elif options is not None and quantize:  # an explicit None would be an error in transformers
        more["quantization_config"] = _register()(**options.to_dict())
    _log.warning(
        "[from_pretrained] %s%s: transformers' own code, %s. Natively, and faster, there are %s.",
        config.architectures[0],
        f" with {beyond_native(config)}" if beyond_native(config) else "",
        "with linear layers in four bits by this library" if four_bit or quantize else "as it is",
        ", ".join(_C.native_architectures()),
    )
    if device.type != "cpu":
        more["device_map"] = {"": device}
    of_text = {name: more.pop(name) for name in ("use_cache", "output_attentions") if name in more}
    more["trust_remote_code"] = False  # without it transformers would ask on stdin
    _damaged.clear()
    auto = getattr(transformers, _auto_class(config.architectures[0]) or "AutoModelForCausalLM")
    read: Any = auto.from_pretrained  # its types know one of the two results
    try:
        model, found = read(folder, dtype=dtype, output_loading_info=True, **more)
    except RuntimeError as error:
        if _damaged:
            raise _damaged[0] from error
        raise
    if missing := sorted(found["missing_keys"]):  # transformers would go on with random values
        raise _C.FormatError(
            f"[from_pretrained] {folder} lacks {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}, which its config.json asks for. Is "
            "config.json of another model?"
        )
    for name, value in of_text.items():  # a model that reads images has them in the config of its text part
        setattr(model.config.get_text_config(), name, value)
    if four_bit or quantize:
        _say_share(model)
    return model.eval()


def _say_share(model: Any) -> None:
    """How much of it is in four bits, as a warning where that is the smaller part.

    @raises ValueError where it is nothing: what was asked for would take four times the memory.
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
        "[from_pretrained] only %.1f %% of the %s parameters are in four bits: what is no linear layer, or is in llm_int8_skip_modules, stays "
        "in %s, most of it in %s. Reckon with that memory.",
        100 * share,
        f"{total:,}",
        str(model.dtype).removeprefix("torch."),
        largest,
    )


def _peft(where: str, model: Any) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ImportError(
            f"[{where}] {type(model).__name__} is transformers' model; its adapters are PEFT's: pip install peft."
        ) from error
    return peft


def _adapted(model: Any) -> Any:
    """PEFT's model, which accepts this library's configs, with what PEFT does wrong over four-bit layers that are not bitsandbytes' put
    right.

    A merge would add the update to the packed bytes, whose shape is another, and those bytes would be counted as parameters.
    """
    kind: Any = type(model)
    model.__class__ = _with_our_configs(kind)
    if not any(isinstance(module, Linear4bit) for module in model.modules()):
        return model
    here = weakref.ref(model)  # a cycle would keep a deleted model in memory

    def refused(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "[PeftModel] merging into four-bit weights would quantize them a second time. Save the adapter, load the base in 16 bits, and "
            "merge there: PeftModel.from_pretrained(base, folder).merge_and_unload()."
        )

    def get_nb_trainable_parameters() -> tuple[int, int]:
        model: Any = here()
        return count_parameters(model, only_trainable=True), count_parameters(model)

    def print_trainable_parameters() -> TrainableParameters:
        line = TrainableParameters(_C.trainable_parameters_line(*get_nb_trainable_parameters()))
        print(line)
        return line

    model.base_model.merge_and_unload = model.base_model.merge_adapter = refused
    model.get_nb_trainable_parameters = get_nb_trainable_parameters
    model.print_trainable_parameters = print_trainable_parameters
    return model


def load_adapter(model: Any, folder: str | os.PathLike[str], **options: Any) -> Any:
    """PEFT's PeftModel.from_pretrained for a model of transformers."""
    return _adapted(_peft("PeftModel", model).PeftModel.from_pretrained(model, folder, **options))


def adapter_state_dict(model: Any, state_dict: Any, adapter_name: str) -> dict[str, torch.Tensor]:
    """PEFT's get_peft_model_state_dict."""
    found: dict[str, torch.Tensor] = _peft("get_peft_model_state_dict", model).get_peft_model_state_dict(
        model, state_dict, adapter_name
    )
    return found


def set_adapter_state_dict(model: Any, values: dict[str, torch.Tensor], adapter_name: str) -> Any:
    """PEFT's set_peft_model_state_dict."""
    return _peft("set_peft_model_state_dict", model).set_peft_model_state_dict(model, values, adapter_name)


def _refuse_what_reads_weights(model: Any, peft_config: Any) -> None:
    """PEFT reads the weight for these, and knows no four-bit layers but bitsandbytes'."""
    init = peft_config.init_lora_weights
    for option, works, instead in (
        ("use_dora=True", not peft_config.use_dora, "Leave it out"),
        (
            f"init_lora_weights={init!r}",
            init in (True, False, None) or str(init).lower() == "gaussian",
            "Use True, False or 'gaussian', which read none, or load the base without quantization_config",
        ),
    ):
        if not works:
            raise ValueError(
                f"[get_peft_model] {option} is not supported for {type(model).__name__}: PEFT reads the weight for it, and knows no four-bit "
                f"layers but bitsandbytes'. {instead}; it works for {', '.join(_C.native_architectures())}."
            )


def _their_config(where: str, model: Any, config: Any) -> Any:
    """A config as PEFT's own LoraConfig, once the model can have such adapters."""
    peft = _peft(where, model)
    check_targets(config.target_modules, model)
    if any(isinstance(module, Linear4bit) for module in model.modules()):
        _refuse_what_reads_weights(model, config)
    values = config.to_dict()
    if values.get("runtime_config") is not None:
        values["runtime_config"] = peft.LoraRuntimeConfig(**values["runtime_config"])
    return peft.LoraConfig(**values)


@functools.cache
def _with_our_configs(kind: Any) -> type:
    """PEFT's class, whose add_adapter accepts this library's LoraConfig, too."""

    class WithOurConfigs(kind):  # type: ignore[misc]  # its types are not known here
        def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **options: Any) -> Any:
            if isinstance(peft_config, LoraConfig):
                peft_config = _their_config("add_adapter", self, peft_config)
            return super().add_adapter(adapter_name, peft_config, *args, **options)

    WithOurConfigs.__name__, WithOurConfigs.__qualname__ = kind.__name__, kind.__qualname__
    return WithOurConfigs


def get_peft_model(model: Any, peft_config: Any, seed: int | None, **options: Any) -> Any:
    """PEFT's adapters for a model of transformers. Their values come from torch's generator, or from `seed` and leave it alone."""
    peft = _peft("get_peft_model", model)
    theirs = _their_config("get_peft_model", model, peft_config)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return _adapted(peft.get_peft_model(model, theirs, **options))
