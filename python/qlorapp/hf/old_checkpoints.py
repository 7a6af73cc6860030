# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of version 0.1.0 and of `qlorapp train`, in which C++ wrote the state of optimizer and schedule, and those without one."""

import json
import logging
import os
import pathlib
from typing import Any

_log = logging.getLogger("qlorapp")
#: The file of a run's state in 0.1.0, and transformers'.
RUN_STATE, OPTIMIZER = "run_state.json", "optimizer.pt"


def is_old(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, RUN_STATE)) and not os.path.isfile(os.path.join(folder, OPTIMIZER))


def refuse_if_by_torch(folder: str | None, reason: str) -> None:
    """transformers would silently restart the optimizer and the schedule.

    reason: why torch computes the steps; empty: C++ does.
    """
    if folder is not None and reason and is_old(folder):
        raise ValueError(
            f"[Trainer] {folder} is of version 0.1.0 or of qlorapp train, and torch computes the steps of this training: {reason}. It has no {OPTIMIZER} "
            "and no scheduler.pt, which those need. Train as the run that wrote it, or start a new run with its adapter: "
            "PeftModel.from_pretrained(model, checkpoint, is_trainable=True)."
        )


def load(trainer: Any, folder: str) -> bool:
    """The state of an old checkpoint into the trainer's optimizer, scheduler and scaler. @returns whether options differ from those of its run."""
    windows = trainer._windows
    changed = bool(windows.runner.load_state(folder))
    for _ in range(windows.runner.steps):
        trainer.lr_scheduler.step()
    windows.show_scale(trainer)
    return changed


def undone_steps(trainer: Any, folder: str, updates: int) -> list[int]:
    """As rollback.undone_steps(), of which an old checkpoint has the sum."""
    state = json.loads(pathlib.Path(folder, RUN_STATE).read_text())
    if not state.get("rollbacks"):
        return []
    steps = -(-state["batch"] // (trainer.args.gradient_accumulation_steps * trainer.args.world_size))
    return [state["epoch"] * updates + steps - state["global_step"]] + [0] * (state["rollbacks"] - 1)


def say_what_is_missing(folder: str) -> None:
    if not os.path.isfile(os.path.join(folder, OPTIMIZER)) and not os.path.isfile(os.path.join(folder, RUN_STATE)):
        _log.warning(
            "[Trainer] %s has no %s (save_only_model): the optimizer's moments and the schedule begin anew.",
            folder, OPTIMIZER,
        )  # fmt: skip
