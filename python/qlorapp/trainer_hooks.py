# SPDX-License-Identifier: Apache-2.0
"""The part of Trainer that the C++ loop calls: events, logs, evaluations, checkpoints, and steps where Python computes them."""

import json
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _C, prediction
from .autograd_step import accepts, overridden
from .trainer_parts import TrainerParts
from .trainer_reports import ReportMethods
from .trainer_steps import Rates


class HookMethods(TrainerParts):
    """Mixed into Trainer."""

    _stop_asked = False
    _ignore_keys: list[str] | None = None

    def _hooks(self, steps_in_python: bool) -> dict[str, Callable[..., Any]]:
        """What the C++ trainer calls by name. It holds the trainer weakly, or the two would keep each other alive."""
        trainer = weakref.ref(self)

        def hook(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                return getattr(trainer(), name)(*args)

            return call

        hooks = {"event": hook("_on_event"), "log": hook("_on_log"), "evaluate": hook("_on_evaluate"), "save": hook("_on_save"),
                 "callback_states": hook("_callback_states"), "load_more": hook("_on_load")}  # fmt: skip
        if steps_in_python:
            hooks |= {"step": hook("_on_step"), "save_more": hook("_on_save_files")}
        return hooks

    def _sync_state(self) -> None:
        for name, value in self._core.state().items():
            setattr(self.state, name, value)

    def _on_event(self, name: str, control: Any) -> None:
        if name == "step_end" and self._stop_asked:
            control.should_save = control.should_training_stop = True
        if self.callback_handler.listens(name):
            self._sync_state()
            self._show_rate()
            self.callback_handler.call(name, control)
            self._check_rate()

    def _show_rate(self) -> None:
        if isinstance(self.lr_scheduler, Rates):
            self._shown_rate = self._core.learning_rate
            self.optimizer.param_groups[0]["lr"] = self._shown_rate

    def _check_rate(self) -> None:
        if isinstance(self.lr_scheduler, Rates) and self.optimizer.param_groups[0]["lr"] != self._shown_rate:
            raise ValueError(
                "[Trainer] a callback has changed optimizer.param_groups, which the C++ loop does not read. Pass "
                "optimizers=(optimizer, scheduler) or override create_scheduler to steer the learning rate."
            )

    def _on_log(self, record: dict[str, Any], training: bool, start: float) -> None:
        self._sync_state()
        if training and accepts(self.log, record, start):
            self.log(record, start)
        else:
            self.log(record)

    def _on_evaluate(self) -> dict[str, Any]:
        self._sync_state()
        metrics = self.evaluate() if self._ignore_keys is None else self.evaluate(ignore_keys=self._ignore_keys)
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and self.state.global_step > 0:
            name, _ = _C.training_arguments_best_metric(self._core_arguments())
            self.lr_scheduler.step(metrics[name or "eval_loss"])
        return {key: value for key, value in prediction.as_numbers(metrics).items() if isinstance(value, (int, float))}

    def _on_save(self, folder: str, control: Any) -> None:
        self._sync_state()
        if overridden(self, ReportMethods, ("save_model", "_save")):
            self.save_model(folder, _internal_call=True)  # over the adapter, which a resumed run needs
        else:
            self._save_processing_class(folder)
        self.callback_handler.call("save", control)

    def _callback_states(self) -> str:
        return json.dumps(self.callback_handler.states())

    def _on_step(self, *window: Any) -> tuple[Any, ...]:
        assert self._step is not None  # of train(), for steps in Python
        return self._step(*window)

    def _on_save_files(self, folder: str) -> None:
        assert self._step is not None
        self._step.save(folder)

    def _on_load(self, folder: str) -> None:
        self.state.log_history = self._core.log_history()
        if self._step is not None:
            self._step.load(folder)
        if self.args.restore_callback_states_from_checkpoint:
            with open(os.path.join(folder, "trainer_state.json"), encoding="utf-8") as file:
                self.callback_handler.restore(json.load(file).get("stateful_callbacks") or {})
