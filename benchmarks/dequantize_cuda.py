# SPDX-License-Identifier: Apache-2.0
"""Measures four-bit weights on a GPU: dequantize, quantize, and products with few rows, beside bitsandbytes and a copy.

    python benchmarks/dequantize_cuda.py [--build build/dev] [--shapes 28672x4096 14336x4096 4096x4096] [--tokens 1 2 4 8 16 32 64] [--replays 15]

Each figure is the median over replays of a CUDA graph, so it measures kernels without Python. The launches rotate over more memory than L2
holds. The spread is the 10th to 90th percentile of the replays. A graph cannot record quantizing, because bitsandbytes launches it on the legacy
stream. There both sides' launches are queued while the GPU sleeps, and timed from when it wakes. Ours runs in compat mode, because the default
waits for the GPU's check for non-finite values. A dequantized element counts 0.5 + 1/64 + 4/16384 bytes read and 2 written.
"""

import argparse
import pathlib
import statistics
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
BYTES = 2.516
ROTATED = 400e6


def spread(times):
    ordered = sorted(times)
    return statistics.median(times), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def events(function, repeats):
    function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def replayed(launch, count, replays):
    """Microseconds per launch of launch(0), … launch(count - 1) in a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i)
    return spread([time / count for time in events(graph.replay, replays)])


def queued(launch, count, repeats):
    """Microseconds per launch of launch(0), … launch(count - 1) from a full queue."""
    for i in range(count):
        launch(i)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)  # cycles: several milliseconds
        begin.record()
        for i in range(count):
            launch(i)
        end.record()
        assert not begin.query(), "the GPU woke before everything was queued"
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return spread(times)


def copy_rate():
    """GB/s of a copy of 256 MiB, reads plus writes. Far larger copies use another path."""
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / replayed(lambda _: target.copy_(source), 4, 15)[0] * 1e-3


def peer_or_none():
    try:
        from bitsandbytes import functional
    except ImportError:
        print("  bitsandbytes is not installed; no comparison")
        return None
    return functional


class Weight:
    def __init__(self, ops, rows, columns):
        self.packed, scales = ops.quantize_4bit_bnb(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02)
        self.offset = scales.mean()
        self.absmax, self.nested_absmax = ops.quantize_blockwise_bnb(scales - self.offset)
        self.shape = [rows, columns]

    def arguments(self):
        return self.packed, self.absmax, self.nested_absmax, self.offset, self.shape, 64, 256, "nf4"

    def into(self, ops, out):
        ops.dequantize_4bit_stack_(
            out, [self.packed], [self.absmax], [self.nested_absmax], [self.offset], [self.shape[0]], 64, 256, "nf4"
        )

    def state(self, peer):
        table = peer.create_dynamic_map().cuda()
        inner = peer.QuantState(absmax=self.nested_absmax, code=table, blocksize=256, dtype=torch.float32)
        return peer.QuantState(
            absmax=self.absmax,
            shape=torch.Size(self.shape),
            code=peer.get_4bit_type("nf4", device="cuda"),
            blocksize=64,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=self.offset,
            state2=inner,
        )


def measure_dequantize(ops, peer, shape, copy, replays):
    rows, columns = shape
    moved = rows * columns * BYTES
    rotation = max(2, round(ROTATED / moved))
    weights = [Weight(ops, rows, columns) for _ in range(rotation)]
    outs = [torch.empty(rows, columns + 16, device="cuda", dtype=torch.bfloat16) for _ in range(rotation)]
    count = rotation * max(1, 24 // rotation)
    theirs = None
    if peer:
        states, kept = [weight.state(peer) for weight in weights], []

        def launch_theirs(i):  # keeps its results, so that they rotate too
            kept.append(peer.dequantize_4bit(weights[i % rotation].packed, states[i % rotation]))
            del kept[:-rotation]

        theirs = replayed(launch_theirs, count, replays)[0]
    plain = [out.view(-1)[: rows * columns].view(rows, columns) for out in outs]
    for name, targets in (("", plain), (", 16 spare columns", [out[:, :columns] for out in outs])):
        median, low, high = replayed(
            lambda i, targets=targets: weights[i % rotation].into(ops, targets[i % rotation]), count, replays
        )
        rate = moved / median * 1e-3
        note = f"   bitsandbytes {theirs:.2f} us, ratio {theirs / median:.2f}" if theirs else ""
        print(
            f"  dequantize {rows}x{columns}{name:<20} {median:8.2f} us ({low:.2f}-{high:.2f}) {rate:6.0f} GB/s, {rate / copy:.3f} of copy{note}",
            flush=True,
        )


def measure_quantize(ops, peer, shape, replays):
    for dtype in (torch.bfloat16, torch.float32):
        count = max(2, round(ROTATED / (shape[0] * shape[1] * dtype.itemsize)))
        weights = [torch.randn(shape, device="cuda", dtype=dtype) * 0.02 for _ in range(count)]
        median, low, high = queued(lambda i, weights=weights: ops.quantize_4bit_bnb(weights[i]), count, replays)
        note = ""
        if peer:
            theirs = queued(
                lambda i, weights=weights: torch.ops.bitsandbytes.quantize_4bit(weights[i], 64, "nf4", torch.uint8),
                count,
                replays,
            )[0]
            note = f"   bitsandbytes {theirs:.1f} us, ratio {theirs / median:.1f}"
        print(
            f"  quantize {shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.'):<9} {median:8.1f} us ({low:.1f}-{high:.1f}){note}",
            flush=True,
        )


def measure_products(ops, peer, shape, all_tokens, replays):
    rows, columns = shape
    rotation = min(64, max(2, round(120e6 / (rows * columns * 0.516))))
    weights = [Weight(ops, rows, columns) for _ in range(rotation)]
    states = [weight.state(peer) for weight in weights] if peer else []
    dense = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    count = max(rotation, 16)
    for tokens in all_tokens:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)

        def unfused(i, x=x, y=y):
            weights[i % rotation].into(ops, dense)
            torch.mm(x, dense.t(), out=y)

        median, low, high = replayed(
            lambda i, x=x, y=y: ops.linear_4bit_out(y, x, *weights[i % rotation].arguments()), count, replays
        )
        parts = replayed(unfused, count, replays)[0]
        note = ""
        if peer:

            def launch_theirs(i, x=x):
                state = states[i % rotation]
                torch.ops.bitsandbytes.gemm_4bit(
                    x,
                    weights[i % rotation].packed,
                    [rows, columns],
                    state.state2.absmax,
                    64,
                    "nf4",
                    None,
                    state.absmax,
                    state.state2.code,
                    state.offset,
                )

            theirs = replayed(launch_theirs, count, replays)[0]
            note = f"   bitsandbytes {theirs:.2f} us, ratio {theirs / median:.2f}"
        print(
            f"  linear {rows}x{columns} M={tokens:<3} {median:8.2f} us ({low:.2f}-{high:.2f})   dequantize + cuBLAS {parts:.2f} us, "
            f"ratio {parts / median:.2f}{note}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["28672x4096", "14336x4096", "4096x4096", "1024x4096", "4096x14336", "8192x2048", "2048x2048"],
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--replays", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here; nothing measured")
        return
    torch.ops.load_library(str((options.build / "libqlorapp.so").resolve()))
    ops = torch.ops.qlorapp
    copy = copy_rate()
    print(
        f"device {torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy:.0f} GB/s read + written; NF4, block 64, double "
        f"quantization, bf16; median (10th-90th percentile)",
        flush=True,
    )
    peer = peer_or_none()
    shapes = [tuple(int(side) for side in shape.split("x")) for shape in options.shapes]
    for shape in shapes:
        measure_dequantize(ops, peer, shape, copy, options.replays)
    for shape in shapes:
        measure_quantize(ops, peer, shape, options.replays)
    for shape in shapes:
        measure_products(ops, peer, shape, options.tokens, options.replays)


if __name__ == "__main__":
    sys.exit(main())
