# SPDX-License-Identifier: Apache-2.0
"""What processes of torch.distributed tell each other around checkpoints."""

from collections.abc import Callable
from typing import Any

import torch.distributed


def of_first(value: Any) -> Any:
    """Process 0's."""
    told = [value]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]


def by_first(work: Callable[[], Any]) -> Any:
    """What process 0's work returns. Its error ends the other processes, too."""
    value, error = None, None
    if torch.distributed.get_rank() == 0:
        try:
            value = work()
        except Exception as raised:
            error = raised
    value, why = of_first((value, None if error is None else str(error)))
    if error is not None:
        raise error
    if why is not None:
        raise RuntimeError(f"[Trainer] process 0 has failed: {why}")
    return value


def gathered(files: dict[str, bytes], failed: Exception | None) -> dict[str, bytes]:
    """Those of all processes, in process 0. @raises RuntimeError there if another process has failed."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    is_first = torch.distributed.get_rank() == 0
    torch.distributed.gather_object((files, failed and str(failed)), told if is_first else None, dst=0)
    everything: dict[str, bytes] = {}
    for process, (own, why) in enumerate(told if is_first else []):
        if why is not None and process > 0:
            raise RuntimeError(f"[Trainer] process {process} could not save its part of a checkpoint: {why}")
        everything |= own
    return everything
