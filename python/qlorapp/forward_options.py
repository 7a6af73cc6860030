# SPDX-License-Identifier: Apache-2.0
"""What a forward pass is told beside tokens and labels, by transformers' names: what changes nothing, and what is refused."""

from typing import Any

import torch

IGNORES = {
    "use_cache": "a training pass has no cache",
    "output_attentions": "attention scores are never formed",
    "token_type_ids": "",
    "cache_position": "",
    "logits_to_keep": "logits are computed when they are read",
}
#: Why not, and what instead.
_REFUSES = {
    "past_key_values": "A training pass has no cache; generate() has its own. Leave it out.",
    "inputs_embeds": "The model looks tokens up itself. Give input_ids.",
    "output_hidden_states": "Leave it out.",
}


def _check_positions(position_ids: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """@raises ValueError unless they are the positions that are taken anyway: each row's real tokens counted from 0."""
    given = torch.as_tensor(position_ids, device=input_ids.device)
    real = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long().to(input_ids.device)
    if given.dim() == 1:
        given = given[None]
    if given.dim() == 2 and given.shape[0] in (1, input_ids.shape[0]) and given.shape[1] == input_ids.shape[1]:
        taken = (real.cumsum(1) - 1).clamp_min(0)
        if bool(((given == taken) | (real == 0)).all()):
            return
    raise ValueError(
        f"[forward] position_ids must be those that are taken anyway, each row's tokens counted from 0; got {tuple(given.shape)} "
        f"from {given.flatten()[0].item() if given.numel() else 'nothing'} on. Leave it out; rows of their own take the place of packed ones."
    )


def settled(input_ids: Any, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """input_ids, and in `options` only what is left to look at.  @raises ValueError for what is not built, by its name."""
    for name, instead in _REFUSES.items():
        value = options.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"[forward] {name} is not supported. {instead}")
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(
            f"[forward] input_ids must be a tensor of shape (B, T); got {type(input_ids).__name__}. Tokenize with return_tensors='pt', "
            "and give a mapping as model(**inputs)."
        )
    if (positions := options.pop("position_ids", None)) is not None:
        _check_positions(positions, input_ids, attention_mask)
    return input_ids
