# SPDX-License-Identifier: Apache-2.0
"""torch.amp.GradScaler's interface over the C++ state machine."""

from collections.abc import Iterable
from typing import Any

import torch

from . import _C


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]


class GradScaler(_C.GradScaler):
    """Dynamic loss scaling with torch's names, rule, defaults, stages, errors and state.

    Between scale() and update() comes one step() per optimizer. update() multiplies the scale by backoff_factor if a gradient was infinite
    or NaN, and by growth_factor after growth_interval steps without one.

    Two options are additions and off by default. `min_scale` is the lower bound of the scale. After `max_consecutive_skips` skipped steps in
    a row update() raises RuntimeError with a diagnosis.

    state_dict() has torch's keys; states load in both directions. Can be pickled and copied between update() and the next unscale_() or
    step(), as torch's: within a step it raises AssertionError. A copy shares nothing with the original.
    Raises AssertionError for a factor outside its range. Warns and is disabled for device="cuda" without CUDA.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_consecutive_skips: int = 0,
    ) -> None:
        factors = (init_scale, growth_factor, backoff_factor)
        super().__init__(torch.device(device), *factors, growth_interval, enabled, min_scale, max_consecutive_skips)

    def __getstate__(self) -> tuple[Any, ...]:
        return super().__getstate__(), vars(self)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[0])
        vars(self).update(state[1])

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or an iterable of tensors, by the scale."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs)
        if not isinstance(outputs, Iterable):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = (self.scale(output) for output in outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[override]  # C++ sees gradients
        """Divides the gradients of the optimizer's parameters by the scale, in place."""
        if self.is_enabled():
            super().unscale_(_gradients(optimizer), id(optimizer), False)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Calls optimizer.step(*args, **kwargs) unless a gradient is infinite or NaN. Returns its result, or None."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        returned = None

        def take_step() -> None:
            nonlocal returned
            returned = optimizer.step(*args, **kwargs)

        super().step(take_step, _gradients(optimizer), id(optimizer))
        return returned

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Grows or shrinks the scale by the results of the steps, or sets it to new_scale."""
        if not self.is_enabled():
            return
        if isinstance(new_scale, torch.Tensor):
            super().update_from(new_scale)
        else:
            super().update(new_scale)
