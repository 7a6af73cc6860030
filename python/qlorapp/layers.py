# SPDX-License-Identifier: Apache-2.0
"""LoraLinear and CheckpointedBlock as torch modules over the C++ classes of the same names."""

from collections.abc import Callable
from typing import Any

import torch

from . import _C
from .precision import own_dtypes


def seed_from_torch() -> int:
    """A seed from torch's generator, so torch.manual_seed makes runs repeatable."""
    return int(torch.randint(2**62, ()))


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with a trainable low-rank update: y = x·Wᵀ (+ bias) + s·(drop(x)·Aᵀ)·Bᵀ, s = lora_alpha / r.

    base: a (out, in) tensor, a QuantizedTensor, or a torch.nn.Linear. Its weight does not change; autograd saves the packed weight.
    Parameters: lora_A (r, in) and lora_B (out, r), float32.
    """

    def __init__(
        self,
        base: "torch.Tensor | _C.QuantizedTensor | torch.nn.Linear",
        r: int = 8,
        lora_alpha: float = 8,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        init_lora_weights: bool | str = True,
        bias: torch.Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if init_lora_weights is not True and init_lora_weights != "gaussian":
            raise ValueError(f"[LoraLinear] init_lora_weights must be True or 'gaussian'; got {init_lora_weights!r}.")
        if isinstance(base, torch.nn.Linear):
            bias = base.bias if bias is None else bias
            base = base.weight
        base = base.detach() if isinstance(base, torch.Tensor) else base
        bias = bias.detach() if bias is not None else None
        seed = seed_from_torch() if seed is None else seed
        self._core = _C.LoraLinear(base, r, lora_alpha, lora_dropout, use_rslora, init_lora_weights == "gaussian", seed, bias)
        self.lora_A = torch.nn.Parameter(self._core.a.detach())
        self.lora_B = torch.nn.Parameter(self._core.b.detach())
        self._core.adopt_parameters(self.lora_A, self.lora_B)
        self.in_features, self.out_features = self._core.in_features, self._core.out_features
        self.scaling = self._core.scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) → (…, out) in the dtype of x. Dropout is active in training mode."""
        with own_dtypes(x.device):
            return self._core.forward(x, self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LoraLinear":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._core.to(self.lora_A.device)
        return self

    def merge(self, into: str = "dense") -> None:
        """Adds the update to the weight. into: "dense", or "four_bit" to quantize again."""
        self._core.merge(into)

    def unmerge(self) -> None:
        """Restores the base's exact codes and scales."""
        self._core.unmerge()

    @property
    def merged(self) -> bool:
        return self._core.merged

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scaling={self.scaling}"


class CheckpointedBlock(torch.nn.Module):
    """Keeps a block's inputs and runs the block again in backward, with the first run's random state and autocast.

    block: a torch.nn.Module or any callable. Gradients reach every tensor that it uses. Hooks and torch.autograd.grad work.
    parameters: documentation only; gradients do not depend on it.
    keep_linear_outputs: also keep the outputs of the LoraLinear layers inside, of rows x out_features elements each. The recompute
    then runs everything but their products. Changes no bit.
    Supports inputs without gradients, nesting, and several outputs.
    """

    def __init__(
        self, block: Callable[..., Any], parameters: list[torch.Tensor] | None = None, *, keep_linear_outputs: bool = False
    ) -> None:
        super().__init__()
        self.block: Any = block
        self.keep_linear_outputs = keep_linear_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's result: a tensor, or a tuple of tensors."""
        names = list(kwargs)
        values = [*args, *kwargs.values()]
        slots = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        single = False

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal single
            filled = list(values)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            outputs = self.block(*filled[: len(args)], **dict(zip(names, filled[len(args) :], strict=True)))
            single = isinstance(outputs, torch.Tensor)
            return (outputs,) if single else tuple(outputs)

        tensors = [values[slot] for slot in slots]
        for slot in slots:
            values[slot] = None  # only the graph keeps them, and can free them
        outputs = _C.checkpoint(run, tensors, self.keep_linear_outputs)
        return outputs[0] if single else tuple(outputs)
