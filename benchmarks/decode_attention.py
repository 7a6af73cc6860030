# SPDX-License-Identifier: Apache-2.0
"""Measures attention of one query a row over a cache beside torch's scaled_dot_product_attention and beside reading the cache.

    python benchmarks/decode_attention.py [--build build/dev] [--device cpu] [--rows 1 8] [--keys 128 2048] [--heads 32] [--kv_heads 8]
        [--head_dim 128] [--dtype bfloat16] [--threads 2]

Microseconds and gigabytes of keys and values a second; medians of five, by turns, of calls that go round caches of --spread bytes together, so
that none finds its keys in the processor's cache.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--keys", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spread", type=int, default=2**28)
    given = parser.parse_args()
    import torch

    torch.ops.load_library(str(ROOT / given.build / "libqlorapp.so"))
    torch.set_num_threads(given.threads)
    options = {"device": given.device, "dtype": getattr(torch, given.dtype)}

    def wait():
        if given.device == "cuda":
            torch.cuda.synchronize()

    def seconds(call, copies):
        wait()
        began = time.perf_counter()
        for i in range(copies):
            call(i)
        wait()
        return (time.perf_counter() - began) / copies

    def measure(rows, keys):
        shape = (rows * keys, given.kv_heads, given.head_dim)
        q = torch.randn((rows, given.heads, given.head_dim), **options)
        size = 2 * q.element_size() * rows * keys * given.kv_heads * given.head_dim
        copies = max(2, given.spread // size)
        caches = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(copies)]
        starts = torch.arange(0, rows * keys, keys, device=given.device)
        lengths = torch.full_like(starts, keys)
        scale = given.head_dim**-0.5

        def by_head(slots):
            return slots.view(rows, keys, given.kv_heads, given.head_dim).transpose(1, 2)

        def ours(i):
            return torch.ops.qlorapp.decode_attention(q, *caches[i], starts, lengths, keys, scale, 0)

        def peer(i):
            k, v = map(by_head, caches[i])
            return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True, scale=scale)

        def read(i):
            return [slots.view(torch.float32).sum() for slots in caches[i]]

        difference = (ours(0).float() - peer(0).squeeze(2).float()).abs().max().item()
        runs = {"decode_attention": ours, "scaled_dot_product_attention": peer, "reading": read}
        times = {who: [] for who in runs}
        for turn in range(6):
            for who, call in runs.items():
                took = seconds(call, copies)
                if turn > 0:
                    times[who].append(took)
        least = {who: statistics.median(values) for who, values in times.items()}
        for who, took in least.items():
            line = {"rows": rows, "keys": keys, "who": who, "us": round(took * 1e6, 1), "gb_s": round(size / took / 1e9, 1)}
            print(json.dumps(line | {"ratio": round(least["scaled_dot_product_attention"] / took, 2)}), flush=True)
        print(json.dumps({"rows": rows, "keys": keys, "largest_difference": difference}), flush=True)

    for keys in given.keys:
        for rows in given.rows:
            measure(rows, keys)


if __name__ == "__main__":
    sys.exit(main())
