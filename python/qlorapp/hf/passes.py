# SPDX-License-Identifier: Apache-2.0
"""The engine's passes: a whole sequence with its loss, tokens after a cache, or only the hidden states."""

import functools
from typing import Any

import torch

from .. import _C
from ..layers import seed_from_torch
from ..precision import own_dtypes
from .cache import CACHE, EngineCache
from .engine import Engine
from .output import CausalLMOutput

#: Arguments that the engine reads; the others of transformers' forward must be absent, None or False.
_READ = {
    "input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch", "use_cache", CACHE, "logits_to_keep",
    "return_dict", "cache_position",
}  # fmt: skip
#: Zero for a token of text.
_MARKS = {"token_type_ids", "mm_token_type_ids"}


def beyond(engine: Engine, model: Any, given: dict[str, Any]) -> str:
    """The reason why the engine cannot compute this call, independent of the model's modules; empty if it can."""
    if name := beside_text(engine, given):
        return f"forward was given {name}"
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "input_ids are not (B, T)"
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        return "attention_mask is not (B, T)"
    past = given.get(CACHE)
    if (
        past is not None
        and not isinstance(past, EngineCache)
        and (not hasattr(past, "get_seq_length") or past.get_seq_length() > 0)
    ):
        return "the cache is transformers' own"
    if given.get("use_cache") and torch.is_grad_enabled():
        return "a cache was requested with gradients"
    config = model.config
    if config.output_hidden_states or config.output_attentions:
        return "the config requests hidden states or attentions"
    if given.get("labels") is not None and "_loss_function" in vars(model):
        return "loss_function was replaced"
    device = engine.core.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != engine.core.dtype:
        return f"autocast to {torch.get_autocast_dtype(device)}, and the model computes in {engine.core.dtype}"
    if model.training and getattr(config.get_text_config(), "attention_dropout", 0.0):
        return "attention_dropout"
    return ""


def beside_text(engine: Engine, given: dict[str, Any]) -> str:
    """The first argument that the engine does not read and that has a value; empty if there is none.

    A wrapper is told how to read images where there are none, too.
    """
    for name, value in given.items():
        if name in _READ or value is None or value is False or (isinstance(value, (dict, list, tuple)) and not value):
            continue
        is_wrapped = engine.core.body != "model"  # tested first: the values are on the device
        if not (is_wrapped and (name.startswith("vision_feature_") or (name in _MARKS and not bool(value.any())))):
            return name
    return ""


def _uses_cache(model: Any, given: dict[str, Any]) -> bool:
    """transformers' rule: the argument, else the config."""
    use_cache = given.get("use_cache")
    return bool(getattr(model.config, "use_cache", True) if use_cache is None else use_cache)


def wants_cache(model: Any, given: dict[str, Any]) -> bool:
    """Whether the call returns a cache. With gradients or labels only an explicit request makes one."""
    if torch.is_grad_enabled():
        return False
    asked = given.get("use_cache") is not None
    return _uses_cache(model, given) and (asked or (given.get("labels") is None and not model.training))


def why_padding_counts(given: Any) -> str:
    """The reason why the engine, which computes no padding, cannot compute this loss; empty if it can."""
    mask, labels = given.get("attention_mask"), given.get("labels")
    if not (
        isinstance(mask, torch.Tensor) and isinstance(labels, torch.Tensor) and mask.shape == labels.shape and mask.dim() == 2
    ):
        return ""
    return "labels are predicted from padding" if ((mask[:, :-1] == 0) & (labels[:, 1:] != -100)).any() else ""


def unpadded(core: Any, given: Any, on_host: bool = False) -> Any:
    """The batch without padding. @raises ValueError if transformers would count labels that the engine does not see."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and mask.is_floating_point():
        mask = mask != 0
    if positions is not None and positions.dim() == 3:  # a wrapper's axes, which are one where there are no images
        if bool((positions != positions[:1]).any()):
            raise ValueError("position_ids differ between their axes")
        positions = positions[0]
    batch = core.unpad(given["input_ids"], mask, given.get("labels"), positions, on_host=on_host)
    if batch.ignored_padding_labels or batch.ignored_first_labels:
        raise ValueError("padding, or a first token after padding or another row, has labels, which transformers counts")
    return batch


def hidden_states(engine: Engine, model: Any, given: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """(batch without padding, hidden states (tokens, D) after the last norm), on the autograd graph of PEFT's parameters."""
    core = engine.core
    batch = unpadded(core, given)
    if batch.row_count > given["input_ids"].shape[0] and _uses_cache(model, given):
        raise ValueError("position_ids restart at 0, and transformers separates packed rows only with use_cache=False")
    if torch.is_grad_enabled():
        engine.keep(kept_by(model, engine.core.body, model.training))
    drops = model.training and core.lora_dropout > 0
    return batch, core.hidden_states(batch, model.training, seed_from_torch() if drops else 0)


def whole(engine: Engine, model: Any, given: dict[str, Any]) -> CausalLMOutput:
    """A whole sequence: the loss, and logits on first use."""
    core, labels = engine.core, given.get("labels")
    batch, hidden = hidden_states(engine, model, given)
    loss = None
    if labels is not None:
        count = given.get("num_items_in_batch")
        count = batch.target_count if count is None else count
        total = core.loss_of(hidden, batch)
        loss = total / count if not isinstance(count, int) or count > 0 else total * float("nan")
        if torch.is_grad_enabled() and not loss.requires_grad:  # scripts probe batch sizes before they add adapters
            loss.requires_grad_().register_hook(_say_that_nothing_is_trained)
    keep = given.get("logits_to_keep", 0)
    product = core.logits
    if core.is_sharded:  # exchanges are made in the pass, by all processes; reading an attribute is none
        product = functools.partial(torch.nn.functional.linear, weight=core.gathered_head())

    def logits() -> torch.Tensor:
        with own_dtypes(core.device):
            if isinstance(keep, int) and keep == 0:
                padded: torch.Tensor = batch.pad(product(hidden))
                return padded
            return _logits_of(product, batch.pad(hidden), keep)

    return CausalLMOutput(loss=loss, make_logits=logits)


def _say_that_nothing_is_trained(gradient: torch.Tensor) -> None:
    _C.log_warning_once("[backward] nothing of the model is trainable: there are no gradients. Add adapters: get_peft_model().")


def _logits_of(product: Any, hidden: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """(B, kept, V) from (B, T, D): for the last `keep` positions, all (0), or those of an index tensor."""
    kept = hidden[:, slice(-keep, None) if isinstance(keep, int) else keep, :]
    logits: torch.Tensor = product(kept.flatten(0, -2))
    return logits.view(*kept.shape[:-1], logits.shape[-1])


def kept_by(model: Any, body: str, training: bool) -> str:
    """The keep policy of each block by transformers' checkpointing flags."""
    layers = model.get_submodule(body).layers
    flags = [training and getattr(layer, "gradient_checkpointing", False) for layer in layers]
    if len(set(flags)) <= 1:
        return "input_only" if flags and flags[0] else "everything"
    return ",".join("input_only" if flag else "everything" for flag in flags)


@torch.no_grad()
def cached(engine: Engine, model: Any, given: dict[str, Any]) -> CausalLMOutput:
    """Logits of tokens that follow those in the cache. No gradients."""
    core, ids = engine.core, given["input_ids"]
    past = given.get(CACHE)
    cache = past if isinstance(past, EngineCache) else EngineCache(core, ids.shape[0], ids.shape[1])
    keep = given.get("logits_to_keep", 0)
    rows, columns = ids.shape
    if given.get("labels") is not None:
        raise ValueError("labels together with a cache")
    if cache.held is None:
        padding = left_padding(given, rows, columns)
    elif rows != len(cache.padding):
        raise ValueError("the number of rows differs from the cache's")
    else:
        padding = [0] * rows
    last_only = columns == 1 or (isinstance(keep, int) and keep == 1)
    tokens = ids.flatten() if not any(padding) else torch.cat([row[pad:] for row, pad in zip(ids, padding, strict=True)])
    hidden = cache.forward(tokens, [columns - pad for pad in padding], not last_only)
    if cache.columns == 0:
        cache.padding = padding
    cache.columns += columns
    if last_only:
        logits = core.logits(hidden).unsqueeze(1)
    else:
        grid = hidden.new_zeros((rows, columns, hidden.shape[-1]))
        begin = 0
        for row, pad in enumerate(padding):
            grid[row, pad:] = hidden[begin : begin + columns - pad]
            begin += columns - pad
        logits = _logits_of(core.logits, grid, keep)
    return CausalLMOutput(None, logits, cache)


def left_padding(given: dict[str, Any], rows: int, columns: int) -> list[int]:
    """The left padding of each row. @raises ValueError for other padding, and for positions that do not count the tokens behind it."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    padding, places = torch.zeros(rows, dtype=torch.long), torch.arange(columns)
    if mask is not None:
        present = (mask != 0).cpu()  # one copy: a question per row would wait for the GPU once per row
        padding = columns - present.sum(-1)
        if mask.shape != (rows, columns) or not torch.equal(present, places >= padding[:, None]):
            raise ValueError("the cache's first tokens have padding that is not on the left")
    if columns == 0 or bool((padding >= columns).any()):
        raise ValueError("a row has no tokens")
    counted = places - padding[:, None]
    if positions is not None and (
        positions.shape[-2:] not in ((1, columns), (rows, columns))
        or not bool(((positions.cpu() == counted) | (counted < 0)).all())
    ):
        raise ValueError("position_ids do not count each row's tokens from 0")
    found: list[int] = padding.tolist()
    return found
