# SPDX-License-Identifier: Apache-2.0
"""What generate() returns with return_dict_in_generate=True, and the scores in it.

Tokens are chosen in C++, which keeps no scores. They are computed for the tokens that came out: all positions in one forward pass, whose
logits are those of the steps but for rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import _C
from .model_output import NoCache


class GenerateDecoderOnlyOutput(dict[str, Any]):
    """`.sequences` (B, T + new) and, where they were asked for, `.scores` and `.logits`: of each new position (B, V) in float32.

    Also a dict and a tuple, as transformers' outputs are: output["sequences"], output[0]. What was not asked for is None.
    """

    attentions = hidden_states = None
    past_key_values = NoCache()

    @property
    def sequences(self) -> torch.Tensor:
        tokens: torch.Tensor = self["sequences"]
        return tokens

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """What is left of the logits by repetition_penalty, min_new_tokens and the warpers."""
        return self.get("scores")

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        return self.get("logits")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def logits_of(core: _C.CausalLM, prompts: list[list[int]], new: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each position of new, (B, V) in float32. prompts: without padding. Rows that have ended go on with what fills them, as there."""
    width, new = max(map(len, prompts)), new.to(core.device, torch.long)
    left = torch.tensor([[0] * (width - len(row)) + row for row in prompts], dtype=torch.long, device=new.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=new.device)
    batch = core.unpad(torch.cat([left, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1))
    kept = batch.pad(core.hidden_states(batch, False, 0))[:, width - 1 : -1]
    logits = core.logits(kept.flatten(0, 1)).float()
    return tuple(logits.view(*new.shape, -1).unbind(1))


def scores_of(
    logits: Sequence[torch.Tensor],
    prompts: list[list[int]],
    new: torch.Tensor,
    blocked: list[list[int]],
    sampling: _C.SamplingOptions,
) -> tuple[torch.Tensor, ...]:
    """What the rules of sampling leave of the logits of each position. blocked: the tokens that must not be chosen at it."""
    before = [set(row) for row in prompts]
    scores = []
    for step, (here, chosen) in enumerate(zip(logits, new.T.tolist(), strict=True)):
        seen = [torch.tensor(sorted(row), device=here.device) for row in before]
        scores.append(_C.warped_logits(here, seen, blocked[step], sampling))
        for row, token in zip(before, chosen, strict=True):
            row.add(token)
    return tuple(scores)
