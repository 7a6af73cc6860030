# SPDX-License-Identifier: Apache-2.0
"""Callbacks that show a run: lines, a progress bar, TensorBoard."""

import importlib
import json
import os
import socket
import sys
import time
from typing import Any

from . import _C
from .batches import length_of
from .trainer_callback import TrainerCallback


def _readable(logs: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in logs.items() if key != "total_flos"}


class PrinterCallback(TrainerCallback):
    """Prints what is logged, one line each."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None:
            print(_readable(logs), flush=True)


class ProgressCallback(TrainerCallback):
    """A bar of steps, and one of batches while it evaluates, with tqdm on a terminal; what is logged goes above it."""

    def __init__(self) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from tqdm import tqdm

        self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
        if self.prediction_bar is None:
            from tqdm import tqdm

            self.prediction_bar = tqdm(total=length_of(eval_dataloader), leave=self.training_bar is None, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
        self.prediction_bar = None

    on_predict = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and self.training_bar is not None:
            self.training_bar.write(str(_readable(logs)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training_bar.close()
        self.training_bar = None


def default_progress(disable_tqdm: bool | None) -> TrainerCallback:
    """Bar and table in a notebook, a bar on a terminal that has tqdm, else lines; disable_tqdm decides where it is set."""
    from .notebook import NotebookProgressCallback, in_notebook  # it needs nothing of this module, but is for notebooks only

    if in_notebook() and not disable_tqdm:
        return NotebookProgressCallback()
    if disable_tqdm is None:
        disable_tqdm = not sys.stderr.isatty()
    try:
        import tqdm  # noqa: F401
    except ModuleNotFoundError:
        disable_tqdm = True
    return PrinterCallback() if disable_tqdm else ProgressCallback()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter


class TensorBoardCallback(TrainerCallback):
    """Writes what is logged as scalars: train/loss, eval/loss …, and the arguments as text."""

    def __init__(self, tb_writer: Any = None) -> None:
        self.tb_writer = tb_writer
        if tb_writer is None and _summary_writer() is None:
            raise ImportError("[TrainingArguments] report_to=tensorboard needs TensorBoard: pip install tensorboard.")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tb_writer is None:
            name = args.run_name or f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
            folder = (
                args.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(args.output_dir, "runs", name)
            )
            self.tb_writer = _summary_writer()(log_dir=folder)
        self.tb_writer.add_text("args", json.dumps(args.to_dict(), indent=2))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.tb_writer is None:
            return
        for key, value in (logs or {}).items():
            for prefix in ("eval", "test"):
                if key.startswith(f"{prefix}_"):
                    name = f"{prefix}/{key.removeprefix(prefix + '_')}"
                    break
            else:
                name = f"train/{key}"
            if isinstance(value, (int, float)):
                self.tb_writer.add_scalar(name, value, state.global_step)
        self.tb_writer.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None


def reporting_callbacks(report_to: list[str]) -> list[Any]:
    """TensorBoard's, and for services transformers' own. "all": of each service that is installed."""
    every = "all" in report_to
    wanted = "tensorboard" in report_to or (every and _summary_writer() is not None)
    made: list[Any] = [TensorBoardCallback()] if wanted else []
    named = [name for name in report_to if name not in ("none", "all", "tensorboard")]
    if not named and not every:
        return made
    try:
        integrations: Any = importlib.import_module("transformers").integrations
    except ModuleNotFoundError:
        for name in named:
            _C.log_warning_once(
                f"[Trainer] report_to={name} has no effect without transformers, whose callback reports: pip install transformers."
            )
        return made
    if every:
        named += [name for name in integrations.get_available_reporting_integrations() if name not in (*named, "tensorboard")]
    for name in named:
        try:
            (callback,) = integrations.get_reporting_integration_callbacks([name])
            made.append(callback())
        except (ImportError, RuntimeError, ValueError) as error:  # not installed, or not known to this release of transformers
            _C.log_warning_once(f"[Trainer] report_to={name} has no effect: {error}")
    return made
