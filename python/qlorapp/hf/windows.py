# SPDX-License-Identifier: Apache-2.0
"""transformers' loop over steps that C++ computes: a window of micro-batches goes to C++ as a whole at its first one."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .. import _C
from ..precision import own_dtypes
from . import loop_predicate, passes
from .arena_optimizer import ArenaAdamW
from .checkpoints import Mixed
from .forward import engine_of
from .training_arguments import for_cpp

#: Keys of packed batches that repeat their position_ids.
_REPEATED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths"}


class Windows:
    """The windows of one train()."""

    def __init__(self, trainer: Any) -> None:
        base = loop_predicate.levels_of(trainer.model)[-1]
        engine = engine_of(base)
        assert engine is not None
        self.base, self.engine = base, engine
        engine.keep(passes.kept_by(base, engine.core.body, training=True))
        self.runner = _C.StepRunner(engine.core, for_cpp(trainer.args, trainer._train_batch_size))
        engine.follow()  # the options may have moved weights
        #: The micro-batches under way, and whether none of them was given to training_step() yet.
        self.batches: list[Any] = []
        self.is_new = False
        self._elements = base.num_parameters(exclude_embeddings=True)
        self._is_first = True

    def close(self) -> None:
        self.engine.forget_keep()
        self.engine.bring_embedding_back()

    def begin(self, batches: list[Any]) -> None:
        self.batches, self.is_new = batches, True

    def compute(self, trainer: Any, model: Any) -> torch.Tensor:
        """Gradients of the window. @returns its mean loss: (), on the device."""
        self.is_new = False
        if self._is_first:
            self._is_first = False
            if trainer.accelerator.scaler is not None:  # a checkpoint's, if the run was resumed
                self.runner.scaler.load_state_dict(trainer.accelerator.scaler.state_dict())
        if not model.training:
            model.train()
        with own_dtypes(self.engine.core.device):
            unpadded = self._unpadded()
            if unpadded is not None:
                self.runner.gradients(unpadded)
        if unpadded is None:
            self._by_autograd(trainer, model)
        return self.runner.mean_loss

    def _unpadded(self) -> list[Any] | None:
        """The batches for C++; None if transformers computes this window, which is logged."""
        found = []
        for batch in self.batches:
            given = {name: value for name, value in batch.items() if name not in _REPEATED}
            reason = passes.beyond(self.engine, self.base, given) or passes.why_padding_counts(given)
            if not reason and given.get("labels") is None:
                reason = "a batch has no labels"
            try:
                if not reason:
                    found.append(passes.unpadded(self.engine.core, given, on_host=True))
            except ValueError as other:
                reason = str(other)
            if reason:
                self.engine.say_why(reason)
                return None
        return found

    def _by_autograd(self, trainer: Any, model: Any) -> None:
        """The same by the trainer's own compute_loss and a backward pass, into the same gradients."""
        runner, core, device = self.runner, self.engine.core, trainer.args.device
        if runner.is_open:  # a stream's last window, which had no update: transformers adds the next to it
            core.bind_gradients()
        else:
            core.zero_grad()
        count = trainer._get_num_items_in_batch(self.batches, device)
        is_mean = trainer.model_accepts_loss_kwargs and count is not None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in self.batches:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=count)
            loss = loss if is_mean else loss / len(self.batches)
            (loss * runner.scale().to(loss.device)).backward()
            total += loss.detach()
        runner.take_gradients(total, len(self.batches))

    def flos(self, inputs: Any) -> int:
        return 6 * int(inputs["input_ids"].numel()) * int(self._elements) if "input_ids" in inputs else 0

    def show_scale(self, trainer: Any) -> None:
        """Before a checkpoint: accelerate writes the loss scale."""
        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(self.runner.scaler.state_dict())


class WindowSteps(Mixed):
    """A mixin before transformers' Trainer. Outside of windows_of_run() its methods are transformers'."""

    _windows: Windows | None = None
    _filters = False

    @contextlib.contextmanager
    def windows_of_run(self) -> Iterator[None]:
        """transformers' loop inside trains by windows."""
        theirs, self._windows = self.args, Windows(self)
        self._filters = theirs.logging_nan_inf_filter
        self.args = copy.copy(theirs)
        # Done on the device: a read per micro-batch would make a GPU wait for the host.
        self.args.logging_nan_inf_filter = False
        # C++ zeroes the gradients. A walk through the modules takes a third of the time of a small model's step.
        model: Any = self.model
        walks = "zero_grad" not in vars(model)
        if walks:
            model.zero_grad = lambda set_to_none=True: None
        try:
            yield
        finally:
            if walks:
                del model.zero_grad
                model.zero_grad()
            self._windows.close()
            self._windows, self.args = None, theirs

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' method."""
        windows = self._windows
        if windows is None or self.optimizer is not None:
            return super().create_optimizer(model)
        args = self.args
        options = {
            "runner": windows.runner, "lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon,
            "micro_batches": args.gradient_accumulation_steps, "as_bitsandbytes": "torch" not in str(getattr(args.optim, "value", args.optim)),
        }  # fmt: skip
        self.optimizer_cls_and_kwargs = (ArenaAdamW, options)
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = None

    def get_train_dataloader(self) -> Any:
        """transformers' method. Batches of windows stay on the host, where the lengths of their rows are read."""
        loader = super().get_train_dataloader()
        if self._windows is not None and getattr(loader, "device", None) is not None:
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
        """transformers' method. A window's first micro-batch has the loss of all."""
        windows = self._windows
        if windows is None:
            return super().training_step(model, inputs, num_items_in_batch)
        before = self._tr_loss
        if before.dtype != torch.float64:
            before = self._tr_loss = before.double()
        if not windows.is_new:
            return torch.zeros_like(before)
        loss = windows.compute(self, model).to(before.device)
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

    def floating_point_ops(self, inputs: Any) -> int:
        """transformers' method, without its walk through the model for each micro-batch."""
        if self._windows is None:
            return int(super().floating_point_ops(inputs))
        return self._windows.flos(inputs)
