# SPDX-License-Identifier: Apache-2.0
"""What a forward pass is told beside tokens and labels, by transformers' names: what changes nothing, and what is refused."""

from typing import Any

import torch

from .model_output import NO_CACHE

IGNORES = {"token_type_ids": "", "cache_position": ""}
_BY_TRANSFORMERS = "load the model by transformers and add adapters by get_peft_model: Trainer takes it, too."
#: Why not, and what instead.
_REFUSES = {
    "past_key_values": f"{NO_CACHE}.",
    "inputs_embeds": f"The model looks tokens up itself. Give input_ids, or {_BY_TRANSFORMERS}",
    "output_hidden_states": f"All blocks are computed in one call of C++. For the states between, {_BY_TRANSFORMERS}",
    "output_attentions": f"Attention is computed without its matrix. For the scores, {_BY_TRANSFORMERS}",
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


def kept_hidden(padded: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """What the head is asked for of (B, T, H), by transformers' rules: the last so many positions, those of an index that all rows share,
    of one of each row's own (B, K), or of a mask (B, T), which gives (N, H)."""
    if not isinstance(logits_to_keep, torch.Tensor):
        return padded[:, -logits_to_keep:]
    index = logits_to_keep.to(padded.device)
    if index.dim() < 2:
        return padded[:, index]
    return padded[index] if index.dtype == torch.bool else padded.take_along_dim(index[..., None], dim=1)


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
