# SPDX-License-Identifier: Apache-2.0
"""model.forward of a model with an engine: the engine's pass if it computes the same, else transformers'."""

import dataclasses
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..precision import own_dtypes
from . import decoding, passes
from .cache import CACHE, EngineCache
from .engine import Engine
from .pristine import has_hooks, why_not

_log = logging.getLogger("qlorapp")


class EngineForward:
    """Replaces model.forward. Holds weak references, so a deleted model frees its memory at once."""

    def __init__(self, model: Any, engine: Engine | None, theirs: Any) -> None:
        """theirs: the class's forward, called if the engine does not compute."""
        self._model = weakref.ref(model)
        self.engine = engine
        self.theirs = theirs
        functools.update_wrapper(self, theirs)
        _, *others = inspect.signature(theirs).parameters.values()
        self.__signature__ = inspect.Signature(others)
        self._names = [parameter.name for parameter in others]

    @property
    def _module(self) -> Any:
        return self._model()

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineForward":
        """A copied model has its own weights and no engine: transformers computes it."""
        copied = memo.get(id(self._model()))
        return type(self)(copied if copied is not None else self._model(), None, self.theirs)

    def __reduce__(self) -> Any:
        return type(self), (self._model(), None, self.theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if "past_key_values" in given:  # the older name
            given.setdefault(CACHE, given.pop("past_key_values"))
        computed = self._computed(model, given)
        if computed is None:
            if self.engine is not None:
                self.engine.bring_back()
            past = given.get(CACHE)
            if isinstance(past, EngineCache):
                given[CACHE] = past.as_dynamic(model.config)
            with nullcontext() if self.engine is None else self.engine.off_if(passes.why_padding_counts(given)):
                return self.theirs(self._module, **given)
        return computed if given.get("return_dict") in (None, True) else computed.to_tuple()

    def _computed(self, model: Any, given: dict[str, Any]) -> Any:
        engine = self.engine
        if engine is None or not engine.enabled or torch.compiler.is_compiling():
            return None
        if reason := passes.beyond(engine, model, given):
            engine.say_why(reason)
            return None
        past = given.get(CACHE)
        if not isinstance(past, EngineCache):
            pass_over = passes.cached if passes.wants_cache(model, given) else passes.whole
            return served(engine, model, lambda: pass_over(engine, model, given))
        columns = past.columns
        is_checked = past.check == engine.checks and engine.seems_pristine()
        found = served(
            engine, model, lambda: passes.cached(engine, model, given), lambda: past.return_to(columns), is_checked=is_checked
        )
        # The next token of the same generate() needs no check of its own: a check can take as long as the token's kernels.
        past.check = engine.checks if past.is_private and found is not None else -1
        return found


def is_own_forward(forward: Any) -> bool:
    """Whether the forward is the engine's, or TRL's head over it. Each trainer of TRL puts one over that of the trainer before."""
    function: Any = getattr(forward, "__func__", None)
    if getattr(getattr(function, "__code__", None), "co_name", "") != "_fused_forward":
        return isinstance(forward, EngineForward)
    return any(is_own_forward(cell.cell_contents) for cell in function.__closure__ or ())


def served(
    engine: Engine,
    model: Any,
    compute: Callable[[], Any],
    undo: Callable[[], None] = lambda: None,
    below: str = "",
    is_checked: bool = False,
) -> Any:
    """Returns compute()'s result for a pristine model. Otherwise logs the reason and returns None.

    On a GPU it starts before the modules are checked, if they were pristine the last time. If the check fails, undo() reverts it.
    is_checked: relies on the last check.
    """
    gradients, computed = torch.is_grad_enabled(), None
    drops = model.training and engine.core.lora_dropout > 0  # drawn random numbers cannot be returned
    ahead = engine.may_run_ahead() and not drops
    engine.note_pristine(False)
    try:
        with own_dtypes(engine.core.device):
            if is_checked:
                reason = ""
            elif ahead:
                shown = engine.shown
                computed = compute()
                reason = why_not(engine, model, gradients, below)
                if reason or engine.shown != shown:
                    computed = None
                    undo()
            else:
                reason = why_not(engine, model, gradients, below)
            if not reason and computed is None:
                computed = compute()
    except ValueError as error:  # rows that C++ does not lay out: transformers does, or says what is wrong
        reason = str(error)
    engine.note_pristine(not reason)
    if reason:
        engine.say_why(reason)
    return computed


@dataclasses.dataclass
class BackboneOutput(BaseModelOutputWithPast):
    """With what the models of wrappers return beside it, if there are no images."""

    image_hidden_states: Any = None
    video_hidden_states: Any = None
    rope_deltas: Any = None


class EngineBackbone(EngineForward):
    """Replaces model.model.forward, which transformers' forward and TRL's loss over a fused head call.

    Holds a weak reference to the engine, because the engine holds this object.
    """

    def attach(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    @property
    def _module(self) -> Any:
        model: Any = self._model()
        return model.base_model

    def _computed(self, model: Any, given: dict[str, Any]) -> Any:
        engine: Engine | None = vars(self).get("_engine", lambda: None)()
        if engine is None or not engine.enabled or torch.compiler.is_compiling():
            return None
        if given.get(CACHE) is not None or passes.wants_cache(model, given):
            return None  # transformers' forward generates with a cache
        if reason := passes.beyond(engine, model, given):
            engine.say_why(reason)
            return None

        def compute() -> BackboneOutput:
            batch, hidden = passes.hidden_states(engine, model, given)
            return BackboneOutput(last_hidden_state=batch.pad(hidden))

        found = served(engine, model, compute, below="model")
        if found is not None:
            engine.lend_head()
        return found


def engine_of(model: Any) -> Engine | None:
    """The engine of a transformers model, or None. Independent of model.forward."""
    preparation = vars(model).get("_prepare_cache_for_generation")
    return preparation._engine if isinstance(preparation, _CachePreparation) else None


def attach(model: Any, core: Any) -> Engine:
    """Attaches an engine that shares the model's memory: forward, and generate() with its cache."""
    backbone = EngineBackbone(model, None, type(model.base_model).forward)
    model.base_model.forward = backbone  # before the engine records the module tree
    engine = Engine(model, core)
    backbone.attach(engine)
    model.forward = EngineForward(model, engine, type(model).forward)
    model._prepare_cache_for_generation = _CachePreparation(model, engine)
    model.generate = _Generate(model, engine)
    return engine


class _Method:
    """A method of one model, which it does not keep alive. That of a copied model has no engine."""

    def __init__(self, model: Any, engine: Engine | None) -> None:
        self._model, self._engine = weakref.ref(model), engine

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Method":
        copied = memo.get(id(self._model()))
        return type(self)(copied if copied is not None else self._model(), None)

    def __reduce__(self) -> Any:
        return type(self), (self._model(), None)


class _Generate(_Method):
    """Replaces model.generate: transformers' own, which finds C++'s loop where it looks for its loop over tokens, in the class."""

    def __init__(self, model: Any, engine: Engine | None) -> None:
        super().__init__(model, engine)
        theirs = type(model).generate
        functools.update_wrapper(self, theirs)
        _, *others = inspect.signature(theirs).parameters.values()
        self.__signature__ = inspect.Signature(others)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        seen = model
        if self._engine is not None and self._engine.enabled:
            kind: Any = type(model)
            seen = object.__new__(_with_loop(kind))
            object.__setattr__(seen, "__dict__", vars(model))  # the model itself, as an object of another class
            object.__setattr__(seen, "_native_model", model)
        return type(model).generate(seen, *args, **kwargs)


@functools.cache
def _with_loop(kind: Any) -> Any:
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": ("_native_model",),
        "_sample": _sample,
    }
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))


def _sample(
    seen: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    synced_gpus: bool = False, streamer: Any = None, **given: Any,
) -> Any:  # fmt: skip
    model: Any = seen._native_model
    engine, theirs = engine_of(model), type(model)._sample
    # Of stop_strings. transformers' loop passes it on to forward, and the engine would not compute that.
    given.pop("tokenizer", None)
    try:
        if engine is None:
            raise decoding.Beyond("the cache's preparation was replaced")
        if theirs.__globals__.get("__name__") != GenerationMixin.__module__:
            raise decoding.Beyond("transformers' loop was replaced")
        if synced_gpus:
            raise decoding.Beyond("processes generate in step")
        if has_hooks(model) or not is_own_forward(vars(model).get("forward")):
            raise decoding.Beyond("the model's forward was replaced or has hooks")
        if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
            raise decoding.Beyond("prepare_inputs_for_generation was replaced")
        return decoding.generated(
            engine, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, given
        )
    except decoding.Beyond as reason:
        _log.debug("[generate] transformers' loop chooses the tokens: %s.", reason)
    own = {"synced_gpus": synced_gpus, "streamer": streamer, **given}
    return theirs(model, input_ids, logits_processor, stopping_criteria, generation_config, **own)


class _CachePreparation(_Method):
    """Replaces generate()'s cache preparation: the engine's cache if it will compute, else transformers'."""

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, length: int
    ) -> Any:
        model: Any = self._model()
        engine = self._engine
        if engine is not None and engine.core.is_sharded:
            raise ValueError(
                "[generate] a sharded base (base_sharding) does not generate, as each process would have to make the same "
                "steps. Load the model without base_sharding, and the adapter with PeftModel.from_pretrained."
            )
        kind, uses_cache = generation_config.cache_implementation, generation_config.use_cache is not False
        plain = kind in (None, "dynamic", "static") and uses_cache  # C++'s cache has static shapes on a GPU by itself
        if (
            engine is not None
            and engine.enabled
            and plain
            and model_kwargs.get(CACHE) is None
            and _engine_serves(engine, model, model_kwargs)
        ):
            rows = max(generation_config.num_beams, generation_config.num_return_sequences) * batch_size
            model_kwargs[CACHE] = EngineCache(
                engine.core, rows, length + 1, private=not generation_config.return_dict_in_generate
            )
            return None
        prepare: Callable[..., Any] = type(model)._prepare_cache_for_generation
        return prepare(model, generation_config, model_kwargs, generation_mode, batch_size, length)


def _engine_serves(engine: Engine, model: Any, model_kwargs: dict[str, Any]) -> bool:
    mask = model_kwargs.get("attention_mask")
    left = mask is None or bool((mask[:, 1:] >= mask[:, :-1]).all())  # left padding only
    tensors = {name: value for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    return left and not passes.beside_text(engine, tensors) and not why_not(engine, model, needs_gradients=False)
