# SPDX-License-Identifier: Apache-2.0
"""Measures the products of few rows with the four-bit layers of a block: microseconds, and the share of the memory's rate.

    python benchmarks/group_products_cuda.py [--build build/dev] [--rows 1 8 32 64 128] [--rank 16] [--only gate_up]

The groups of Llama 3 8B: q|k|v, o, gate|up, down; NF4 with double quantization, bf16. Each call has other weights, more than the caches hold; calls
follow each other in a CUDA graph. Beside it a dense product of the same shape in bf16 (cuBLAS).
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
GROUPS = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))}
RATES = {"H100": 3.35e12, "H200": 4.8e12}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=list(GROUPS))
    parser.add_argument("--once", action="store_true", help="a call each, for a profiler")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import torch
    from qlorapp import _C

    name = torch.cuda.get_device_name()
    rate = next((rate for card, rate in RATES.items() if card in name), 3.35e12)
    print(name)
    quantizer = _C.Quantizer(double_quant=True)
    total = dict.fromkeys(given.rows, 0.0)
    for group in given.only:
        columns, heights = GROUPS[group]
        bytes_each = sum(heights) * columns * (0.5 + 1 / 64)
        copies = 1 if given.once else max(2, int(2e8 / bytes_each))
        sets = []
        for _ in range(copies):
            weights = [quantizer.quantize(torch.randn(height, columns, device="cuda") / 64) for height in heights]
            sets.append(
                [[getattr(w, part) for w in weights] for part in ("packed", "absmax", "nested_absmax", "nested_offset")]
            )
        b = [torch.randn(height, given.rank, device="cuda", dtype=torch.bfloat16) for height in heights]
        dense = torch.randn(sum(heights), columns, device="cuda", dtype=torch.bfloat16)
        for rows in given.rows:
            x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            a = torch.randn(given.rank * len(heights), columns, device="cuda", dtype=torch.bfloat16) if given.rank else None
            y = torch.empty(rows, sum(heights), device="cuda", dtype=torch.bfloat16)

            def ours(x=x, y=y, a=a, sets=sets, heights=heights, b=b):
                for lists in sets:
                    torch.ops.qlorapp.linear_4bit_group_(
                        y, x, *lists, list(heights), 64, 256, "nf4", None, a, b, [1.0] * len(heights)
                    )

            if given.once:
                ours()
                torch.cuda.synchronize()
                continue

            def theirs(x=x, dense=dense, copies=copies):
                for _ in range(copies):
                    torch.mm(x, dense.T)

            times = []
            for work in (ours, theirs):
                work()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    work()
                best = []
                for _ in range(5):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(4):
                        graph.replay()
                    end.record()
                    end.synchronize()
                    best.append(begin.elapsed_time(end) * 1e3 / 4 / copies)
                times.append(sorted(best)[2])
            total[rows] += times[0]
            line = {"group": group, "rows": rows, "us": round(times[0], 1), "of_memory": round(bytes_each / rate * 1e6 / times[0], 2),
                    "dense_us": round(times[1], 1)}  # fmt: skip
            print(json.dumps(line), flush=True)
    print(json.dumps({"a_block_us": {rows: round(us, 1) for rows, us in total.items()}}))


if __name__ == "__main__":
    main()
