# SPDX-License-Identifier: Apache-2.0
"""Finds the layers of transformers' models to quantize, and counts parameters."""

import weakref
from typing import Any

import torch

from ..nn import Linear4bit


def is_plain_linear(module: torch.nn.Module) -> bool:
    """Whether its forward is exactly y = x·Wᵀ + bias. Other classes, as Falcon's, are tested on small numbers.

    The layer inside torch's MultiheadAttention does not count: its weight is read, and its forward never called.
    """
    if not isinstance(module, torch.nn.Linear) or isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    kind: Any = type(module)
    if kind is torch.nn.Linear:
        return True
    small = kind.__new__(kind)  # without __init__, whose arguments are unknown
    torch.nn.Module.__init__(small)
    values: Any = {"dtype": torch.float32, "device": "cpu"}  # transformers changes the defaults while it loads
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
    return {id(m.weight): m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear4bit)}


def count_parameters(model: torch.nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """The number of parameters. A four-bit weight counts its elements; a tied weight counts once."""
    packed = elements_in_four_bits(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} if exclude_embeddings else set()
    return sum(
        packed.get(id(parameter), parameter.numel())
        for parameter in model.parameters()
        if id(parameter) not in tables and (parameter.requires_grad or not only_trainable)
    )


def count_by_elements(model: torch.nn.Module) -> None:
    """Replaces num_parameters() by one that knows Linear4bit; transformers' knows only bitsandbytes'."""
    here = weakref.ref(model)  # a cycle would keep a deleted model in memory

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model = here()
        assert model is not None  # the caller holds it
        return count_parameters(model, only_trainable, exclude_embeddings)

    theirs: Any = model
    theirs.num_parameters = num_parameters
