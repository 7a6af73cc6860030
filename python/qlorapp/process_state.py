# SPDX-License-Identifier: Apache-2.0
"""What scripts for several processes ask where they are, answered for the one that trains here."""

import contextlib
import enum
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


class ParallelMode(enum.Enum):
    """transformers' name and value of what there is here."""

    NOT_PARALLEL = "not_parallel"


def parallel_mode() -> Any:
    """transformers' own member where it is loaded, as scripts compare members by identity."""
    theirs = getattr(sys.modules.get("transformers.training_args"), "ParallelMode", ParallelMode)
    return theirs.NOT_PARALLEL


def refuse_several_processes() -> None:
    """@raises ValueError where a launcher started others like this one: each would train the whole run, into one output_dir."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise ValueError(
            f"[Trainer] training runs in one process, on one device; WORLD_SIZE={size} says that torchrun or accelerate started {size}, and each "
            "would train the whole run into the same output_dir. Start one: python script.py (or accelerate launch --num_processes 1). "
            "For a larger batch raise gradient_accumulation_steps. If no launcher runs, unset WORLD_SIZE."
        )


class ProcessState:
    """The surface of accelerate's PartialState and Accelerator that does not compute anything."""

    num_processes, process_index, local_process_index = 1, 0, 0
    is_main_process = is_local_main_process = is_last_process = True
    use_distributed = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def distributed_type(self) -> Any:
        """accelerate's DistributedType.NO where it is loaded, else its value."""
        kinds = getattr(sys.modules.get("accelerate.utils"), "DistributedType", None)
        return "NO" if kinds is None else kinds.NO

    def wait_for_everyone(self) -> None:
        """There is nobody else."""

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Nobody waits."""
        yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as it is, for each of these decorators: this is the main process."""
        return function

    on_local_main_process = on_last_process = on_main_process

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """All of them."""
        yield inputs

    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args, **kwargs)
