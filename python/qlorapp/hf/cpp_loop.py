# SPDX-License-Identifier: Apache-2.0
"""The C++ training loop under transformers' or TRL's Trainer. They prepare, log, evaluate, save and call back; C++ computes the steps."""

import contextlib
import logging
import os
import signal
import time
from typing import Any

import torch
import transformers
from transformers import trainer_pt_utils

from .. import _C, optim
from ..precision import own_dtypes
from . import loop_predicate, rows, run_inputs
from .arena_optimizer import ArenaAdamW
from .checkpoints import SafeCheckpoints
from .forward import engine_of
from .passes import kept_by, why_padding_counts
from .stopping import Terminated
from .training_arguments import for_cpp, has_budget, take_choice
from .windows import StopRequested, WindowSteps

_log = logging.getLogger("qlorapp")
_log_of_theirs = logging.getLogger("transformers.trainer")
_count: Any = trainer_pt_utils.get_model_param_count  # it has no types
#: The optimizers of transformers' loop for bitsandbytes' names of `optim`.
_OPTIMIZERS = {
    "adamw_8bit": optim.AdamW8bit,
    "adamw_bnb_8bit": optim.AdamW8bit,
    "paged_adamw_8bit": optim.PagedAdamW8bit,
    "paged_adamw_32bit": optim.PagedAdamW32bit,
}
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class CppLoop(WindowSteps, SafeCheckpoints):
    """A mixin before transformers' or TRL's Trainer. train() is theirs; the inner loop is C++'s if loop_predicate allows it."""

    #: The current run in C++.
    _run: "CppRun | None" = None
    #: (optimizer, scheduler): those that callbacks see in a C++ run, which compute nothing; those that transformers' loop made.
    _shown: tuple[Any, Any] = (None, None)
    _made: tuple[Any, Any] = (None, None)
    _told: str = ""
    #: transformers' loop may give C++ its windows: nothing but the loss is wanted of a step.
    _gives_windows = False

    def _inner_training_loop(self, batch_size: int | None = None, **given: Any) -> Any:  # type: ignore[override]
        if batch_size is not None:
            self._train_batch_size = batch_size  # smaller when auto_find_batch_size retries
        folder, trial, ignore_keys = (given.get(k) for k in ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"))
        if folder is not None and has_budget(self.args):  # transformers has put the one that was chosen then
            self._train_batch_size = self.args.per_device_train_batch_size
        reason = loop_predicate.why_not(self, folder)
        if not reason:
            loader = self.get_train_dataloader()
            try:
                found = rows.read(loader.dataset, loader.collate_fn, self._train_batch_size)
            except rows.OtherRowsError as other:
                reason = str(other)
            else:
                return CppRun(self, found, trial, ignore_keys).train(folder)
        loop_predicate.refuse_half_a_checkpoint(folder, reason)
        by_windows = self._gives_windows and not loop_predicate.why_not_windows(self)
        if reason != self._told:
            self._told = reason
            begins_anew = folder is not None and not os.path.isfile(os.path.join(folder, loop_predicate.OPTIMIZER))
            _log.log(
                logging.INFO if by_windows and not begins_anew else logging.WARNING,
                "[Trainer] transformers' loop runs this training: %s. Results are the same; %s.",
                reason.rstrip("."), "C++ computes its steps" if by_windows else "steps are slower",
            )  # fmt: skip
        self._changed = run_inputs.check(self, folder)
        self._drop(self._shown)
        if by_windows or isinstance(self._made[0], ArenaAdamW):  # each run in C++ has its own moments
            self._drop(self._made)
        # DistributedDataParallel's own attribute: it need not send a base that each process has loaded, or has a part of.
        model: Any = self.model
        model._ddp_params_and_buffers_to_ignore = [name for name, p in model.named_parameters() if not p.requires_grad]
        if by_windows:
            self.model_wrapped = model  # not DistributedDataParallel of a run before
        had = (self.optimizer, self.lr_scheduler)
        several = by_windows and self.args.world_size > 1
        try:
            with (
                self._stopped_by_signals(waits=True) if several else contextlib.nullcontext(),
                self.windows_of_run() if by_windows else contextlib.nullcontext(),
            ):
                try:
                    if by_windows:  # a budget may have chosen others
                        batch_size, given["args"] = self._train_batch_size, self.args
                    result = super()._inner_training_loop(batch_size, **given)
                    if self._agree():  # a signal came while the run was ended
                        raise StopRequested
                except StopRequested:
                    self._leave_checkpoint(trial)
                    assert self._stop is not None
                    self._stop.act()
                    raise Terminated(128 + signal.SIGTERM) from None
            return result
        finally:
            if had == (None, None):
                self._made = (self.optimizer, self.lr_scheduler)
            if self._stop is not None:
                self._stop.waits = False

    def _run_epoch(self, *args: Any, **options: Any) -> Any:
        """transformers' method. A signal waits for the end of the step."""
        if self.state.global_step >= self.state.max_steps:  # resumed at its end; transformers would train one more step
            self.control.should_training_stop = True
            return None
        if self._stop is not None:
            self._stop.waits = True
        result = super()._run_epoch(*args, **options)  # type: ignore[no-untyped-call]
        if self._windows is not None:
            self._windows.runner.read()
        return result

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
        """transformers' method. Between steps a signal ends transformers' loop with a checkpoint of the completed steps."""
        stop, wanted, several = self._stop, self.control, self._windows is not None and self.args.world_size > 1
        stops = several and self._agree()
        is_more = wanted.should_log or wanted.should_evaluate or wanted.should_save
        if self._windows is not None and is_more:
            self._windows.runner.read()
        if several:
            if stops:  # no time for an evaluation
                wanted.should_evaluate = wanted.should_save = False
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
            if stops or (is_more and self._agree()):  # callbacks were called
                raise StopRequested
            return
        if stop is None or self._run is not None:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
            return
        try:
            stop.waits = False
            if stop.received is not None:  # no time for an evaluation
                self.control.should_evaluate = self.control.should_save = False
                if self._commit is not None:
                    self._commit.settle()  # if it fails, these steps are saved all the same
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **options)
            stop.act()
        except (KeyboardInterrupt, Terminated):
            self._leave_checkpoint(trial)
            raise
        stop.waits = True

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

    def _drop(self, own: tuple[Any, Any]) -> None:
        """Removes an optimizer and a scheduler that were made here, if the trainer still has them."""
        if self.optimizer is own[0]:
            self.optimizer = None
        if self.lr_scheduler is own[1]:
            self.lr_scheduler = None
        self._shown = (None, None)
        if own[0] is self._made[0]:  # an optimizer of windows holds the C++ model
            self._made = (None, None)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._run is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            self._run.save(output_dir)

    def _note_tokens(self, tokens: int, to_log: bool) -> None:
        """Records the input tokens read so far. to_log: there were steps since the last log entry."""


class CppRun:
    """One train() in C++."""

    def __init__(self, trainer: Any, found: list[rows.Row], trial: Any, ignore_keys: list[str] | None) -> None:
        self.trainer, self.trial, self.ignore_keys = trainer, trial, ignore_keys
        self.flos, self.started, self.begun = 0.0, 0.0, False
        base = loop_predicate.levels_of(trainer.model)[-1]
        engine = engine_of(base)
        assert engine is not None
        self.engine = engine
        engine.keep(kept_by(base, engine.core.body, training=True))  # the default if the arguments set nothing
        self.ranks = trainer.args.world_size
        world = torch.distributed.group.WORLD if self.ranks > 1 else None
        hooks: dict[str, Any] = {
            "event": self._on_event,
            "log_evaluate_save": self._log_evaluate_save,
            "rolled_back": self._rolled_back,
        }
        if self.ranks > 1:  # they stop together
            hooks["stop_now"] = trainer._is_signalled
        packed = any(len(row.lengths) > 1 for row in found)
        self.core = _C.Trainer(
            engine.core,
            for_cpp(trainer.args, trainer._train_batch_size),
            [(row.input_ids, row.labels) for row in found],
            [],
            base.name_or_path,
            hooks,
            row_lengths=[row.lengths for row in found] if packed else [],
            group=world.group_name if world is not None else "",
            blank_tokens=rows.blank_tokens(trainer.processing_class, found),
        )
        engine.follow()  # the options may have moved weights
        if trainer._folder is not None:
            self.core.use_folder(trainer._folder)
        if has_budget(trainer.args):
            take_choice(trainer, self.core.arguments())

    def train(self, folder: str | None) -> Any:
        """transformers' TrainOutput."""
        trainer = self.trainer
        trainer.accelerator.free_memory()
        trainer._drop(trainer._shown)
        trainer._drop(trainer._made)
        loader = trainer.get_train_dataloader()
        epochs, updates, examples, samples, total, _, max_steps = trainer.set_initial_training_values(trainer.args, loader)
        trainer._init_training_state(max_steps, updates, epochs, folder, self.trial)
        trainer.model_wrapped = trainer.accelerator.prepare_model(
            trainer.model,
            device_placement=False,  # weights may wait on the host
            evaluation_mode=self.ranks > 1,  # C++ exchanges gradients, not DistributedDataParallel
        )
        self._show(loader, max_steps)
        self._say_what_begins(examples, epochs, updates, total, max_steps)
        trainer.model.zero_grad()
        self.core.zero_grad()
        self.engine.forget_keep()
        self.started = time.time()
        trainer._run = self
        try:
            with contextlib.nullcontext() if self.ranks == 1 else trainer._stopped_by_signals(waits=True):
                with own_dtypes(self.engine.core.device):
                    *_, stopped = self.core.train(folder)
                if stopped:
                    self._stop_together()
                self._sync()
                self._take_losses()
                result = trainer._finalize_training(self.trial, samples, self.started)
                if self.ranks > 1:  # a signal after the last step
                    received: list[Any] = [None] * self.ranks
                    torch.distributed.all_gather_object(received, trainer._stop.received)
                    if any(number is not None for number in received):
                        self._stop_together()
                return result
        except (KeyboardInterrupt, Terminated):
            if self.ranks == 1:
                self._leave_checkpoint()
            raise
        finally:
            trainer._run = None
            trainer.is_in_train = False
            del self.core  # breaks the cycle: it holds the hooks, and they hold the run
            self.engine.forget_keep()
            self.engine.bring_embedding_back()

    def _say_what_begins(self, examples: int, epochs: int, updates: int, total: int, max_steps: int) -> None:
        """The lines of transformers' loop."""
        trainer, args = self.trainer, self.trainer.args
        _log_of_theirs.info("***** Running training *****")
        for name, value in {
            "Num examples": examples,
            "Num Epochs": epochs,
            "Num update steps per epoch": updates,
            "Instantaneous batch size per device": args.per_device_train_batch_size,
            "Total train batch size (w. parallel, distributed & accumulation)": total,
            "Gradient Accumulation steps": args.gradient_accumulation_steps,
            "Total optimization steps": max_steps,
            "Number of trainable parameters": _count(trainer.model, trainable_only=True),
        }.items():
            _log_of_theirs.info(f"  {name} = {value:,}")

    def _stop_together(self) -> None:
        """Ends each of several processes alike, whichever of them got the signal."""
        self._leave_checkpoint()
        self.trainer._stop.act()
        raise Terminated(128 + signal.SIGTERM)

    def _show(self, loader: Any, max_steps: int) -> None:
        """Gives callbacks an optimizer and a scheduler that show the learning rate, and a loader of the same batches."""
        trainer, handler = self.trainer, self.trainer.callback_handler
        trainer.create_optimizer()
        trainer.create_scheduler(num_training_steps=max_steps)
        trainer._shown = (trainer.optimizer, trainer.lr_scheduler)
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        handler.train_dataloader = loader

    def _sync(self) -> None:
        """Updates transformers' state from C++'s."""
        trainer, now = self.trainer, self.core.state()
        if now["global_step"] > trainer.state.global_step:  # as in transformers, the epoch changes only with a step
            trainer.state.epoch, trainer.state.global_step = now["epoch"], now["global_step"]
        if trainer.args.include_num_input_tokens_seen != "no":
            trainer.state.num_input_tokens_seen = now["num_input_tokens_seen"]
        trainer.current_flos += (now["total_flos"] - self.flos) / self.ranks  # which transformers adds up
        self.flos = now["total_flos"]

    # --- what C++ calls

    def _on_event(self, name: str, control: Any) -> None:
        trainer = self.trainer
        if name == "train_end":  # _finalize_training sends it, after it has loaded the best model
            return
        if name == "train_begin":
            self._begin()
        if name == "step_end" and trainer._commit is not None:
            trainer._commit.poll()  # what committing a checkpoint failed of ends the run here
        self._sync()
        if name != "optimizer_step":  # transformers steps its scheduler after that
            self._show_rate()
        try:
            trainer.control = getattr(trainer.callback_handler, f"on_{name}")(trainer.args, trainer.state, trainer.control)
        finally:  # what the end of a step asks for is owed by a run that is stopped in a callback
            self._tell(control)
        self._check_rate()
        if name == "step_begin" and not trainer.model.training:
            trainer.model.train()
        if name == "train_begin" and trainer.args.eval_on_start:
            trainer._evaluate(self.trial, self.ignore_keys, skip_scheduler=True)
        self._tell(control)

    def _begin(self) -> None:
        """Sets the counters that transformers' logging reads. A resumed run may continue within a log interval."""
        self.begun = True
        trainer, now = self.trainer, self.core.state()
        total, *_ = self.core.losses_since_log()
        self.flos = now["total_flos"]
        trainer._initial_num_input_tokens_seen = now["num_input_tokens_seen"]
        trainer._initial_global_step = now["global_step"]
        place = trainer.args.device if self.ranks > 1 else "cpu"  # where processes exchange it
        trainer._tr_loss = torch.zeros((), dtype=torch.float64, device=place)
        trainer._total_loss_scalar = -total  # steps of the interrupted run
        trainer._globalstep_last_logged = now["global_step"]

    def _rolled_back(self, folder: str) -> None:
        """Returns transformers' state to that of a checkpoint, as C++ has done with its own."""
        state = self.trainer.state
        saved = transformers.TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))
        for name in ("epoch", "global_step", "log_history", "best_metric", "best_global_step"):
            setattr(state, name, getattr(saved, name))
        self.trainer._confine_best(folder)
        self.trainer._load_from_checkpoint(folder)
        self._begin()

    def _tell(self, control: Any) -> None:
        for flag in _FLAGS:
            setattr(control, flag, getattr(self.trainer.control, flag))

    def _show_rate(self) -> None:
        trainer, self._rate = self.trainer, self.core.learning_rate
        trainer.lr_scheduler._last_lr = [self._rate for _ in trainer.optimizer.param_groups]
        for group in trainer.optimizer.param_groups:
            group["lr"] = self._rate

    def _check_rate(self) -> None:
        if any(group["lr"] != self._rate for group in self.trainer.optimizer.param_groups):
            raise ValueError(
                "[Trainer] a callback has changed optimizer.param_groups, which the C++ loop does not read. To set the learning rate, override "
                "create_scheduler or pass optimizers=(optimizer, scheduler)."
            )

    def _log_evaluate_save(self, control: Any) -> None:
        trainer = self.trainer
        for flag in _FLAGS:  # a resumed run may owe an evaluation
            setattr(trainer.control, flag, getattr(control, flag))
        norm, rate = self._take_losses()
        try:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                norm,
                trainer.model,
                self.trial,
                trainer.state.epoch,
                self.ignore_keys,
                self.started,
                learning_rate=rate,
            )
        finally:
            self._tell(control)
            self.engine.take_head_back()  # after an evaluation
        self._forget_logged()

    def _take_losses(self) -> tuple[float, float]:
        """Sets the loss sum since the last log entry. @returns the last gradient norm and learning rate."""
        trainer = self.trainer
        total, steps, norm, rate = self.core.losses_since_log()
        trainer._tr_loss.fill_(total)
        trainer._globalstep_last_logged = trainer.state.global_step - steps
        trainer._note_tokens(self.core.state()["num_input_tokens_seen"], steps > 0)
        return norm, rate

    def _forget_logged(self) -> None:
        if self.trainer._globalstep_last_logged == self.trainer.state.global_step:
            self.core.forget_losses()

    def save(self, folder: str) -> None:
        """Writes C++'s part of a checkpoint."""
        self._forget_logged()
        if not self.trainer.args.should_save:
            return
        self.core.save_state(folder)

    def _leave_checkpoint(self) -> None:
        """Saves the completed steps after Ctrl-C, a notebook's stop button or a signal."""
        if self.begun:  # otherwise nothing was restored or trained yet
            self._sync()
            self.trainer._leave_checkpoint(self.trial)
