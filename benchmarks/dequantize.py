# SPDX-License-Identifier: Apache-2.0
"""Measures four-bit quantizing, dequantizing and the linear product on the CPU, beside bitsandbytes, memcpy and a dense GEMM.

    python benchmarks/dequantize.py [--build build/dev] [--threads 1 2] [--seconds 0.4]

Elements per second are medians. "DRAM" is a whole 8192x2048 weight, allocated by each call on both sides. "L2" is a panel of it, as in
training. Each instruction set runs in its own process (QLORAPP_CPU_ISA).
"""

import argparse
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS, COLUMNS = 8192, 2048


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def median_seconds(budget, function, *arguments, **named):
    function(*arguments, **named)
    times, end = [], time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        function(*arguments, **named)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def report(what, seconds, elements, note=""):
    print(f"    {what:<44}{elements / seconds / 1e9:>9.3f} G elements/s   {note}", flush=True)


def measure(library, isa, threads, budget):
    import torch

    torch.ops.load_library(library)
    torch.set_num_threads(threads)
    ops = torch.ops.qlorapp
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS) * 0.02
    count = weight.numel()
    packed, absmax = ops.quantize_4bit(weight)
    offset = absmax.mean()
    codes, nested_absmax = ops.quantize_blockwise(absmax - offset)

    seconds = {}
    seconds["quantize"] = median_seconds(budget, ops.quantize_4bit, weight)
    report(f"quantize fp32, {isa}", seconds["quantize"], count)
    target = torch.empty(count)
    copy = median_seconds(budget, target.copy_, weight.flatten())
    rate = 2 * weight.nbytes / copy
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        width = dtype.itemsize
        for where, rows in (("DRAM", ROWS), ("L2", 512 // width)):
            n = rows * COLUMNS
            arguments = (
                packed[: n // 2],
                codes[: n // 64],
                nested_absmax[: -(-n // 64 // 256)],
                offset,
                [rows, COLUMNS],
                64,
                256,
                "nf4",
                dtype,
            )
            took = median_seconds(budget, ops.dequantize_4bit_nested, *arguments)
            moved = n * (width + 0.5 + 1 / 64)
            report(
                f"dequantize {name} {where} {rows}x{COLUMNS}, {isa}",
                took,
                n,
                f"{moved / took / 1e9:6.1f} GB/s, {moved / took / rate:.2f} of memcpy",
            )
            if where == "DRAM":
                seconds[name] = took
    print(f"    {'memcpy':<44}{rate / 1e9:>9.1f} GB/s read + written", flush=True)
    if isa == "best":
        against_peer(torch, ops, weight, seconds, budget)
        against_dense(torch, ops, (packed, codes, nested_absmax, offset), budget)


def against_peer(torch, ops, weight, seconds, budget):
    try:
        from bitsandbytes import functional as peer
    except ImportError:
        print("    bitsandbytes is not installed; no comparison")
        return
    packed, state = peer.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    took = median_seconds(budget, peer.quantize_4bit, weight, quant_type="nf4")
    report("quantize fp32, bitsandbytes", took, weight.numel(), f"ours is {took / seconds['quantize']:.1f} times as fast")
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        name = str(dtype).removeprefix("torch.")
        took = median_seconds(budget, peer.dequantize_4bit, packed, state)
        report(
            f"dequantize {name} DRAM, bitsandbytes", took, weight.numel(), f"ours is {took / seconds[name]:.1f} times as fast"
        )


def against_dense(torch, ops, weight, budget):
    arguments = (*weight, [ROWS, COLUMNS], 64, 256, "nf4")
    for dtype in (torch.float32, torch.bfloat16):
        dense = ops.dequantize_4bit_nested(*arguments, dtype)
        for transpose in (False, True):
            x = torch.randn(256, ROWS if transpose else COLUMNS).to(dtype)
            y = torch.empty(256, COLUMNS if transpose else ROWS, dtype=dtype)
            other = dense if transpose else dense.t()
            bare = median_seconds(budget, torch.mm, x, other, out=y)
            ours = median_seconds(budget, ops.linear_4bit_out, y, x, *arguments, transpose)
            work = 2 * 256 * ROWS * COLUMNS / 1e9
            name = str(dtype).removeprefix("torch.")
            print(
                f"    linear_4bit {name} {'x·W ' if transpose else 'x·Wᵀ'} M=256{'':<16}{work / ours:>9.1f} GFLOP/s   "
                f"dense GEMM {work / bare:.1f}, time {ours / bare:.2f} of it",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.4, help="time spent on each figure")
    parser.add_argument("--isa", help=argparse.SUPPRESS)
    options = parser.parse_args()
    library = str((options.build / "libqlorapp.so").resolve())
    if options.isa:
        measure(library, options.isa, options.threads[0], options.seconds)
        return
    print(f"device cpu: {cpu_name()}, {os.cpu_count()} processors; NF4, block 64, double quantization, {ROWS}x{COLUMNS}")
    for threads in options.threads:
        print(f"  {threads} thread{'s' if threads > 1 else ''}", flush=True)
        for isa in ("scalar", "avx2", "avx512", "best"):
            environment = {**os.environ, "QLORAPP_CPU_ISA": isa}
            command = [
                sys.executable,
                __file__,
                "--isa",
                isa,
                "--build",
                str(options.build),
                "--threads",
                str(threads),
                "--seconds",
                str(options.seconds),
            ]
            subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
