# SPDX-License-Identifier: Apache-2.0
"""save_pretrained() as scripts for accelerate call it: with a state_dict that they gathered, and a function that writes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: Options that change nothing, for refuse_unknown().
IGNORES = {"save_function": "files are written as safetensors, in one go", "max_shard_size": "", "token": ""}


def refuse_other_values(given: Mapping[str, Any], own: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> None:
    """A state_dict is taken where it says nothing new: what is written are the tensors that C++ holds.

    own: each tensor with the names that it may have.
    @raises ValueError for one that lacks a tensor or has other values.
    """
    for names, tensor in own:
        value = next((given[name] for name in names if name in given), None)
        if value is None:
            why = f"it has no {names[0]!r}"
        elif value.shape != tensor.shape or not torch.equal(value.detach().to(tensor.device, tensor.dtype), tensor.detach()):
            why = f"its {next(name for name in names if name in given)!r} has other values"
        else:
            continue
        raise ValueError(
            f"[save_pretrained] state_dict must hold the model's own values, which are what is written; {why}. Leave it out, or copy them into the "
            "model first: model.load_state_dict(…)."
        )
