# SPDX-License-Identifier: Apache-2.0
"""The methods of transformers' Trainer that a run by windows replaces."""

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..optim import AdamW8bit
from .arena_optimizer import ArenaAdamW
from .mixed import Mixed
from .windows import Windows

_log = logging.getLogger("qlorapp")


def _own_zero_grad(model: Any) -> Any:
    return functools.partial(type(model).zero_grad, model)


class _ZeroedInCpp:
    """zero_grad() of a model in a run by windows. A walk through the modules takes a third of the time of a small model's step.

    A copy of the model has its own again.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, set_to_none: bool = True) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        return _own_zero_grad(memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return _own_zero_grad, (self._model(),)


class WindowSteps(Mixed):
    """A mixin before transformers' Trainer. Outside of windows_of_run() its methods are transformers'."""

    _windows: Windows | None = None
    #: Of each rollback, how many steps it undid. The data went on behind them.
    _undone_steps: list[int]
    #: {step of a checkpoint that this train() wrote: the losses of its steps until the last log entry before}
    _loss_until_log: dict[int, float]
    _filters = False
    #: Logs show the entropy and the accuracy of predictions.
    _counts_tokens = False

    @contextlib.contextmanager
    def windows_of_run(self) -> Iterator[None]:
        """transformers' loop inside trains by windows."""
        self._windows = Windows(self)
        args, self._filters = self.args, self.args.logging_nan_inf_filter
        args.logging_nan_inf_filter = False  # done on the device: a read per micro-batch would make a GPU wait for the host
        model: Any = self.model
        walks = "zero_grad" not in vars(model)
        if walks:
            model.zero_grad = _ZeroedInCpp(model)
        try:
            yield
            if self.state.global_step > 0 and self._windows.runner.steps == 0:
                _log.warning(
                    "[Trainer] the adapters did not change: gradients of all %d steps were not finite in float16, and the steps were skipped. "
                    "Train for longer (the loss scale is %g now), or in bf16 or fp32.",
                    self.state.global_step, self._windows.runner.scaler.get_scale(),
                )  # fmt: skip
        except Exception as error:
            self._windows.runner.report_failure(str(error))
            raise
        finally:
            if walks:
                del model.zero_grad
                model.zero_grad()
            self._counts = self._windows.counts(rollbacks=len(self._undone_steps))
            self._windows.close()
            self._windows = None
            args.logging_nan_inf_filter = self.args.logging_nan_inf_filter = self._filters

    @contextlib.contextmanager
    def _as_given(self) -> Iterator[None]:
        """For a checkpoint: the arguments as they were given, and accelerate's loss scale as it is."""
        if self._windows is None:
            yield
            return
        self._windows.show_scale(self)
        self.args.logging_nan_inf_filter = self._filters
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = False

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' method."""
        windows = self._windows
        if windows is None or self.optimizer is not None:
            return super().create_optimizer(model)
        kind, given = self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[arg-type]
        options = {name: given[name] for name in ("lr", "betas", "eps")}
        options["as_bitsandbytes"] = issubclass(kind, AdamW8bit)
        options |= {"runner": windows.runner, "micro_batches": self.args.gradient_accumulation_steps}
        self.optimizer_cls_and_kwargs = (ArenaAdamW, options)
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = None

    def get_train_dataloader(self) -> Any:
        """transformers' method. Batches of windows stay on the host, where the lengths of their rows are read."""
        if self._windows is None:
            return super().get_train_dataloader()
        config = self.accelerator.dataloader_config
        dispatch = config.dispatch_batches
        if dispatch is None and self.args.world_size == 1:  # else accelerate moves those of a stream
            config.dispatch_batches = False
        try:
            loader = super().get_train_dataloader()
        finally:
            config.dispatch_batches = dispatch
        if getattr(loader, "device", None) is not None:
            loader.device = None
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """transformers' method. C++ counts a window's targets."""
        if self._windows is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self._windows.begin(batches)
        return batches, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """transformers' method. A window's first micro-batch has the loss of all, also if a callback ends the epoch between them."""
        windows = self._windows
        if windows is None:
            return super().training_step(model, inputs, num_items_in_batch)
        before = self._tr_loss
        if before.dtype != torch.float64:
            before = self._tr_loss = before.double()
        if not windows.is_new:
            return windows.nothing
        loss = windows.compute(self, model).to(before.device)
        if windows.nothing.device != before.device:
            windows.nothing = torch.zeros_like(before)
        if self._filters:
            usual = before / (1 + self.state.global_step - self._globalstep_last_logged)
            loss = torch.where(torch.isfinite(loss), loss, usual)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """transformers' method. The update clips."""
        return self._get_grad_norm(model) if self._windows is not None else super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._windows is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return self._windows.runner.grad_norm

    def _note_window(self, runner: Any) -> None:
        """C++ has computed a window."""

    def floating_point_ops(self, inputs: Any) -> int:
        """transformers' method, without its walk through the model for each micro-batch."""
        if self._windows is None:
            return int(super().floating_point_ops(inputs))
        return self._windows.flos(inputs)
