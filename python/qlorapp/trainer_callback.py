# SPDX-License-Identifier: Apache-2.0
"""Callbacks by transformers' names: TrainerCallback and its 15 events, TrainerState, TrainerControl, early stopping.

The events come from the C++ trainer in transformers' order (include/qlorapp/train/trainer_callbacks.hpp), whose default flow has
set the control's flags before a callback sees them.
"""

import dataclasses
import json
import logging
import math
import os
from typing import Any

from . import _C
from .training_arguments import TrainingArguments

_log = logging.getLogger("qlorapp")

TrainerControl = _C.TrainerControl
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


@dataclasses.dataclass
class TrainerState:
    """Where a run stands; the fields of trainer_state.json."""

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> "TrainerState":
        with open(json_path, encoding="utf-8") as file:
            return cls(**json.load(file))


class ExportableState:
    """A callback whose state() goes into checkpoints, and comes back with restore_callback_states_from_checkpoint."""

    def state(self) -> dict[str, Any]:
        """{"args": what the constructor takes, "attributes": what to set on the object}. Either may be left out."""
        raise NotImplementedError("state() is to return {'args': {…}, 'attributes': {…}}.")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        restored = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(restored, name, value)
        return restored


def _event(doc: str) -> Any:
    def nothing(self: Any, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        """Replaced below."""

    nothing.__doc__ = doc
    return nothing


class TrainerCallback:
    """Methods that the trainer calls; override those you need.

    Each gets (args, state, control) and by keyword model, processing_class, optimizer, lr_scheduler, train_dataloader,
    eval_dataloader, and logs or metrics where there are some. Set the control's flags, or return a control.
    """

    on_init_end = _event("The Trainer is made.")
    on_train_begin = _event("train() begins.")
    on_train_end = _event("train() ends; the best model is loaded, if it was asked for.")
    on_epoch_begin = _event("An epoch begins.")
    on_epoch_end = _event("An epoch ends, or training in its middle.")
    on_step_begin = _event("An optimizer step begins, with its first micro-batch.")
    on_pre_optimizer_step = _event("Gradients are complete and clipped; the optimizer has not moved.")
    on_optimizer_step = _event("The optimizer has moved, or was skipped; the gradients are still there.")
    on_substep_end = _event("A micro-batch that is not the step's last is done.")
    on_step_end = _event("A step is done and counted.")
    on_evaluate = _event("An evaluation is done; metrics.")
    on_predict = _event("predict() is done; metrics.")
    on_save = _event("A checkpoint is written.")
    on_log = _event("Something is logged; logs.")
    on_prediction_step = _event("A batch of an evaluation or prediction is done.")


def _has_state(callback: Any) -> bool:
    """Is it an ExportableState, of this library or of transformers?"""
    return callable(getattr(callback, "state", None)) and hasattr(type(callback), "from_state")


class CallbackHandler:
    """The callbacks of a trainer, called in their order."""

    def __init__(self, callbacks: list[Any], trainer: Any) -> None:
        self.callbacks: list[Any] = []
        self._trainer = trainer
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        made = callback() if isinstance(callback, type) else callback
        if any(type(made) is type(there) for there in self.callbacks):
            _log.warning("[Trainer] a %s is there already; both are called.", type(made).__name__)
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        for there in self.callbacks:
            if there is callback or (isinstance(callback, type) and isinstance(there, callback)):
                self.callbacks.remove(there)
                return there
        return None

    def listens(self, event: str) -> bool:
        return any(
            getattr(type(callback), f"on_{event}", None) is not getattr(TrainerCallback, f"on_{event}")
            or f"on_{event}" in vars(callback)
            for callback in self.callbacks
        )

    def call(self, event: str, control: Any, **extra: Any) -> None:
        trainer = self._trainer
        name = f"on_{event}"
        for callback in self.callbacks:
            method = getattr(callback, name, None)  # any object with some of the methods will do
            if method is None:
                continue
            asked = method(
                trainer.args,
                trainer.state,
                control,
                model=trainer.model,
                processing_class=trainer.processing_class,
                optimizer=trainer.optimizer,
                lr_scheduler=trainer.lr_scheduler,
                train_dataloader=trainer._shown_train_loader(),
                eval_dataloader=trainer.eval_dataloader,
                **extra,
            )
            if asked is not None and asked is not control:
                for flag in _FLAGS:
                    setattr(control, flag, getattr(asked, flag))

    def states(self) -> dict[str, Any]:
        """By class name, of those that have one; a list where a class is there more than once."""
        found: dict[str, Any] = {}
        for callback in self.callbacks:
            if not _has_state(callback):
                continue
            name, state = type(callback).__name__, callback.state()
            if name in found:
                found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), state]
            else:
                found[name] = state
        return found

    def restore(self, states: dict[str, Any]) -> None:
        left = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
        for i, callback in enumerate(self.callbacks):
            name = type(callback).__name__
            if _has_state(callback) and left.get(name):
                saved = {"args": {}, "attributes": {}, **left[name].pop(0)}  # transformers' from_state needs both keys
                self.callbacks[i] = type(callback).from_state(saved)
        for name, rest in left.items():
            if rest and name != "TrainerControl":
                _log.warning("[Trainer] the checkpoint has the state of a %s, which this trainer has not.", name)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends training when metric_for_best_model has not improved by more than a threshold in so many evaluations."""

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ValueError(
                "[EarlyStoppingCallback] needs metric_for_best_model and an eval_strategy of steps or epoch. "
                "Set load_best_model_at_end=True as well to end with the best adapters."
            )
        if not args.load_best_model_at_end:
            _log.warning("[EarlyStoppingCallback] without load_best_model_at_end=True the run ends with its last adapters.")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            _log.warning("[EarlyStoppingCallback] the evaluation has no %s: it cannot end the run.", name)
            return
        best = state.best_metric
        better = best is None or (value > best if args.greater_is_better else value < best)
        if better and (best is None or not math.isfinite(best) or abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
