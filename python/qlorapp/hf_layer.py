# SPDX-License-Identifier: Apache-2.0
"""The linear layer in four bits of models that transformers computes, and its weight from the tensors of a bitsandbytes folder."""

import json
import weakref
from typing import Any

import torch

from . import _C, nn
from .module_tree import four_bit_state
from .precision import own_dtypes
from .quantization import as_dtype


class HfLinear4bit(torch.nn.Linear, nn.Linear4bit):
    """A linear layer of a foreign model with its weight in four bits: y = x·dequantize(W)ᵀ + bias, differentiable in x.

    W is (out, in), also where it stands for a Conv1D, whose float weight is (in, out): bitsandbytes' layers are so too, and adapters
    have the same shapes over either.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, of_conv1d: bool = False) -> None:
        super().__init__(in_features, out_features, bias, device="meta")
        self.weight.requires_grad_(False)
        self.of_conv1d = of_conv1d
        self.quant_state: _C.QuantizedTensor | None = None

    def quantize(self, quantizer: _C.Quantizer, weight: torch.Tensor) -> torch.nn.Parameter:
        """Takes a float weight as it is in a checkpoint."""
        return self.take(quantizer.quantize(weight.T.contiguous() if self.of_conv1d else weight))

    def take(self, weight: _C.QuantizedTensor) -> torch.nn.Parameter:
        self.quant_state = weight
        return torch.nn.Parameter(weight.packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.quant_state is not None  # it has been read
        with own_dtypes(x.device):
            y: torch.Tensor = self.quant_state.linear(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "HfLinear4bit":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        if self.quant_state is not None and self.weight.device != self.quant_state.device:
            self.quant_state = self.quant_state.to(self.weight.device)
            self.weight.data = self.quant_state.packed
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.quant_state is None:  # not read yet
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(four_bit_state(self.quant_state, prefix))
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "[HfLinear4bit] a four-bit layer is not copied or pickled: its weight lives in C++, and pickle files can run code. Load the model "
            "again with from_pretrained; adapters travel by save_pretrained and PeftModel.from_pretrained."
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.bias is not None}, four bits"


def is_plain_linear(module: torch.nn.Module) -> bool:
    """Is its forward y = x·Wᵀ + bias and nothing else? Of a class of its own, as Falcon's, this is tried on small numbers.

    torch's own kind inside of MultiheadAttention is none: its weight is read, and its forward never called.
    """
    if not isinstance(module, torch.nn.Linear) or isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    kind: Any = type(module)
    if kind is torch.nn.Linear:
        return True
    small = kind.__new__(kind)  # without __init__, whose arguments are the class's own affair
    torch.nn.Module.__init__(small)
    values: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever transformers made the default while it loads
    small.in_features, small.out_features = 4, 3
    small.weight = torch.nn.Parameter(torch.arange(12, **values).view(3, 4))
    small.bias = None if module.bias is None else torch.nn.Parameter(torch.arange(3, **values))
    x = torch.arange(40, **values).view(2, 5, 4)
    with torch.no_grad():
        try:
            y = kind.forward(small, x)
        except Exception:  # it needs more than a linear layer has
            return False
        return isinstance(y, torch.Tensor) and torch.equal(y, torch.nn.functional.linear(x, small.weight, small.bias))


def elements_in_four_bits(model: torch.nn.Module) -> dict[int, int]:
    """{id of the parameter: elements of the weight}, for four-bit weights, whose parameters hold packed bytes."""
    return {id(m.weight): m.in_features * m.out_features for m in model.modules() if isinstance(m, HfLinear4bit)}


def count_parameters(model: torch.nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """A four-bit weight counts its elements, a tied weight counts once."""
    packed = elements_in_four_bits(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} if exclude_embeddings else set()
    return sum(
        packed.get(id(parameter), parameter.numel())
        for parameter in model.parameters()
        if id(parameter) not in tables and (parameter.requires_grad or not only_trainable)
    )


def count_by_elements(model: torch.nn.Module) -> None:
    """Gives transformers' model a num_parameters() that knows these layers; theirs knows bitsandbytes' alone."""
    here = weakref.ref(model)  # a cycle would keep a deleted model in memory

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model = here()
        assert model is not None  # who calls holds it
        return count_parameters(model, only_trainable, exclude_embeddings)

    theirs: Any = model
    theirs.num_parameters = num_parameters


def weight_of_tensors(tensors: dict[str, torch.Tensor], where: str) -> _C.QuantizedTensor:
    """A weight from the tensors that bitsandbytes stores for it: {"weight": …, "weight.absmax": …, "weight.quant_state.…": …}.

    where: its name, for the message.  @raises FormatError where they do not fit together.
    """
    blobs = [tensor for name, tensor in tensors.items() if name.startswith("weight.quant_state.")]
    if len(blobs) != 1:
        raise _C.FormatError(f"[from_pretrained] {where}: a four-bit weight must have one quant_state; it has {len(blobs)}.")
    state = json.loads(bytes(blobs[0].cpu()))
    double = "nested_blocksize" in state
    quantizer = _C.Quantizer(
        quant_type=state["quant_type"],
        block_size=state["blocksize"],
        double_quant=double,
        **({"nested_block_size": state["nested_blocksize"]} if double else {}),
    )
    packed = tensors["weight"].reshape(-1).view(torch.uint8)  # bnb_4bit_quant_storage shows the bytes as another dtype
    empty = torch.zeros(state["shape"], dtype=as_dtype(state["dtype"], f"{where}: dtype"), device=packed.device)
    weight = quantizer.quantize(empty)  # tensors of the right kind, to be filled
    for name, tensor in weight.named_tensors("weight"):
        found = tensors.get(name)
        if found is None or (name != "weight" and ".quant_state." not in name and found.numel() != tensor.numel()):
            raise _C.FormatError(f"[from_pretrained] {where}: {name} is missing or of another size. Quantize the model again.")
        if name.endswith("quant_map") and not torch.equal(found.to(tensor), tensor):
            raise _C.FormatError(f"[from_pretrained] {where}: {name} is not that of {state['quant_type']}. Quantize it again.")
    if packed.numel() != weight.packed.numel():
        raise _C.FormatError(
            f"[from_pretrained] {where} must have {weight.packed.numel()} bytes for the shape {state['shape']}; got {packed.numel()}."
        )
    with torch.no_grad():
        weight.packed.copy_(packed.view_as(weight.packed))
        weight.absmax.copy_(tensors["weight.absmax"].view_as(weight.absmax))
        if weight.nested_absmax is not None and weight.nested_offset is not None:
            weight.nested_absmax.copy_(tensors["weight.nested_absmax"].view_as(weight.nested_absmax))
            weight.nested_offset.fill_(state["nested_offset"])
    return weight
