# SPDX-License-Identifier: Apache-2.0
"""transformers' training loop, whose steps C++ computes, and signals, optimizers and devices around it."""

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from .. import _C, optim
from . import eval_generate, loop_predicate, loop_state, old_checkpoints, rollback, run_inputs
from .arena_optimizer import ArenaAdamW
from .checkpoints import SafeCheckpoints
from .forward import engine_of
from .passes import why_padding_counts
from .stopping import Terminated
from .training_arguments import has_budget
from .window_steps import WindowSteps
from .windows import StopRequested

_log = logging.getLogger("qlorapp")
#: The optimizers of transformers' loop for bitsandbytes' names of `optim`.
_OPTIMIZERS = {
    "adamw_8bit": optim.AdamW8bit,
    "adamw_bnb_8bit": optim.AdamW8bit,
    "paged_adamw_8bit": optim.PagedAdamW8bit,
    "paged_adamw_32bit": optim.PagedAdamW32bit,
}
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainingLoop(WindowSteps, SafeCheckpoints):
    """A mixin before transformers' or TRL's Trainer. train() and its loop are theirs; C++ computes the steps if loop_predicate allows it."""

    #: torch's random numbers on the host when the epoch began.
    _random_at_epoch: torch.Tensor
    #: (optimizer, scheduler) that the last run made.
    _made: tuple[Any, Any] = (None, None)
    #: The end of a step: what the run holds can be saved.
    _is_between_steps = False
    #: Why torch computed the steps of the last run; empty: C++ did; None: there was none.
    _told: str | None = None

    def _inner_training_loop(self, batch_size: int | None = None, **given: Any) -> Any:  # type: ignore[override]
        if batch_size is not None:
            self._train_batch_size = batch_size  # smaller when auto_find_batch_size retries
        folder, trial = given.get("resume_from_checkpoint"), given.get("trial")
        if folder is not None and has_budget(self.args):  # transformers has put the one that was chosen then
            self._train_batch_size = self.args.per_device_train_batch_size
        reason = loop_predicate.why_not(self)
        self._say_what_computes(reason)
        old_checkpoints.refuse_if_by_torch(folder, reason)
        self._changed = run_inputs.check(self, folder)
        self._drop_own_optimizer(by_windows=not reason)
        self._is_between_steps, self._random_at_epoch = False, torch.get_rng_state()
        self._undone_steps, self._loss_until_log = [], {}
        # DistributedDataParallel's own attribute: it need not send a base that each process has loaded, or has a part of.
        model: Any = self.model
        model._ddp_params_and_buffers_to_ignore = [name for name, p in model.named_parameters() if not p.requires_grad]
        had = (self.optimizer, self.lr_scheduler)
        try:
            with contextlib.nullcontext() if reason else self._in_windows():
                if not reason:
                    batch_size, given["args"] = self._train_batch_size, self.args  # a budget may have chosen others
                try:
                    result = super()._inner_training_loop(batch_size, **given)
                    if self._agree():  # a signal came while the run was ended
                        raise StopRequested
                except StopRequested:
                    self._leave_checkpoint(trial)
                    assert self._stop is not None
                    self._stop.act()
                    raise Terminated(128 + signal.SIGTERM) from None
                except (KeyboardInterrupt, Terminated):  # of a signal, a callback, a notebook's stop button
                    if self.args.world_size == 1 and self._may_be_saved():
                        self._leave_checkpoint(trial)
                    raise
            return result
        finally:
            if had == (None, None):
                self._made = (self.optimizer, self.lr_scheduler)
            if self._stop is not None:
                self._stop.waits = False

    @contextlib.contextmanager
    def _in_windows(self) -> Iterator[None]:
        model: Any = self.model
        self.model_wrapped = model  # not DistributedDataParallel of a run before
        with (
            self._stopped_by_signals(waits=True) if self.args.world_size > 1 else contextlib.nullcontext(),
            self.windows_of_run(),
        ):
            yield

    def _say_what_computes(self, reason: str) -> None:
        """Logs once what computes the steps, and why torch if it does."""
        if reason == self._told:
            return
        self._told = reason
        if reason:
            _log.warning(
                "[Trainer] torch computes the steps of this training: %s. Results are the same; steps are slower.",
                reason.rstrip("."),
            )
        else:
            _log.info("[Trainer] C++ computes the steps of this training.")

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> Any:
        """transformers' method, which finds the place in the data by the step."""
        result = super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        if not resume_from_checkpoint:
            return result
        self._undone_steps = rollback.undone_steps(self, resume_from_checkpoint, updates)
        return rollback.place(self, updates) if self._undone_steps else result

    def _run_epoch(self, *args: Any, **options: Any) -> Any:
        """transformers' method. A signal waits for the end of the step."""
        if self.state.global_step >= self.state.max_steps:  # resumed at its end; transformers would train one more step
            self.control.should_training_stop = True
            return None
        if self._stop is not None:
            self._stop.waits = True
        folder = options["resume_from_checkpoint"]
        if options["epoch"] == options["epochs_trained"] and folder:
            saved = loop_state.load(self, folder)
            if options["steps_trained_in_current_epoch"] == 0:
                self._load_rng_state(folder)  # transformers does it later, and loads the same
            elif saved:
                torch.set_rng_state(saved["random_at_epoch"])
            loop_state.restore_losses(self, saved)
        self._random_at_epoch = torch.get_rng_state()
        result = super()._run_epoch(*args, **options)  # type: ignore[no-untyped-call]
        if self._windows is not None:
            self._read_steps()
        return result

    def _save_rng_state(self, output_dir: str) -> None:
        """transformers' method, and what it does not keep of its loop."""
        super()._save_rng_state(output_dir)
        loop_state.save(self, output_dir, self._random_at_epoch)

    def _read_steps(self) -> None:
        """@raises TrainingDiverged if one was not finite, unless the run can go back to a checkpoint."""
        assert self._windows is not None
        try:
            self._windows.runner.read()
        except _C.TrainingDiverged as reason:
            if not rollback.done(self, reason):
                raise

    def _leave_checkpoint(self, trial: Any) -> None:
        """@raises TrainingDiverged if a step since the last read was not finite: it is not saved."""
        if self._windows is not None:
            self._windows.runner.read()
        super()._leave_checkpoint(trial)

    def _agree(self) -> bool:
        """In a run by windows of several processes all do what callbacks of process 0 ask for. @returns whether a signal asks to stop."""
        if self._windows is None or self.args.world_size == 1:
            return self._is_signalled()
        asked = [self.is_world_process_zero() and getattr(self.control, flag) for flag in _FLAGS]
        signals, *agreed = self._windows.runner.sum([self._is_signalled(), *asked])
        for flag, count in zip(_FLAGS, agreed, strict=True):
            setattr(self.control, flag, count > 0)
        return bool(signals)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **options: Any
    ) -> None:
        """transformers' method. A signal waits for this place between steps."""
        stop, wanted, several = self._stop, self.control, self._windows is not None and self.args.world_size > 1
        stops = several and self._agree()
        is_more = wanted.should_log or wanted.should_evaluate or wanted.should_save
        if self._windows is not None and (is_more or self._windows.runner.must_read):
            self._read_steps()
        if several:
            if stops:  # no time for an evaluation
                wanted.should_evaluate = wanted.should_save = False
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
            if stops or (is_more and self._agree()):  # callbacks were called
                raise StopRequested
            return
        if stop is None:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
            return
        stop.waits, self._is_between_steps = False, True
        if stop.received is not None:  # no time for an evaluation
            self.control.should_evaluate = self.control.should_save = False
            if self._commit is not None:
                self._commit.settle()  # if it fails, these steps are saved all the same
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
        stop.act()
        stop.waits, self._is_between_steps = True, False

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """transformers' method, and what EvalGenerate measures."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if metric_key_prefix.startswith("eval") and output.metrics is not None:
            eval_generate.measure(self, dataloader, output.metrics, metric_key_prefix)
        return output

    def _may_be_saved(self) -> bool:
        """Adapter, moments and counts are those of the same step."""
        windows = self._windows
        return self._is_between_steps or (windows is not None and windows.runner.global_step == self.state.global_step)

    def create_accelerator_and_postprocess(self) -> None:
        """transformers' method. accelerate, too, leaves a model with an engine where it is: a copy would share no memory with C++."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def in_place(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            has_engine = engine_of(loop_predicate.levels_of(model)[-1]) is not None
            if self._windows is not None:  # C++ exchanges gradients, not DistributedDataParallel
                evaluation_mode = True
            return prepare(model, False if has_engine else device_placement, evaluation_mode)

        self.accelerator.prepare_model = in_place

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """transformers' method, for models without an engine. Others stay where they were loaded."""
        engine = engine_of(loop_predicate.levels_of(model)[-1])
        if engine is None:
            super()._move_model_to_device(model, device)
        elif engine.core.device.type != device.type:
            _log.warning(
                "[Trainer] the model stays on %s, where it was loaded, and args ask for %s. Load it there: device_map=%r.",
                engine.core.device, device, device.type,
            )  # fmt: skip

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """transformers' or TRL's method. Padding with labels is computed by transformers."""
        engine = engine_of(loop_predicate.levels_of(self.model)[-1])
        with contextlib.nullcontext() if engine is None else engine.off_if(why_padding_counts(inputs)):
            return super().compute_loss(model, inputs, *args, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """transformers' method, and checkpoints of 0.1.0."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if old_checkpoints.is_old(checkpoint):
            self._changed |= old_checkpoints.load(self, checkpoint)
        old_checkpoints.say_what_is_missing(checkpoint)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """transformers' choice, with this library's AdamW for bitsandbytes' names."""
        name = str(getattr(args.optim, "value", args.optim))
        if name not in _OPTIMIZERS:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)] if model is not None else []
        return _OPTIMIZERS[name], {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "in_float32": tables,  # as transformers tells bitsandbytes
        }

    def _drop_own_optimizer(self, by_windows: bool) -> None:
        """Of a run before, where it or this one has moments in C++; and the scheduler of that run."""
        optimizer, scheduler = self._made
        if not by_windows and not isinstance(getattr(optimizer, "optimizer", optimizer), ArenaAdamW):
            return
        if self.optimizer is optimizer:
            self.optimizer = None
        if self.lr_scheduler is scheduler:
            self.lr_scheduler = None
        self._made = (None, None)
