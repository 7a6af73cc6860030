# SPDX-License-Identifier: Apache-2.0
"""model.forward of a model that has an engine: the engine's pass where it computes the same, else transformers'."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..layers import seed_from_torch
from ..precision import own_dtypes
from .cache import EngineCache
from .engine import Engine
from .output import CausalLMOutput
from .pristine import why_not

#: Arguments that the engine reads; the others of transformers' forward must be absent, None or False.
_READ = {
    "input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch", "use_cache", "past_key_values", "logits_to_keep",
    "return_dict", "cache_position",
}  # fmt: skip


class EngineForward:
    """Stands at model.forward. Refers to the model weakly: a deleted model gives its memory back at once."""

    def __init__(self, model: Any, engine: Engine | None) -> None:
        self._model = weakref.ref(model)
        self.engine = engine
        self.theirs = type(model).forward
        functools.update_wrapper(self, self.theirs)
        self.__signature__ = inspect.signature(self.theirs.__get__(model))
        self._names = list(self.__signature__.parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineForward":
        """A copied model has weights of its own, which no C++ model holds: transformers computes it."""
        copied = memo.get(id(self._model()))
        return EngineForward(copied if copied is not None else self._model(), None)

    def __reduce__(self) -> Any:
        return EngineForward, (self._model(), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        given = dict(zip(self._names, args, strict=False)) | kwargs
        computed = self._computed(model, given)
        if computed is None:
            past = given.get("past_key_values")
            if isinstance(past, EngineCache):
                given["past_key_values"] = past.as_dynamic(model.config)
            return self.theirs(model, **given)
        return computed if given.get("return_dict") in (None, True) else computed.to_tuple()

    def _computed(self, model: Any, given: dict[str, Any]) -> CausalLMOutput | None:
        engine = self.engine
        if engine is None or torch.compiler.is_compiling():
            return None
        reason = _beyond(engine, model, given) or why_not(engine, model, torch.is_grad_enabled())
        if not reason:
            try:
                with own_dtypes(engine.core.device):
                    if isinstance(given.get("past_key_values"), EngineCache) or _wants_cache(model, given):
                        return _cached(engine, model, given)
                    return _pass(engine, model, given)
            except ValueError as error:  # rows that C++ does not lay out: transformers does, or says what is wrong
                reason = str(error)
        engine.say_why(reason)
        return None


def _beyond(engine: Engine, model: Any, given: dict[str, Any]) -> str:
    """Why the engine does not compute a call like this, whatever the model; or empty."""
    for name, value in given.items():
        if name not in _READ and value is not None and value is not False:
            return f"forward was given {name}"
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "input_ids are not (B, T)"
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        return "attention_mask is not (B, T)"
    past = given.get("past_key_values")
    if (
        past is not None
        and not isinstance(past, EngineCache)
        and (not hasattr(past, "get_seq_length") or past.get_seq_length() > 0)
    ):
        return "past_key_values are transformers' own"
    if given.get("use_cache") and torch.is_grad_enabled():
        return "a cache was asked for with gradients"
    config = model.config
    if config.output_hidden_states or config.output_attentions:
        return "the config asks for hidden states or attentions"
    if given.get("labels") is not None and "_loss_function" in vars(model):
        return "loss_function was replaced"
    device = engine.core.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != engine.core.dtype:
        return f"autocast to {torch.get_autocast_dtype(device)}, and the model computes in {engine.core.dtype}"
    if model.training and getattr(config, "attention_dropout", 0.0):
        return "attention_dropout"
    return ""


def _uses_cache(model: Any, given: dict[str, Any]) -> bool:
    """transformers' rule: the argument, else the config's."""
    use_cache = given.get("use_cache")
    return bool(getattr(model.config, "use_cache", True) if use_cache is None else use_cache)


def _wants_cache(model: Any, given: dict[str, Any]) -> bool:
    """With gradients or labels a cache that is not asked for is never read: the engine makes none."""
    if torch.is_grad_enabled():
        return False
    asked = given.get("use_cache") is not None
    return _uses_cache(model, given) and (asked or (given.get("labels") is None and not model.training))


def _pass(engine: Engine, model: Any, given: dict[str, Any]) -> CausalLMOutput:
    """A whole sequence: loss, and logits when they are read. On the autograd graph of PEFT's parameters."""
    core = engine.core
    ids, mask, labels = given["input_ids"], given.get("attention_mask"), given.get("labels")
    if mask is not None and mask.is_floating_point():
        mask = mask != 0
    batch = core.unpad(ids, mask, labels, given.get("position_ids"))
    if batch.ignored_padding_labels or batch.ignored_first_labels:
        raise ValueError(
            "labels stand on padding, or on a first token behind padding or another row, and transformers counts them"
        )
    if batch.row_count > ids.shape[0] and _uses_cache(model, given):
        raise ValueError("position_ids begin again, and transformers keeps packed rows apart with use_cache=False alone")
    if torch.is_grad_enabled():
        engine.keep(kept_by(model, model.training))
    drops = model.training and core.lora_dropout > 0
    hidden = core.hidden_states(batch, model.training, seed_from_torch() if drops else 0)
    loss = None
    if labels is not None:
        count = given.get("num_items_in_batch")
        count = batch.target_count if count is None else count
        total = core.loss_of(hidden, batch)
        loss = total / count if not isinstance(count, int) or count > 0 else total * float("nan")
    keep = given.get("logits_to_keep", 0)

    def logits() -> torch.Tensor:
        with own_dtypes(core.device):
            if isinstance(keep, int) and keep == 0:
                padded: torch.Tensor = batch.pad(core.logits(hidden))
                return padded
            return _logits_of(core, batch.pad(hidden), keep)

    return CausalLMOutput(loss=loss, make_logits=logits)


def _logits_of(core: Any, hidden: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """(B, kept, V) from (B, T, D): of the last `keep` positions, of all (0), or of those of an index."""
    kept = hidden[:, slice(-keep, None) if isinstance(keep, int) else keep, :]
    logits: torch.Tensor = core.logits(kept.flatten(0, -2))
    return logits.view(*kept.shape[:-1], logits.shape[-1])


def kept_by(model: Any, training: bool) -> str:
    """What transformers' checkpointing flags say of each block, for a step in training mode or not."""
    layers = model.model.layers
    flags = [training and getattr(layer, "gradient_checkpointing", False) for layer in layers]
    if len(set(flags)) <= 1:
        return "input_only" if flags and flags[0] else "everything"
    return ",".join("input_only" if flag else "everything" for flag in flags)


@torch.no_grad()
def _cached(engine: Engine, model: Any, given: dict[str, Any]) -> CausalLMOutput:
    """Tokens that follow those in the cache; the logits of what was asked for. No gradients."""
    core, ids = engine.core, given["input_ids"]
    past = given.get("past_key_values")
    cache = past if isinstance(past, EngineCache) else EngineCache(core, ids.shape[0], ids.shape[1])
    keep = given.get("logits_to_keep", 0)
    rows, columns = ids.shape
    if given.get("labels") is not None:
        raise ValueError("labels beside a cache")
    if cache.held is None:
        padding = _left_padding(given.get("attention_mask"), rows, columns)
    elif rows != len(cache.padding):
        raise ValueError("another number of rows than the cache has")
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
        logits = _logits_of(core, grid, keep)
    return CausalLMOutput(logits=logits, past_key_values=cache)


def _left_padding(mask: torch.Tensor | None, rows: int, columns: int) -> list[int]:
    """Padding in front of each row. @raises ValueError for padding elsewhere."""
    if mask is None:
        return [0] * rows
    present = mask != 0
    padding = (columns - present.sum(-1)).tolist()
    if mask.shape != (rows, columns) or any(not bool(row[pad:].all()) for row, pad in zip(present, padding, strict=True)):
        raise ValueError("the cache's first tokens have padding that is not on the left")
    return [int(pad) for pad in padding]


def engine_of(model: Any) -> Engine | None:
    """The engine of a model of transformers, whatever stands at its forward; None where it has none."""
    preparation = vars(model).get("_prepare_cache_for_generation")
    return preparation._engine if isinstance(preparation, _CachePreparation) else None


def attach(model: Any, core: Any) -> Engine:
    """Gives a model of transformers the engine that shares its memory: forward, and the cache of generate()."""
    engine = Engine(model, core)
    model.forward = EngineForward(model, engine)
    model._prepare_cache_for_generation = _CachePreparation(model, engine)
    return engine


class _CachePreparation:
    """Stands at generate()'s preparation of the cache: the engine's where it will compute, else transformers'."""

    def __init__(self, model: Any, engine: Engine | None) -> None:
        self._model, self._engine = weakref.ref(model), engine

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CachePreparation":
        copied = memo.get(id(self._model()))
        return _CachePreparation(copied if copied is not None else self._model(), None)

    def __reduce__(self) -> Any:
        return _CachePreparation, (self._model(), None)

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, length: int
    ) -> Any:
        model: Any = self._model()
        engine = self._engine
        plain = generation_config.cache_implementation is None and generation_config.use_cache is not False
        if (
            engine is not None
            and plain
            and model_kwargs.get("past_key_values") is None
            and _engine_serves(engine, model, model_kwargs)
        ):
            rows = max(generation_config.num_beams, generation_config.num_return_sequences) * batch_size
            model_kwargs["past_key_values"] = EngineCache(engine.core, rows, length + 1)
            return None
        prepare: Callable[..., Any] = type(model)._prepare_cache_for_generation
        return prepare(model, generation_config, model_kwargs, generation_mode, batch_size, length)


def _engine_serves(engine: Engine, model: Any, model_kwargs: dict[str, Any]) -> bool:
    mask = model_kwargs.get("attention_mask")
    left = mask is None or bool((mask[:, 1:] >= mask[:, :-1]).all())  # padding on the left alone
    return left and model_kwargs.get("inputs_embeds") is None and not why_not(engine, model, needs_gradients=False)
