# SPDX-License-Identifier: Apache-2.0
"""Measures the bandwidth of the layer and optimizer operators on a GPU, relative to a copy in the same run.

    python benchmarks/layer_ops_cuda.py [--build build/dev] [--tokens 2048 8192] [--dtype bfloat16] [--replays 20]

Each figure is the median over replays of a CUDA graph with many calls of the operator, over rotating buffers of several times the L2
cache. Then a copy of the same number of bytes is measured in the same way. Attention is in FLOP per second.
"""

import argparse
import itertools
import pathlib
import statistics

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPES = {"1B": (2048, 8192, 32, 8, 64), "8B": (4096, 14336, 32, 8, 128)}  # hidden, intermediate, heads, kv_heads, head_dim


def graph_seconds(calls, replays):
    """Median seconds of one call; one graph runs all `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # its own: attention wants ragged rows to be known there
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[2:])


class Report:
    def __init__(self, replays, l2):
        self.replays, self.l2 = replays, l2

    def sets_of(self, size):
        return max(2, min(64, -(-4 * self.l2 // size)))

    def large_copy(self):
        """GB/s of a copy of 256 MiB, reads plus writes. Far larger copies use another path."""
        a, b = (torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
        return 2**29 / graph_seconds([lambda: a.copy_(b)] * 4, self.replays) / 1e9

    def line(self, name, moved, make, peer=None):
        """Prints one operator. make(i) returns a call on the i-th set of buffers; moved: its bytes read and written."""
        count = self.sets_of(moved)
        calls = [make(i) for i in range(count)]
        took = graph_seconds(calls, self.replays)
        del calls
        half = min(moved // 2 // 16 * 16, 2**28)  # far larger copies take another, slower path
        buffers = [
            (torch.empty(half, dtype=torch.uint8, device="cuda"), torch.empty(half, dtype=torch.uint8, device="cuda"))
            for _ in range(count)
        ]
        copy = graph_seconds([lambda a=a, b=b: a.copy_(b) for a, b in buffers], self.replays)
        del buffers
        rate, copy_rate = moved / took / 1e9, 2 * half / copy / 1e9
        note = ""
        if peer is not None:
            other = graph_seconds([peer(i) for i in range(count)], self.replays)
            note = f"   torch {other * 1e6:8.1f} us, {other / took:.2f}x"
        print(
            f"  {name:<34}{took * 1e6:>9.1f} us {rate:>8.0f} GB/s   copy {copy_rate:>6.0f}   {rate / copy_rate:.2f} of copy{note}",
            flush=True,
        )


def layers(report, tokens, dtype, shape):
    ops = torch.ops.qlorapp
    hidden, intermediate, heads, kv_heads, d = SHAPES[shape]
    e = dtype.itemsize

    def new(*size):
        return torch.randn(*size, dtype=dtype, device="cuda")

    w = new(hidden)
    line = report.line

    def norm(_):
        x, y, rstd = new(tokens, hidden), new(tokens, hidden + 16)[:, :hidden], torch.empty(tokens, device="cuda")
        return lambda: ops.rms_norm.out(x, w, 1e-5, y=y, rstd=rstd)

    def torch_norm(_):
        x = new(tokens, hidden)
        return lambda: torch.nn.functional.rms_norm(x, (hidden,), w, 1e-5)

    def add_norm(_):
        x, r, s, y = (new(tokens, hidden) for _ in range(4))
        rstd = torch.empty(tokens, device="cuda")
        return lambda: ops.add_rms_norm.out(x, r, w, 1e-5, sum=s, y=y, rstd=rstd)

    def norm_backward(_):
        dx, dy, x = (new(tokens, hidden) for _ in range(3))
        rstd = torch.rand(tokens, device="cuda")
        return lambda: ops.rms_norm_backward_(dx, dy, x, w, rstd)

    line(f"rms_norm {tokens}x{hidden}", 2 * tokens * hidden * e, norm, torch_norm)
    line(f"add_rms_norm {tokens}x{hidden}", 4 * tokens * hidden * e, add_norm)
    line(f"rms_norm_backward_ {tokens}x{hidden}", 5 * tokens * hidden * e, norm_backward)

    angles = torch.rand(tokens, d // 2, device="cuda")
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(tokens, device="cuda")
    turned, width = heads + kv_heads, (heads + 2 * kv_heads) * d

    def rope(_):
        x = new(tokens, heads + 2 * kv_heads, d)[:, :turned]
        return lambda: ops.rope_(x, cos, sin, positions)

    def rope_backward(_):
        q, k, v, out = (
            new(tokens, heads, d),
            new(tokens, kv_heads, d),
            new(tokens, kv_heads, d),
            new(tokens, width + 64)[:, :width],
        )
        return lambda: ops.rope_backward_qkv_(out, q, k, v, cos, sin, positions)

    line(f"rope_ {tokens}x{turned}x{d}", 2 * tokens * turned * d * e, rope)
    line(f"rope_backward_qkv_ {tokens}x{width}", 2 * tokens * width * e, rope_backward)

    def gated_activation(_):
        x, h = new(tokens, 2 * intermediate), new(tokens, intermediate + 16)[:, :intermediate]
        return lambda: ops.gated_activation.out(x, h=h)

    def gated_activation_backward(_):
        x, dh = new(tokens, 2 * intermediate + 32)[:, : 2 * intermediate], new(tokens, intermediate)
        return lambda: ops.gated_activation_backward_(dh, x)

    line(f"gated_activation {tokens}x{intermediate}", 3 * tokens * intermediate * e, gated_activation)
    line(f"gated_activation_backward_ {tokens}x{intermediate}", 6 * tokens * intermediate * e, gated_activation_backward)

    def dropout(_):
        x = new(tokens, hidden)
        return lambda: ops.seeded_dropout(x, 0.1, 1, 2, 3)

    line(f"seeded_dropout {tokens}x{hidden}", 2 * tokens * hidden * e, dropout)
    table = new(128256, hidden)
    ids = [torch.randint(128256, (tokens,), device="cuda") for _ in range(64)]
    line(
        f"embedding {tokens}x{hidden}",
        2 * tokens * hidden * e,
        lambda i: lambda: ops.embedding(table, ids[i]),
        lambda i: lambda: torch.nn.functional.embedding(ids[i], table),
    )


def head(tokens, vocabulary, dtype, shape, replays, rate):
    """The chunks' kernel by the profiler. Bytes: the logits read once and written once."""
    ops, width, rows = torch.ops.qlorapp, SHAPES[shape][0], min(tokens, 2048)
    hidden = torch.randn(tokens, width, dtype=dtype, device="cuda")
    weight = 0.02 * torch.randn(vocabulary, width, dtype=dtype, device="cuda")
    targets = torch.randint(vocabulary, (tokens,), device="cuda")

    def call():
        return ops.linear_cross_entropy(hidden, weight, targets, None, True, rows)

    took = graph_seconds([call], replays)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            call()
        torch.cuda.synchronize()
    own = statistics.median(e.device_time for e in profile.events() if "row_kernel" in e.name) / 1e6
    moved = 2 * rows * vocabulary * dtype.itemsize / own / 1e9
    print(
        f"  linear_cross_entropy {tokens}x{width}, V {vocabulary}, chunk {rows}: {took * 1e3:.2f} ms; its own kernel {own * 1e6:.0f} us a chunk, "
        f"{moved:.0f} GB/s, {moved / rate:.2f} of copy ({rate:.0f})",
        flush=True,
    )


def attention(tokens, batch, dtype, shape, replays):
    ops, (_, _, heads, kv_heads, d) = torch.ops.qlorapp, SHAPES[shape]
    length, scale = tokens // batch, d**-0.5
    packed = torch.randn(tokens, heads + 2 * kv_heads, d, dtype=dtype, device="cuda")
    q, k, v = packed.split([heads, kv_heads, kv_heads], 1)
    ragged = sorted({0, tokens, *torch.randint(1, tokens, (7,)).tolist()})
    for name, rows in (("equal", list(range(0, tokens + 1, length))), ("ragged", ragged)):
        out, lse = ops.attention(q, k, v, rows, scale)
        work = sum(2 * (b - a) ** 2 for a, b in itertools.pairwise(rows)) * heads * d
        forward = graph_seconds([lambda rows=rows: ops.attention(q, k, v, rows, scale)] * 4, replays)
        backward = graph_seconds(
            [lambda rows=rows, out=out, lse=lse: ops.attention_backward(out, q, k, v, out, lse, rows, scale)] * 4, replays
        )
        print(
            f"  attention {name}, {len(rows) - 1} rows of {tokens} tokens, d {d}: {forward * 1e6:.0f} us {work / forward / 1e12:.0f} TFLOP/s, "
            f"backward {backward * 1e6:.0f} us {2.5 * work / backward / 1e12:.0f} TFLOP/s",
            flush=True,
        )


def optimizer(report, shape):
    ops, n = torch.ops.qlorapp, {"1B": 11_272_192, "8B": 41_943_040}[shape]
    inverse = torch.ones((), device="cuda")

    def arena(eight_bit):
        p, g = torch.randn(n, device="cuda"), 1e-3 * torch.randn(n, device="cuda")
        if not eight_bit:
            return p, g, [torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")]
        state = [torch.full((n,), 127, dtype=torch.uint8, device="cuda"), torch.zeros(n, dtype=torch.uint8, device="cuda")]
        return p, g, [*state, torch.zeros(-(-n // 256), device="cuda"), torch.zeros(-(-n // 256), device="cuda")]

    def step(eight_bit):
        op = ops.adamw_8bit_ if eight_bit else ops.adamw_

        def make(_):
            p, g, state = arena(eight_bit)
            _, found_inf, multiplier = ops.gradient_norm(g, inverse, 1.0)
            for t in range(1, 4):
                op(p, g, *state, t, 1e-3, 0.9, 0.999, 1e-8, 0.0, multiplier, found_inf)
            return lambda: op(p, g, *state, 4, 1e-3, 0.9, 0.999, 1e-8, 0.0, multiplier, found_inf)

        return make

    def norm(_):
        g = torch.randn(n, device="cuda")
        return lambda: ops.gradient_norm(g, inverse, 1.0)

    report.line(f"gradient_norm {n}", 4 * n, norm)
    report.line(f"adamw_ {n}", 28 * n, step(False))
    report.line(f"adamw_8bit_ {n}", 16 * n, step(True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--replays", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    torch.ops.load_library(str((options.build / "libqlorapp.so").resolve()))
    torch.manual_seed(0)
    gpu, dtype = torch.cuda.get_device_properties(0), getattr(torch, options.dtype)
    print(
        f"device {gpu.name}, {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}, {options.dtype}; medians of "
        f"{options.replays} graph replays"
    )
    report = Report(options.replays, gpu.L2_cache_size)
    for shape in options.shapes:
        for tokens in options.tokens:
            print(f"{shape}, {tokens} tokens", flush=True)
            layers(report, tokens, dtype, shape)
            for vocabulary in (32000, 128256, 151936):
                head(tokens, vocabulary, dtype, shape, options.replays, report.large_copy())
            if dtype != torch.float32:
                attention(tokens, max(1, tokens // 2048), dtype, shape, options.replays)
        print(f"{shape}, optimizer", flush=True)
        optimizer(report, shape)


if __name__ == "__main__":
    main()
