# SPDX-License-Identifier: Apache-2.0
"""Linear4bit: a linear layer with a four-bit weight, one class for every family. The module has the name of bitsandbytes'."""

import copy
import weakref
from typing import Any

import torch

from . import _C
from .precision import own_dtypes

_META = torch.device("meta")


class Params4bit(torch.nn.Parameter):
    """Packed codes, uint8 (n/2, 1). PEFT counts a parameter of this name as the two elements that each byte holds.

    PEFT's OLoRA constructs one from float values, with bitsandbytes' arguments. The layer then quantizes them in its own format.
    """

    quant_storage = torch.uint8
    _layer: "weakref.ref[Linear4bit]"

    def __new__(cls, values: torch.Tensor, *, module: "Linear4bit", **of_its_format: Any) -> Any:
        if values.is_floating_point():
            return module.requantize(values)
        made: Params4bit = super().__new__(cls, values, requires_grad=False)
        made._layer = weakref.ref(module)
        return made

    @property
    def module(self) -> "Linear4bit | None":
        return self._layer()

    @property
    def quant_type(self) -> str:
        return self._state.quant_type

    @property
    def compress_statistics(self) -> bool:
        return self._state.double_quant

    @property
    def _state(self) -> _C.QuantizedTensor:
        layer = self._layer()
        assert layer is not None and layer.quant_state is not None
        return layer.quant_state


class Linear4bit(torch.nn.Linear):
    """y = x·dequantize(W)ᵀ + bias, differentiable in x and bias.

    `weight` holds the packed codes, uint8 (n/2, 1), as bitsandbytes' layer does. `quant_state` holds the whole weight (out, in).
    W is (out, in) even if the layer replaces a Conv1D, whose float weight is (in, out).
    state_dict() has bitsandbytes' tensors and names.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, of_conv1d: bool = False) -> None:
        super().__init__(in_features, out_features, bias, device="meta")
        self.weight.requires_grad_(False)
        self.of_conv1d = of_conv1d
        self.quant_state: _C.QuantizedTensor | None = None

    def reset_parameters(self) -> None:
        """Does nothing: take() sets the values."""

    @classmethod
    def of(cls, weight: _C.QuantizedTensor, device: torch.device, bias: torch.nn.Parameter | None = None) -> "Linear4bit":
        """A layer that shares the memory of weight and bias. Of a weight on meta (base_sharding) it has the shapes alone, on device."""
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, bias=False)
        layer.register_parameter("bias", bias)
        codes = weight.packed
        if codes.is_meta:
            codes = torch.zeros((1, 1), dtype=torch.uint8, device=device).expand(codes.shape)
        layer.quant_state = weight
        layer.weight = Params4bit(codes, module=layer)
        return layer

    def _whole(self) -> _C.QuantizedTensor:
        """@raises ValueError if this process has only a part of the weight."""
        state = self.quant_state
        assert state is not None
        if state.device == _META:
            raise ValueError(
                "[Linear4bit] this weight is divided over processes (base_sharding), and only C++ computes with it: use a model that is pristine "
                "but for one LoRA adapter, or load it without base_sharding."
            )
        return state

    def quantize(self, quantizer: _C.Quantizer, weight: torch.Tensor) -> torch.nn.Parameter:
        """Quantizes a checkpoint's float weight. Returns the parameter."""
        return self.take(quantizer.quantize(weight.T.contiguous() if self.of_conv1d else weight))

    def take(self, weight: _C.QuantizedTensor) -> torch.nn.Parameter:
        """Stores the weight. Returns the parameter with its codes."""
        self.quant_state = weight
        made: Params4bit = Params4bit(weight.packed, module=self)
        return made

    def requantize(self, weight: torch.Tensor) -> torch.nn.Parameter:
        """Quantizes other values (out, in) in the present format. Returns the parameter."""
        kept = self.quant_state
        assert kept is not None
        quantizer = _C.Quantizer(
            quant_type=kept.quant_type,
            block_size=kept.block_size,
            double_quant=kept.double_quant,
            nested_block_size=kept.nested_block_size,
        )
        return self.take(quantizer.quantize(weight.to(kept.dtype)))

    def dequantize(self) -> torch.Tensor:
        """(out, in) in the dtype of the original weight. PEFT calls it for layers with `W_q` (DoRA needs the norm)."""
        return _C.Quantizer().dequantize(self._whole())

    @property
    def W_q(self) -> torch.Tensor:
        """PEFT's marker of a layer that dequantizes its own weight."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self._whole()
        with own_dtypes(x.device):
            y: torch.Tensor = state.linear(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "Linear4bit":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        if self.quant_state is not None and self.quant_state.device not in (_META, self.weight.device):
            self.quant_state = self.quant_state.to(self.weight.device)
            self.weight.data = self.quant_state.packed
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.quant_state is None:
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        in_blocks = self.quant_state.quant_type not in ("nf4", "fp4")  # of a GGUF file, for which bitsandbytes has no names
        if self.quant_state.device == _META or in_blocks:  # PEFT reads its own part of a state_dict
            destination[prefix + "weight"] = self.quant_state.packed
        else:
            destination.update(self.quant_state.named_tensors(prefix + "weight"))
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Linear4bit":
        """A layer with its own weight, for the reference models of preference trainers."""
        copied = type(self)(self.in_features, self.out_features, self.bias is not None, self.of_conv1d)
        memo[id(self)] = copied
        if self.quant_state is not None:
            copied.weight = copied.take(self.quant_state.clone())
        if self.bias is not None:
            copied.bias = copy.deepcopy(self.bias, memo)
        copied.train(self.training)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "[Linear4bit] a four-bit layer cannot be pickled: pickle files can run code. Save with save_pretrained, or state_dict() by safetensors. "
            "Copy with copy.deepcopy."
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, four bits"


__all__ = ["Linear4bit", "Params4bit"]
