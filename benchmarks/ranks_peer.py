# SPDX-License-Identifier: Apache-2.0
"""Worker processes of benchmarks/ranks_cuda.py: transformers + peft + bitsandbytes on several GPUs.

    [torchrun --nproc-per-node N] benchmarks/ranks_peer.py hf CHECKPOINT BATCH SEQUENCE ACCUMULATION SECONDS
    torchrun --nproc-per-node N benchmarks/ranks_peer.py fsdp MODEL BATCH SEQUENCE ACCUMULATION SECONDS [CAP]

hf: DistributedDataParallel. Gradients are exchanged with the last micro-batch.

fsdp: FullyShardedDataParallel with the settings of PEFT's FSDP guide for QLoRA, without its CPU offload: packed weights stored as bfloat16, each
decoder layer and each adapter matrix wrapped apart, use_orig_params=False, layers gathered ahead in the backward pass. Adapters are bfloat16.
Random weights are quantized in place. bitsandbytes' scales stay whole on each GPU. CAP limits torch's allocator to that many GiB after the
weights are sharded.

Both: gradient checkpointing of each block, AdamW8bit, bfloat16, SDPA. Rank 0 prints one line of JSON: milliseconds per optimizer step, tokens
per second of all ranks, peak memory of a rank. A rank that fails prints the error.
"""

import contextlib
import datetime
import json
import os
import sys
import time
import traceback

import bitsandbytes
import torch
import torch.distributed
from train_step_peers import SHAPES, Shape, config_of, load_hf


def random_model(shape: Shape, device: torch.device):
    """A PEFT model with random four-bit weights. No more than one weight is dense at a time."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_of(shape)
    config.use_cache = False
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16).mul_(0.02)

    torch.manual_seed(0)  # the same weights on all ranks
    for block in model.model.layers:
        for path, (out, inner) in shape.linears().items():
            parent, name = path.split(".")
            linear = bitsandbytes.nn.Linear4bit(
                inner,
                out,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                quant_storage=torch.bfloat16,
                device="meta",
            )
            linear.weight = bitsandbytes.nn.Params4bit(
                random(out, inner), quant_type="nf4", quant_storage=torch.bfloat16, module=linear
            ).to(device)  # quantizes
            setattr(block.get_submodule(parent), name, linear)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.is_meta:
            filled = torch.ones_like(weight, device=device) if weight.dim() == 1 else random(*weight.shape)
            module.weight = torch.nn.Parameter(filled, requires_grad=False)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    model.is_loaded_in_4bit = True  # else peft does not accept Linear4bit
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def sharded(model, device: torch.device):
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def is_apart(module: torch.nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        is_adapter = weight is not None and weight.requires_grad and not list(module.children())
        return is_adapter or isinstance(module, LlamaDecoderLayer)

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(is_apart),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=False,
        device_id=device,
    )


def run(way: str, source: str, batch: int, sequence: int, accumulation: int, seconds: float, cap: float) -> None:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if ranks > 1:
        torch.distributed.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(minutes=2))
    model = random_model(SHAPES[source], device) if way == "fsdp" else load_hf(source, rank)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if way == "fsdp":
        wrapped = sharded(model, device)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if ranks > 1 else model
    torch.cuda.empty_cache()
    if cap:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 2**30 / total))
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
    torch.manual_seed(1 + rank)
    window = [torch.randint(0, 128000, (batch, sequence), device="cuda") for _ in range(accumulation)]

    def step() -> None:
        for tokens in window:
            is_last = tokens is window[-1]
            with (
                contextlib.nullcontext() if is_last or ranks == 1 else wrapped.no_sync(),
                torch.autocast("cuda", dtype=torch.bfloat16),
            ):
                (wrapped(input_ids=tokens, labels=tokens).loss / accumulation).backward()
        if way == "fsdp":
            wrapped.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def timed(steps: int) -> float:
        torch.cuda.synchronize()
        if ranks > 1:
            torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        if ranks > 1:
            torch.distributed.barrier()
        return (time.perf_counter() - begin) / steps

    step()
    steps = torch.tensor([max(3, int(seconds / timed(2)))], device="cuda")
    if ranks > 1:
        torch.distributed.broadcast(steps, 0)
    torch.cuda.reset_peak_memory_stats()
    times = sorted(timed((int(steps) + 2) // 3) for _ in range(3))
    if rank == 0:
        tokens = batch * sequence * accumulation * ranks
        peak = torch.cuda.max_memory_allocated() / 2**30
        fields = {
            "way": way,
            "ranks": ranks,
            "milliseconds": times[1] * 1e3,
            "tokens_per_second": tokens / times[1],
            "peak_gib": peak,
        }
        print(json.dumps(fields), flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def main() -> None:
    way, source, batch, sequence, accumulation, seconds, *cap = sys.argv[1:]
    try:
        run(way, source, int(batch), int(sequence), int(accumulation), float(seconds), float(cap[0]) if cap else 0)
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        said = "out of memory" if is_memory else (str(error).strip().splitlines() or [repr(error)])[-1]
        os.write(1, f"\n{json.dumps({'way': way, 'error': said})}\n".encode())  # whole, beside another rank's
        traceback.print_exc()
        os._exit(1)  # NCCL's end would wait for the other ranks


if __name__ == "__main__":
    main()
