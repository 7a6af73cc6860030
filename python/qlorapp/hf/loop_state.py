# SPDX-License-Identifier: Apache-2.0
"""What transformers' checkpoints lack of its loop: the losses since the last log entry, and how an epoch's order of rows was drawn."""

import os
from typing import Any

import torch


def save(trainer: Any, folder: str, random_at_epoch: torch.Tensor) -> None:
    """Adds this process's file to a checkpoint under construction. Synchronizes.

    random_at_epoch: the state of torch's generator on the host when the epoch began: a sampler may draw the order from it.
    """
    loss, windows = trainer._tr_loss.double(), trainer._windows
    if windows is not None and windows.runner.is_open:  # the resumed run begins with the whole window
        loss = loss - windows.runner.mean_loss.to(loss.device)
    state = {
        "random_at_epoch": random_at_epoch,
        "loss_since_log": loss.cpu(),
        "steps_since_log": trainer.state.global_step - trainer._globalstep_last_logged,
    }
    torch.save(state, _file(trainer, folder))


def restore(trainer: Any, folder: str, in_epoch: bool) -> None:
    """At the first epoch of a resumed run. in_epoch: a part of it was trained."""
    if not in_epoch:
        trainer._load_rng_state(folder)  # transformers does it later, and loads the same
    if not os.path.isfile(_file(trainer, folder)):
        return
    saved = torch.load(_file(trainer, folder), weights_only=True)
    if in_epoch:
        torch.set_rng_state(saved["random_at_epoch"])
    trainer._tr_loss = saved["loss_since_log"].to(trainer._tr_loss.device)
    trainer._total_loss_scalar -= float(saved["loss_since_log"])  # train_loss is that of the steps since the resume
    trainer._globalstep_last_logged -= saved["steps_since_log"]


def _file(trainer: Any, folder: str) -> str:
    suffix = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
    return os.path.join(folder, f"loop_state{suffix}.pth")
