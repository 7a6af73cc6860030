# SPDX-License-Identifier: Apache-2.0
"""Memory before it is taken: plan() from configs alone, find_max_batch_size() for a model that is there."""

import json
import os
from typing import Any

import torch

from . import _C
from .modeling import CausalLM
from .peft import PeftModel
from .peft_config import LoraConfig
from .quantization import BitsAndBytesConfig, as_dtype
from .training_arguments import TrainingArguments


class MemoryPlan:
    """What a run will take: peak_allocated and peak_reserved in bytes, phases, checklist. Prints as a line, draws itself in a notebook."""

    def __init__(self, planned: _C.MemoryPlan, title: str) -> None:
        self._planned, self._title = planned, title

    @property
    def peak_allocated(self) -> int:
        """What torch.cuda.max_memory_allocated will say."""
        return self._planned.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """What torch.cuda.max_memory_reserved will say; the CUDA context comes on top."""
        return self._planned.peak_reserved

    @property
    def pinned_host(self) -> int:
        """Pinned host memory beside a GPU."""
        return self._planned.pinned_host

    @property
    def phases(self) -> dict[str, dict[str, Any]]:
        """load, forward, loss, backward, optimizer step, evaluation: tensors, allocated, reserved, and the parts of the fullest moment."""
        return self._planned.phases

    @property
    def checklist(self) -> str:
        """The customary rows beside what they really are."""
        return self._planned.checklist

    def svg(
        self, path: str | os.PathLike[str] | None = None, *, budget: int | str | None = None, measured: list[int] | None = None
    ) -> str:
        """The stacked timeline of one step, with what was measured at equal distances beside it. Written to path if that is given."""
        limit = _C.parse_bytes("budget", budget) if isinstance(budget, str) else budget
        text = self._planned.svg(self._title, limit, measured or [])
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
    model: str | os.PathLike[str] | CausalLM | PeftModel,
    *,
    lora_config: LoraConfig | None = None,
    args: TrainingArguments | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    dtype: torch.dtype | str | None = None,
    gpu: str = "auto",
    batch: int | None = None,
    max_seq_length: int | None = None,
) -> MemoryPlan:
    """Bytes of every part in every phase of a run, before anything exists.

    model is a folder with a config.json, such a file, a known name ("llama-3-8b"), or a model that is loaded and has adapters.
    gpu is a card ("T4", "A10", "H200" …), an amount of memory, "cpu", or "auto": what is here. batch and max_seq_length stand in for
    args.per_device_train_batch_size and args.max_length.
    """
    options = {**(args or TrainingArguments()).to_dict()}
    if batch is not None:
        options["per_device_train_batch_size"] = batch
    if max_seq_length is not None:
        options["max_length"] = max_seq_length
    size, length = options["per_device_train_batch_size"], options["max_length"]
    if isinstance(model, torch.nn.Module):
        core = _core_of(model)
        planned = _C.plan_model(
            core,
            size,
            length,
            optimizer_is_8bit=options["optim"].endswith("_8bit"),
            evaluates=options["eval_strategy"] != "no",
        )
        return MemoryPlan(planned, f"{size} x {length} tokens")
    if dtype is None:
        dtype = "bfloat16" if options["bf16"] else "float16" if options["fp16"] else "float32"
    quantization = quantization_config or BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    planned = _C.plan_memory(
        os.fspath(model),
        json.dumps((lora_config or LoraConfig()).to_dict()),
        json.dumps(options),
        gpu=gpu,
        compute_dtype=as_dtype(dtype, "dtype"),
        load_in_4bit=quantization.load_in_4bit,
        quant_type=quantization.bnb_4bit_quant_type,
        double_quant=quantization.bnb_4bit_use_double_quant,
        skip_modules=quantization.llm_int8_skip_modules or [],
    )
    return MemoryPlan(planned, f"{os.fspath(model)}, {size} x {length} tokens")


def _core_of(model: CausalLM | PeftModel, where: str = "plan") -> _C.CausalLM:
    lm = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(lm, CausalLM):
        raise TypeError(
            f"[{where}] {type(model).__name__} is computed by transformers, whose memory nobody can tell beforehand. It works for "
            + ", ".join(_C.native_architectures())
            + "; for others try batches in a loop that catches torch.cuda.OutOfMemoryError."
        )
    lm._rebind()
    return lm.core


def _available(device: torch.device) -> int:
    """Bytes that are free for tensors, those of torch's cache included."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available; give budget=")


def find_max_batch_size(
    model: CausalLM | PeftModel,
    tokenizer: Any = None,
    max_seq_length: int = 512,
    *,
    budget: int | str | None = None,
    largest: int = 4096,
    optim: str = "adamw_torch_fused",
) -> int:
    """The largest batch of rows of max_seq_length tokens that trains in the memory there is, or in `budget` for the whole run.

    The plan answers, and one true step of that batch (optimizer and evaluation included) checks it. No parameter changes, gradients are
    zero afterwards, and no memory stays behind. The tokenizer is not needed: all rows are as long as a row can be.
    """
    core, device = _core_of(model, "find_max_batch_size"), torch.device(model.device)
    eight_bit = optim.endswith("_8bit")
    here = core.weight_bytes() + 2 * 4 * core.adapter_parameter_count()
    limit = _C.parse_bytes("budget", budget) if isinstance(budget, str) else budget
    room = limit if limit is not None else _available(device) + here
    best = _C.largest_batch(core, max_seq_length, room, largest, optimizer_is_8bit=eight_bit, evaluates=True)
    while best > 0:
        fits = _fits(core, device, best, max_seq_length, room - here, eight_bit)
        print(f"Batch size {best}: {'OK' if fits else 'OOM'}")
        if fits:
            break
        best = min(best - 1, best * 9 // 10)
    if best == 0:
        need = _C.plan_model(core, 1, max_seq_length, optimizer_is_8bit=eight_bit, evaluates=True).peak_reserved
        raise MemoryError(
            f"[find_max_batch_size] one row of {max_seq_length} tokens takes {need} bytes; there are {room}, {need - room} too few. "
            "Recompute (gradient_checkpointing_enable), shorten max_seq_length, or lower the rank, in this order."
        )
    print(f"\nMaximum batch size: {best}")
    return best


def _fits(core: _C.CausalLM, device: torch.device, batch: int, length: int, room: int, eight_bit: bool) -> bool:
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        taken = _C.probe_step(core, batch, length, optimizer_is_8bit=eight_bit, evaluates=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            taken = torch.cuda.max_memory_allocated(device) - before
        return taken <= room
    except torch.OutOfMemoryError:
        return False
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
