# SPDX-License-Identifier: Apache-2.0
"""Compares training steps whose frozen base waits in host memory with steps whose base is on the GPU.

    python benchmarks/base_on_host_cuda.py [--build build/dev] [--model 70b] [--batches 4 2 1] [--cap 24] [--rounds 2] [--seconds 6]

Random weights in NF4 with double quantization at Llama's real shapes, sequence 2048, r = 16 on all seven linear layers, 8-bit AdamW, bf16, one
optimizer step per micro-batch; each block keeps its input alone. One process measures all of it, in turn:

- resident: the base on the GPU, no cap.
- host: base_on_host and embedding_on_host, with torch's allocator capped at --cap GiB.
- smallest: inputs on the host as well, 512 rows of logits, one workspace at a time, the MLP in tiles of 1,024 rows.

Also measures the bus: a copy of 1 GiB from pinned memory. Prints a table of speeds, ratios to "resident", measured and planned peaks.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

import torch
from train_step_cuda import ROOT, Side, say

DEFAULTS = "loss_chunk_rows=0 weight_workspace=layer mlp_tile_rows=0 embedding_on_host=0 base_on_host=0 cap=0 keep=input_only"
HOST = "embedding_on_host=1 base_on_host=1"
SMALLEST = f"{HOST} keep=input_on_host loss_chunk_rows=512 weight_workspace=stack mlp_tile_rows=1024"


def bus_rate() -> float:
    """Bytes per second from pinned memory; the best of five."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return host.numel() / min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--model", default="70b")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--cap", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; copies from pinned memory at {bus_rate() * 1e-9:.1f} GB/s", flush=True)
    torch.cuda.empty_cache()
    ways = {"resident": "", "host": f"{HOST} cap={given.cap}", "smallest": f"{SMALLEST} cap={given.cap}"}
    results: dict[tuple[int, str], list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(given.build / "benchmarks" / "bench_train_step"), given.model, "1", "2048", "input_on_host", "--serve"]
        side = Side(command, "ours", pathlib.Path(folder), dict(os.environ), 300)
        if not side.ready():
            return 1
        for _ in range(given.rounds):
            for way, words in ways.items():  # moving the base takes seconds, changing the batch does not
                for batch in given.batches:
                    answer = side.ask(f"{given.seconds} {DEFAULTS} batch={batch} {words}")
                    say(f"{way}, batch {batch}: {answer}")
                    results.setdefault((batch, way), []).append(answer)
        side.stop()
    print(
        f"{'batch':>5} {'way':<9} {'ms':>9} {'tokens/s':>9} {'of resident':>12} {'peak GiB':>9} {'planned':>8} {'reserved':>9}"
    )
    medians: dict[tuple[int, str], float] = {}
    for batch in given.batches:
        for way in ways:
            answers = results[batch, way]
            if failed := [answer["error"] for answer in answers if "error" in answer]:
                print(f"{batch:>5} {way:<9} {failed[0]}")
                continue
            medians[batch, way] = statistics.median([step for answer in answers for step in answer["steps_ms"]])
            median, last = medians[batch, way], answers[-1]
            ratio = f"{medians[batch, 'resident'] / median:>11.1%}" if (batch, "resident") in medians else f"{'-':>11}"
            print(
                f"{batch:>5} {way:<9} {median:>9.1f} {batch * 2048 / median * 1e3:>9.0f} {ratio:>12} {last['peak_gib']:>9.2f} "
                f"{last['planned_gib']:>8.2f} {last['reserved_gib']:>9.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
