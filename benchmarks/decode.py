# SPDX-License-Identifier: Apache-2.0
"""Measures greedy decoding on a CPU beside transformers: tokens a second by batch, of 16-bit and of four-bit weights.

    python benchmarks/decode.py [--build build/dev] [--model 1b] [--batches 1 8] [--prompt 16] [--new 33] [--threads 2] [--weights bf16 4bit]

bf16, random weights at the model's shape; four bits are NF4 with double quantization, the peer's bitsandbytes' layers. C++ is the library's
generate(), `generate` transformers' over this library's model, the peer transformers' over its own. A step's time is that of --new tokens less
that of one, over the rest: prompts are not in it. Medians of three, by turns.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time

from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES


def through_generate(model, ids, count):
    """transformers' generate, for that many new tokens of each row."""
    import torch

    with torch.no_grad():
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--model", default="1b", choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=33)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", nargs="+", default=["bf16", "4bit"], choices=["bf16", "4bit"])
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import qlorapp
    import torch
    import transformers
    from qlorapp import _C

    torch.set_num_threads(given.threads)

    def load(library, folder, weights):
        options = {}
        if weights == "4bit":
            options["quantization_config"] = library.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
        return library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()

    def seconds(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def measure(weights, ours, peer):
        core = ours.forward.engine.core
        for batch in given.batches:
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(3, ours.config.vocab_size - 3, (batch, given.prompt), generator=generator)
            runs = {
                "C++": lambda count, ids=ids: _C.generate(core, ids.tolist(), max_new_tokens=count),
                "generate": lambda count, ids=ids: through_generate(ours, ids, count),
                "transformers": lambda count, ids=ids: through_generate(peer, ids, count),
            }
            steps = {who: [] for who in runs}
            for turn in range(4):
                for who, run in runs.items():
                    took = seconds(lambda run=run: run(given.new)) - seconds(lambda run=run: run(1))
                    if turn > 0:
                        steps[who].append(took / (given.new - 1))
            step = {who: statistics.median(times) for who, times in steps.items()}
            for who, time_of_step in step.items():
                line = {"weights": weights, "batch": batch, "who": who, "tokens_s": round(batch / time_of_step, 2)}
                print(json.dumps(line | {"ratio": round(step["transformers"] / time_of_step, 2)}), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_checkpoint(folder, SHAPES[given.model])
        for weights in given.weights:
            measure(weights, load(qlorapp, folder, weights), load(transformers, folder, weights))
            gc.collect()


if __name__ == "__main__":
    main()
