# SPDX-License-Identifier: Apache-2.0
"""on_non_finite="rollback": after gradients that were not finite a run goes back to its newest checkpoint."""

import logging
import os
from typing import Any

import transformers

from .. import _C
from . import loop_state, old_checkpoints
from .processes import of_first

_log = logging.getLogger("qlorapp")
_MOST = 3


def done(trainer: Any, reason: Exception) -> bool:
    """Between two steps: adapter, moments, schedule and counts become those of the newest checkpoint; the data go on where they are.

    @returns False if that is not asked for, was done too often, or there is no checkpoint; the last two are logged.
    """
    if getattr(trainer.args, "on_non_finite", "raise") != "rollback":
        return False
    windows, runner, state = trainer._windows, trainer._windows.runner, trainer.state
    trainer._wait_for_commit()
    folder = of_first(_newest(trainer)) if trainer.args.world_size > 1 else _newest(trainer)
    if not folder:
        _log.warning("[trainer] there is no checkpoint to roll back to: save more often, or use on_non_finite=skip.")
        return False
    if len(trainer._undone_steps) >= _MOST:
        _log.warning("[trainer] the run was rolled back %d times already: it ends.", len(trainer._undone_steps))
        return False
    step, micro_step = state.global_step, runner.micro_step
    saved = transformers.TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))
    for name in ("epoch", "global_step", "num_input_tokens_seen", "log_history", "best_metric", "best_global_step"):
        setattr(state, name, getattr(saved, name))
    trainer._confine_best(folder)
    trainer._load_from_checkpoint(folder)
    trainer._load_optimizer_and_scheduler(folder)
    trainer._load_scaler(folder)
    windows.take_scale(trainer)
    runner.micro_step, runner.global_step = micro_step, state.global_step  # no dropout mask comes again
    loop_state.restore_losses(trainer, loop_state.load(trainer, folder))
    trainer._undone_steps.append(step - state.global_step)
    state.max_steps -= step - state.global_step  # the run ends with its data
    for flag in ("should_save", "should_evaluate", "should_log"):
        setattr(trainer.control, flag, False)
    _log.warning(
        "[trainer] rolled back from step %d to %d; the data go on behind the rows of step %d. %s",
        step, state.global_step, step, str(reason).splitlines()[0],
    )  # fmt: skip
    return True


def undone_steps(trainer: Any, folder: str, updates: int) -> list[int]:
    """Of each rollback before a checkpoint, how many steps it undid.

    updates: an epoch's optimizer steps.
    """
    if old_checkpoints.is_old(folder):
        return old_checkpoints.undone_steps(trainer, folder, updates)
    return list(loop_state.load(trainer, folder).get("undone_steps", []))


def place(trainer: Any, updates: int) -> tuple[int, int]:
    """Where a resumed run that was rolled back before goes on.

    @returns (epochs, batches of the next epoch) that it has read.
    """
    args, undone = trainer.args, sum(trainer._undone_steps)
    trainer.state.max_steps -= undone
    epochs, steps = divmod(trainer.state.global_step + undone, updates)
    return epochs, 0 if args.ignore_data_skip else steps * args.gradient_accumulation_steps


def _newest(trainer: Any) -> str:
    """The newest checkpoint of this run that has an optimizer; empty: none."""
    if not trainer.args.should_save:
        return ""
    found, _ = _C.newest_checkpoint(str(trainer.args.output_dir))
    folder = found or trainer._origin or ""
    return folder if os.path.isfile(os.path.join(folder, old_checkpoints.OPTIMIZER)) else ""
