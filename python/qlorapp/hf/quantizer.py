# SPDX-License-Identifier: Apache-2.0
"""The quantizer that stores any model's linear layers in four bits while transformers loads it.

Registered at transformers' extension point as "qlorapp" on first use. It quantizes weights one by one while they are read, or keeps the
codes of a folder that bitsandbytes wrote.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .. import _C
from ..nn import Linear4bit
from .parameter_counts import count_by_elements, is_plain_linear

METHOD = "qlorapp"
#: Errors in the weights being read. transformers only prints them and raises its own error.
_damaged: list[_C.FormatError] = []
#: The registered classes.
_ours: list[type] = []


@contextlib.contextmanager
def says_what_is_damaged(folder: object) -> Iterator[None]:
    """Converts transformers' RuntimeError. @raises FormatError that names folder and tensor."""
    _damaged.clear()
    try:
        yield
    except RuntimeError as error:
        if _damaged:
            raise _C.FormatError(f"[from_pretrained] {folder} is damaged: {_damaged[0]}") from error
        raise


def quantizer_of(fields: dict[str, Any]) -> tuple[Any, Any]:
    """(config, quantizer) of a model with four-bit layers, for transformers and PEFT."""
    config: Any = register()(**fields)
    kind: Any = _ours[1]
    return config, kind(config, pre_quantized=True)


def as_ours(stored: dict[str, Any]) -> dict[str, Any]:
    """A folder's quantization_config by bitsandbytes, under this library's method."""
    import transformers

    register()
    kind: Any = transformers.BitsAndBytesConfig  # it has no types
    fields = {**kind.from_dict(stored).to_dict(), "quant_method": METHOD}
    del fields["load_in_4bit"]  # transformers tests this name for bitsandbytes before it reads the method
    return fields


def register() -> type:
    """The method's config class. Registers it and its quantizer on the first call.

    @raises ValueError if another package has registered the name.
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
                f"[from_pretrained] {known.__module__}.{known.__qualname__} is registered with transformers as {METHOD!r}, the name of this library's "
                "quantizer. Remove the import that registers it, or leave out quantization_config to load the model in float."
            )
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        mapping.pop(METHOD, None)  # registered by this module before a reload, with other classes

    @register_quantization_config(METHOD)
    class QlorappConfig(QuantizationConfigMixin):
        """bitsandbytes' fields, with another method."""

        def __init__(self, **fields: Any) -> None:
            for name, value in fields.items():
                setattr(self, name, value)
            self.load_in_4bit = True
            self.quant_method: Any = METHOD  # overrides the fields

        def to_dict(self) -> dict[str, Any]:
            """The entry of config.json: saved weights have bitsandbytes' format."""
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
        """Reads a stored weight with its scales, or another tensor of this name: a norm's weight, a table."""

        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(
            self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **kwargs: Any
        ) -> dict[str, Any]:
            tensors = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
            module, leaf = get_module_from_name(model, full_layer_name)
            if not isinstance(module, Linear4bit):
                return {name: value.to(getattr(module, leaf).dtype) for name, value in tensors.items()}
            layer: Any = module  # torch's types lack the attribute
            layer._is_hf_initialized = True
            if len(tensors) == 1:  # a float weight in a folder marked as quantized
                return {"weight": module.quantize(self.hf_quantizer.core, tensors["weight"])}
            try:
                return {"weight": module.take(_C.QuantizedTensor.of_tensors(tensors, "weight", full_layer_name))}
            except _C.FormatError as error:
                _damaged.append(error)
                raise

    @register_quantizer(METHOD)
    class QlorappQuantizer(HfQuantizer):
        quantized_element_size = 0.5
        serialized_names = {  # noqa: RUF012  (transformers' form)
            "weight": [
                "weight",
                *(f"weight.{part}" for part in ("nested_absmax", "nested_quant_map", "quant_map", "absmax")),
                *(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")),
            ]
        }

        @property
        def core(self) -> _C.Quantizer:
            """Made on each use, because transformers copies the object that holds it once per weight."""
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
            """Removes the conversions that a save would reverse: state_dict() already has the stored names."""
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
