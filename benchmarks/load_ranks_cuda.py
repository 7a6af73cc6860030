# SPDX-License-Identifier: Apache-2.0
"""Measures the host memory of ranks that load a 16-bit checkpoint with a sharded base.

    python benchmarks/load_ranks_cuda.py [--build build/dev] [--model 8b] [--ranks 2] [--folder FOLDER]

Writes random bf16 weights at Llama's shapes, in shards of at most 5 GB, and runs `qlorapp train --base_sharding full --max_steps 1` under torchrun.
Reads RssAnon and RssShmem of every rank each 5 ms, to the end of the run. A tiny model of the same run shows what CUDA, NCCL, torch and the
tokenizer need by themselves. The difference must be at most the packed base of all ranks, twice the checkpoint's largest tensor, and 1 GiB.

--folder keeps the checkpoints. It must be on a disk: pages of files in /dev/shm count as RssShmem. Default: a folder under TMPDIR.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from load_cuda import nbytes, row_of_tokens, tensors_of, write_checkpoint
from ranks_cuda import free_port
from train_step_peers import SHAPES, Shape

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = Shape(hidden=128, intermediate=256, layers=2, heads=4, head_dim=32, tied=False, kv_heads=2)
GIB = 2**30


def packed_bytes(shape: Shape) -> int:
    """Linear layers in NF4 with double quantization, the rest in bf16."""
    total = 0
    for name, size in tensors_of(shape).items():
        elements = nbytes(size) // 2
        is_packed = "_proj." in name
        total += elements // 2 + elements // 64 + 4 * elements // (64 * 256) if is_packed else nbytes(size)
    return total


def ranks_under(launcher: int, program: pathlib.Path) -> list[int]:
    """Processes of the program whose parent is the launcher."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and (folder / "exe").resolve() == program:
                found.append(int(folder.name))
    return found


def held_bytes(rank: int) -> int:
    """Memory of a process that is no file's; 0 after its end."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{rank}/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return 0


def peak_of(build: pathlib.Path, ranks: int, model: pathlib.Path, work: pathlib.Path) -> int:
    """The highest sum over the ranks."""
    rows, program = work / "rows.jsonl", build.resolve() / "qlorapp"
    rows.write_text((json.dumps(row_of_tokens()) + "\n") * ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port()), "--no-python",
        str(program), "train", "--defaults", "trainer", "--model", str(model), "--data", str(rows), "--output", str(work / "adapter"),
        "--overwrite_output_dir", "true", "--base_sharding", "full", "--max_steps", "1", "--per_device_train_batch_size", "1",
        "--max_length", "2048", "--logging_steps", "1", "--save_strategy", "no", "--target_modules", "all-linear", "--lora_r", "16",
        "--optim", "adamw_8bit", "--bf16", "true", "--device", "cuda",
    ]  # fmt: skip
    peak, found = 0, []
    with (work / "log").open("w+") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log)
        while launcher.poll() is None:
            if len(found) < ranks:
                found = ranks_under(launcher.pid, program)
            peak = max(peak, sum(map(held_bytes, found)))
            time.sleep(0.005)
        if launcher.returncode or not peak:
            log.seek(0)
            sys.exit(log.read()[-3000:] + f"\nthe run of {model} ended with {launcher.returncode}; peak {peak}")
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the checkpoints, which are kept")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        print(f"SKIPPED: {torch.cuda.device_count()} GPUs here, {given.ranks} ranks asked for")
        return 0
    shape = SHAPES[given.model]
    with tempfile.TemporaryDirectory(prefix="qlorapp-load-") as work:
        folder = given.folder or pathlib.Path(work)
        peaks = {}
        for name, size in {"tiny": TINY, given.model: shape}.items():
            if not (folder / name / "config.json").is_file():
                write_checkpoint(folder / name, size)
            peaks[name] = peak_of(given.build, given.ranks, folder / name, pathlib.Path(work))
    base, largest = packed_bytes(shape), max(map(nbytes, tensors_of(shape).values()))
    used, bound = peaks[given.model] - peaks["tiny"], base + 2 * largest + GIB
    print(
        f"{given.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}; RssAnon + RssShmem, highest sum over the ranks"
    )
    print(
        f"{given.model}: {peaks[given.model] / GIB:.3f} GiB; tiny model: {peaks['tiny'] / GIB:.3f} GiB; difference: {used / GIB:.3f} GiB"
    )
    print(f"bound: packed base {base / GIB:.3f} + 2 x largest tensor {largest / GIB:.3f} + 1 = {bound / GIB:.3f} GiB")
    print("the bound holds" if used <= bound else "the bound does NOT hold")
    return 0 if used <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
