# SPDX-License-Identifier: Apache-2.0
"""Compares training on two GPUs of one machine with training on one, with the base whole on each GPU and sharded over them.

    python benchmarks/ranks_cuda.py [--build build/dev] [--runs 8b:4:1 1b:4:4 70b:4:1] [--low-memory 70b] [--cap 24] [--seconds 12] [--peers]

A run is MODEL:BATCH:ACCUMULATION, per GPU. Random weights in NF4 with double quantization at Llama's real shapes, sequence 2048, r = 16 on all
seven linear layers, 8-bit AdamW, bf16; each block keeps its input alone. For each run: one process with the whole base, then one process per
GPU with the whole base on each and sharded (base_sharding=full), in turn.

--low-memory: batch 1 with the base sharded, inputs and embedding on the host, 512 rows of logits, one workspace at a time, the MLP in tiles of
1,024 rows, and torch's allocator capped at --cap GiB per GPU.

--peers: each run with transformers + peft + bitsandbytes, too: on one GPU and under DistributedDataParallel (but 70b, whose checkpoint would have
to be written first), and with the base sharded by FullyShardedDataParallel ("fsdp"). Also the runs of --low-memory under FSDP, with the same cap
and, if that fails, without. A peer that fails gets a row with its error.

--trace FILE: rank 0 records two steps of each way of the first run on all GPUs: "x.json" becomes "x.whole.json" and "x.sharded.json".
scripts/make_overlap_picture.py draws them.

Prints the bytes per second that a rank receives when packed blocks are gathered, then tokens per second, "of N" (divided by N times one GPU's),
"of whole" (divided by ours with the whole base on each GPU), and measured and planned peaks of a rank.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALLEST = ["embedding_on_host=1", "loss_chunk_rows=512", "weight_workspace=stack", "mlp_tile_rows=1024"]


def free_port() -> int:
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def measured(program: list[str], ranks: int, words: list[str]) -> list[dict]:
    command = [*program, *words]
    if ranks > 1:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port()), "--no-python"]
        command = [sys.executable, "-m", *launcher, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
    return lines


def measured_peer(way: str, ranks: int, words: list[str]) -> list[dict]:
    """The lines of ranks_peer.py, or one line with the first error."""
    lines = measured([sys.executable, str(ROOT / "benchmarks" / "ranks_peer.py"), way], ranks, words)
    errors = [line for line in lines if "error" in line]
    return errors[:1] or lines or [{"way": way, "error": "ended without a result"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--runs", nargs="*", default=["8b:4:1", "1b:4:4", "70b:4:1"])
    parser.add_argument("--low-memory", nargs="*", default=["70b"])
    parser.add_argument("--cap", type=float, default=24)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--trace", type=pathlib.Path)
    given = parser.parse_args()
    program = [str(given.build / "benchmarks" / "bench_ranks")]
    if given.trace:
        given.trace.parent.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    print(f"{gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if gpus > 1:
        for found in measured(program, gpus, ["8b", "1", "2048", "input_only", "1", "1", "rate"]):
            rate = found["bytes_per_second"] * 1e-9
            print(
                f"rate: each of {gpus} ranks receives {rate:.1f} GB/s when it gathers {found['megabytes']:.0f} MB", flush=True
            )
    print(
        f"{'run':<12} {'way':<12} {'ms':>9} {'tokens/s':>9} {'of N':>7} {'of whole':>9} {'peak GiB':>9} {'planned':>8} {'loss':>10}"
    )

    def row(run: str, found: dict, one: float = 0, whole: float = 0) -> None:
        if "error" in found:
            print(f"{run:<12} {found['way']:<12} {found['error']}", flush=True)
            return
        speed = found["tokens_per_second"]
        of_n = f"{speed / (one * found['ranks']):.1%}" if one else "-"
        of_whole = f"{speed / whole:.1%}" if whole else "-"
        print(
            f"{run:<12} {found['way'] + ' x' + str(found['ranks']):<12} {found['milliseconds']:>9.1f} {speed:>9.0f} {of_n:>7} {of_whole:>9} "
            f"{found['peak_gib']:>9.3f} {found.get('planned_gib', math.nan):>8.3f} {found.get('loss', math.nan):>10.6f}",
            flush=True,
        )

    for run in given.runs:
        model, batch, accumulation = run.split(":")
        words = [model, batch, "2048", "input_only", accumulation, str(given.seconds)]
        one = whole = 0.0
        for found in measured(program, 1, [*words, "whole"]):
            one = found.get("tokens_per_second", 0)
            row(run, found)
        traced = [f"trace={given.trace.resolve()}"] if given.trace and run == given.runs[0] else []
        for found in measured(program, gpus, [*words, "whole", "sharded", *traced]):
            row(run, found, one, whole)
            whole = whole or found.get("tokens_per_second", 0)
        numbers = [batch, "2048", accumulation, str(given.seconds)]
        if given.peers and model != "70b":
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = f"{folder}/{model}"
                script = ROOT / "benchmarks" / "train_step_peers.py"
                subprocess.run([sys.executable, script, "checkpoint", model, checkpoint], check=True)
                alone = 0.0
                for ranks in (1, gpus):
                    for found in measured_peer("hf", ranks, [checkpoint, *numbers]):
                        row(run, found, alone, whole if ranks == gpus else 0)
                        alone = alone or found.get("tokens_per_second", 0)
        if given.peers and gpus > 1:
            for found in measured_peer("fsdp", gpus, [model, *numbers]):
                row(run, found, 0, whole)
    for model in given.low_memory:
        words = [model, "1", "2048", "input_on_host", "1", str(given.seconds), "sharded", f"cap={given.cap}", *SMALLEST]
        for found in measured(program, gpus, words):
            row(f"{model} {given.cap:g} GiB", found)
        if given.peers and gpus > 1:
            numbers = [model, "1", "2048", "1", str(given.seconds)]
            capped = measured_peer("fsdp", gpus, [*numbers, str(given.cap)])
            for found in capped:
                row(f"{model} {given.cap:g} GiB", found)
            if "error" in capped[0]:
                for found in measured_peer("fsdp", gpus, numbers):
                    row(f"{model} no cap", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
