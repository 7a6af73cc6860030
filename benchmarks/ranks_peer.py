# SPDX-License-Identifier: Apache-2.0
"""Worker processes of benchmarks/ranks_cuda.py: transformers + peft + bitsandbytes under DistributedDataParallel.

    [torchrun --nproc-per-node N] benchmarks/ranks_peer.py CHECKPOINT BATCH SEQUENCE ACCUMULATION SECONDS

Gradient checkpointing of each block, AdamW8bit, bfloat16, SDPA; gradients are exchanged with the last micro-batch. Rank 0 prints one line of
JSON: milliseconds per optimizer step, tokens per second of all ranks, peak memory of a rank.
"""

import contextlib
import json
import os
import sys
import time

import bitsandbytes
import torch
import torch.distributed
from train_step_peers import load_hf


def main() -> None:
    checkpoint, batch, sequence, accumulation, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(rank)
    if ranks > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model = load_hf(checkpoint, rank)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if ranks > 1 else model
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
            "way": "hf",
            "ranks": ranks,
            "milliseconds": times[1] * 1e3,
            "tokens_per_second": tokens / times[1],
            "peak_gib": peak,
        }
        print(json.dumps(fields), flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
