# SPDX-License-Identifier: Apache-2.0
"""Measures nucleus sampling's choice of tokens on a CPU beside transformers' TopPLogitsWarper.

    python benchmarks/top_p.py [--build build/dev] [--rows 1 8] [--vocabulary 128256] [--top_p 0.9] [--threads 1]

Logits are normal, rounded to bfloat16: times 2 ("flat": thousands of tokens stay) and times 8 ("peaked"). Medians of nine, by turns; this
library's time has a copy in it. Asserts that both keep as many tokens, to one that rounding decides.
"""

import argparse
import json
import statistics
import sys
import time

from load_cuda import ROOT


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import qlorapp  # noqa: F401
    import torch
    from qlorapp import _C
    from transformers.generation.logits_process import TopPLogitsWarper

    torch.set_num_threads(given.threads)
    sampling = _C.SamplingOptions(do_sample=True, top_p=given.top_p)
    warper = TopPLogitsWarper(given.top_p)
    for rows in given.rows:
        for name, spread in (("flat", 2), ("peaked", 8)):
            generator = torch.Generator().manual_seed(rows)
            logits = (torch.randn(rows, given.vocabulary, generator=generator) * spread).to(torch.bfloat16).float()
            works = {
                "qlorapp": lambda logits=logits: _C.warped_logits(logits, [], sampling),
                "transformers": lambda logits=logits: warper(None, logits),
            }
            kept = {who: (work() > -torch.inf).sum(-1) for who, work in works.items()}
            assert (kept["qlorapp"] - kept["transformers"]).abs().max() <= 1
            times = {who: [] for who in works}
            for _ in range(9):
                for who, work in works.items():
                    began = time.perf_counter()
                    work()
                    times[who].append(1e3 * (time.perf_counter() - began))
            ms = {who: round(statistics.median(all_), 2) for who, all_ in times.items()}
            line = {"rows": rows, "logits": name, "kept": int(kept["qlorapp"].sum()), "ms": ms}
            print(json.dumps({**line, "ratio": round(ms["transformers"] / ms["qlorapp"], 1)}), flush=True)


if __name__ == "__main__":
    main()
