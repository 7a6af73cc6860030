# SPDX-License-Identifier: Apache-2.0
"""Memory planning: plan() from configs, find_max_batch_size() for a loaded model."""

import json
import os
import time
from typing import Any

import torch

from . import _C, quantizer_options
from .config_json import lora_config as _lora_config
from .precision import as_dtype

#: find_max_batch_size: maximum rows; maximum tokens on a CPU; seconds of a step from which it is printed, and beyond which it is skipped.
_ROWS, _CPU_TOKENS, _NOTICED, _LONGEST_STEP = 4096, 16384, 5.0, 30.0
#: Out-of-memory errors without a type: torch's CPU allocator, pinned memory, cuBLAS. See src/ops/device_memory.hpp.
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryPlan:
    """The planned memory of a run, in bytes. Prints one line; a notebook draws it.

    peak_allocated, peak_reserved: the values that torch.cuda.max_memory_allocated and max_memory_reserved will have, without the context.
    fits: whether the plan fits the card; without a named card, the memory available to torch. pinned_host: beside a GPU.
    phases: per phase (load, forward, loss, backward, optimizer step, evaluation) tensors, allocated, reserved and parts at the peak; merge:
        the host memory of qlorapp.merge, after the run.
    checklist: a table of rules of thumb beside the planned sizes.
    measured: the peak in use in a measured step with evaluation, plan(model, measure=True), or None.
    """

    peak_allocated: int
    peak_reserved: int
    pinned_host: int
    fits: bool
    phases: dict[str, dict[str, Any]]
    checklist: str
    measured: int | None

    def __init__(self, planned: _C.MemoryPlan, model: str = "") -> None:
        self._planned, self._model = planned, model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._planned, name)

    def svg(self, path: str | os.PathLike[str] | None = None, *, budget: int | str | None = None) -> str:
        """The stacked timeline of one step, with the measurement if there is one. Writes it to path if given.

        budget: drawn as the limit. Defaults to the memory that torch can allocate on the card.
        """
        text = self._planned.svg(self._model, _bytes("budget", budget))
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self._planned.summary

    __repr__ = __str__


def plan(
    model: Any,
    *,
    lora_config: Any = None,
    args: Any = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    gpu: str = "auto",
    batch: int | None = None,
    max_seq_length: int | None = None,
    measure: bool = False,
) -> MemoryPlan:
    """Plans the bytes of every part in every phase of a run, before anything is loaded.

    model: a folder with a config.json, such a file, a known name ("llama-3-8b"), or a loaded model with adapters.
    gpu: a card ("T4", "A10", "H200" …), an amount of memory, "cpu", or "auto" for this machine.
    args: planned as Trainer(model, args) would run them: optimizer, accumulation, checkpointing, memory_budget, auto_find_batch_size,
    evaluation. Options that args leave unset come from the loaded model's own settings. Of a model by name, args that are not given have
    the defaults of the `qlorapp` command, as has a lora_config that is not given.
    batch, max_seq_length: override args.per_device_train_batch_size and args.max_length.
    dtype: the compute dtype. Defaults to args.bf16 or args.fp16, then to the checkpoint's. A card without bfloat16 uses float16, which is
    logged. The plan's line names the dtype.
    measure: for a loaded model, runs one step with its optimizer state and evaluation, and adds the measurement. The model does not change.
    """
    if not isinstance(gpu, str):
        raise TypeError(f"[plan] gpu must be the name of a card, an amount of memory, 'cpu' or 'auto'; got {gpu!r}.")
    options = _options_of(args)
    for name, field, value in (
        ("batch", "per_device_train_batch_size", batch), ("max_seq_length", "max_length", max_seq_length),
    ):  # fmt: skip
        if value is not None:
            options[field] = _size(name, value)
    options.setdefault("max_length", 1024)
    if isinstance(model, (_C.CausalLM, torch.nn.Module)):
        core = _core_of(model)
        planned = _C.plan_model(core, json.dumps(options))
        if measure:
            try:
                planned.measure(core)
            finally:
                _follow(model)
        return MemoryPlan(planned)
    if measure:
        raise ValueError(
            f"[plan] measure=True requires a loaded model; got {os.fspath(model)!r}. Load it, or leave measure out."
        )
    if dtype is None:
        dtype = "bfloat16" if options.get("bf16") else "float16" if options.get("fp16") else None
    planned = _C.plan_memory(
        os.fspath(model),
        _lora_config(lora_config),
        json.dumps(options),
        gpu=gpu,
        requested_dtype=None if dtype is None else as_dtype(dtype, "dtype"),
        load_in_4bit=quantization_config is None or quantization_config.load_in_4bit,
        **quantizer_options.of(quantization_config),
    )
    return MemoryPlan(planned, os.fspath(model))


class GenerationPlan:
    """The planned memory of answering prompts, in bytes. Prints one line.

    peak_allocated, peak_reserved: as in MemoryPlan. fits: whether the plan fits.
    rows: computed together, at most max_rows. most_rows: prompts of this length that fit together, up to 4,096.
    bytes_per_token: keys and values of one position in all layers. cache_memory: of all rows, for generate().
    phases: load, prompts, decode; tensors, allocated, reserved and parts at the peak of each.
    """

    peak_allocated: int
    peak_reserved: int
    fits: bool
    rows: int
    most_rows: int
    bytes_per_token: int
    cache_memory: int
    phases: dict[str, dict[str, Any]]

    def __init__(self, planned: _C.GenerationPlan) -> None:
        self._planned = planned

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._planned, name)

    def __str__(self) -> str:
        return self._planned.summary

    __repr__ = __str__


def plan_generation(
    model: str | os.PathLike[str],
    *,
    prompt_tokens: int | None = None,
    max_new_tokens: int = 128,
    max_rows: int = 128,
    cache_memory: int | str = 0,
    do_sample: bool = False,
    lora_config: Any = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    gpu: str = "auto",
    memory_budget: int | str | None = None,
) -> GenerationPlan:
    """Plans the bytes of `qlorapp generate` over max_rows prompts of prompt_tokens each, before anything is loaded.

    model: a folder with a config.json, such a file, or a known name ("llama-3-8b").
    prompt_tokens: None: 512, or as many as max_new_tokens leave of the model's positions.
    lora_config: of the adapter that is loaded, or None.
    cache_memory: of keys and values, at most. 0: as much as fits.
    do_sample: plans for drawn tokens.
    gpu: as in plan(). memory_budget: what all of it may use; None: nine tenths of the device's memory.

    Raises:
        ValueError: for a number that is out of range, or a row that cache_memory or the model's positions do not hold.
    """
    return GenerationPlan(
        _C.plan_generation(
            os.fspath(model),
            _lora_config(lora_config),
            prompt_tokens=None if prompt_tokens is None else _size("prompt_tokens", prompt_tokens),
            max_new_tokens=_size("max_new_tokens", max_new_tokens),
            max_rows=max_rows,
            cache_memory=(_bytes("cache_memory", cache_memory) or 0) if cache_memory else 0,
            do_sample=do_sample,
            gpu=gpu,
            memory_budget=_bytes("memory_budget", memory_budget),
            requested_dtype=None if dtype is None else as_dtype(dtype, "dtype"),
            load_in_4bit=quantization_config is None or quantization_config.load_in_4bit,
            **quantizer_options.of(quantization_config),
        )
    )


def _options_of(args: Any) -> dict[str, Any]:
    """The options of TrainingArguments or SFTConfig that affect memory, by C++'s names."""
    if args is None:
        return {}
    from .hf.training_arguments import for_plan

    return for_plan(args)


def _core_of(model: Any, where: str = "plan") -> _C.CausalLM:
    """The C++ model, with PEFT's active adapter."""
    if isinstance(model, _C.CausalLM):
        return model
    from .hf.forward import engine_of
    from .hf.loop_predicate import levels_of
    from .hf.passes import kept_by
    from .hf.pristine import why_not

    base = levels_of(model)[-1]
    engine = engine_of(base)
    reason = why_not(engine, base, needs_gradients=False) if engine is not None else "C++ does not know its family"
    if engine is None or reason:
        raise TypeError(
            f"[{where}] {type(base).__name__} is computed by transformers, whose memory cannot be planned: {reason}. It works for "
            + ", ".join(_C.native_architectures())
            + "; for others try batches in a loop that catches torch.cuda.OutOfMemoryError."
        )
    engine.keep(kept_by(base, engine.core.body, training=True))
    core: _C.CausalLM = engine.core
    return core


def _follow(model: Any) -> None:
    """Updates the model after a measured step, which may have moved the embedding."""
    from .hf.forward import engine_of
    from .hf.loop_predicate import levels_of

    if isinstance(model, torch.nn.Module) and (engine := engine_of(levels_of(model)[-1])) is not None:
        engine.follow()


def _bytes(what: str, amount: int | str | None) -> int | None:
    if amount is None:
        return None
    return _C.parse_bytes(what, amount if isinstance(amount, str) else str(amount))


def _size(name: str, value: int) -> int:
    if not 0 < value < 2**62:
        raise ValueError(f"[plan] {name} must be from 1 to 2^62; got {value}.")
    return value


def find_max_batch_size(
    model: Any,
    tokenizer: Any = None,
    max_seq_length: int = 512,
    *,
    budget: int | str | None = None,
    largest: int | None = None,
    optim: str = "adamw_torch_fused",
) -> int:
    """The largest batch of rows of max_seq_length tokens that trains in the available memory, or in `budget` for the whole run.

    The plan gives the answer. One real step with the optimizer's moments and an evaluation checks it. No parameter changes, gradients are
    zero afterwards, and the memory is freed.
    tokenizer: ignored; all rows have the full length.
    largest: the upper bound. Defaults to 4,096 rows, on a CPU to 16,384 tokens.
    On a CPU the plan is exact, and a step of more than 30 seconds is skipped.

    @raises MemoryError if no row fits.
    """
    core = _core_of(model, "find_max_batch_size")
    device = core.device
    _C.check_training_arguments(json.dumps({"optim": optim}))  # checks the name
    eight_bit = optim.endswith("_8bit")
    limit = _bytes("budget", budget)
    room = limit if limit is not None else _C.memory_for(str(device))
    if largest is None:
        largest = max(1, _CPU_TOKENS // max(1, max_seq_length)) if device.type == "cpu" else _ROWS
    best = _C.largest_batch(core, max_seq_length, room, largest, optimizer_is_8bit=eight_bit, evaluates=True)
    while best > 0:
        if device.type == "cpu" and not _is_quick(core, best, max_seq_length, eight_bit):
            print(f"Batch size {best}: OK by plan")
            break
        fits = _fits(core, device, best, max_seq_length, room, eight_bit)
        print(f"Batch size {best}: {'OK' if fits else 'OOM'}")
        if fits:
            break
        best = min(best - 1, best * 9 // 10)
    if best == 0:
        advice = _C.advice_for_one_row(core, max_seq_length, optimizer_is_8bit=eight_bit, room=room)
        raise MemoryError(f"[find_max_batch_size] nothing fits. {advice}")
    print(f"\nMaximum batch size: {best}")
    return best


def _is_quick(core: _C.CausalLM, batch: int, length: int, eight_bit: bool) -> bool:
    """Whether a step on a CPU is short enough, estimated from a short row. Prints the time if it is long."""
    short = min(length, 64)
    begun = time.perf_counter()
    _C.probe_step(core, 1, short, optimizer_is_8bit=eight_bit)
    seconds = (time.perf_counter() - begun) * batch * length / short
    if seconds > _NOTICED:
        how = "one step checks it" if seconds <= _LONGEST_STEP else "not checked"
        print(f"Batch size {batch} fits by plan; a step takes about {seconds:.0f} s: {how}", flush=True)
    return seconds <= _LONGEST_STEP


def _fits(core: _C.CausalLM, device: torch.device, batch: int, length: int, room: int, eight_bit: bool) -> bool:
    try:
        return _C.probe_step(core, batch, length, optimizer_is_8bit=eight_bit) <= room
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return False
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
