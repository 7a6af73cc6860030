# SPDX-License-Identifier: Apache-2.0
"""What transformers' checkpoints lack of its loop: losses and counts of its trainer, how an epoch's order of rows was drawn, and rollbacks."""

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
        "num_tokens": getattr(trainer, "_total_train_tokens", 0),  # TRL's
        "undone_steps": trainer._undone_steps,
    }
    torch.save(state, _file(trainer, folder))
    trainer._loss_until_log[trainer.state.global_step] = trainer._total_loss_scalar


def load(trainer: Any, folder: str) -> dict[str, Any]:
    """What this process saved; empty if the checkpoint has no such file."""
    file = _file(trainer, folder)
    return torch.load(file, weights_only=True) if os.path.isfile(file) else {}


def restore_losses(trainer: Any, saved: dict[str, Any]) -> None:
    """The trainer has the step of the checkpoint, but what it counted since is that of another."""
    if not saved:
        return
    step, since = trainer.state.global_step, saved["loss_since_log"]
    trainer._tr_loss = since.to(trainer._tr_loss.device)
    trainer._total_loss_scalar = trainer._loss_until_log.get(
        step, -float(since)
    )  # train_loss is that of the steps of this train()
    trainer._globalstep_last_logged = trainer.state.global_step - saved["steps_since_log"]
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = saved["num_tokens"]


def _file(trainer: Any, folder: str) -> str:
    suffix = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
    return os.path.join(folder, f"loop_state{suffix}.pth")
