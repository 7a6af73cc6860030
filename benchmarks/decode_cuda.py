# SPDX-License-Identifier: Apache-2.0
"""Measures decoding on a GPU, greedy and drawn: tokens a second and milliseconds a step by batch, without and with adapters.

    python benchmarks/decode_cuda.py [--build build/dev] [--model 8b] [--batches 1 8 32 64 128] [--prompt 128] [--new 96] [--adapters none r16]
        [--peer] [--python] [--top_p 0.9]

NF4 with double quantization, bf16, random weights at the model's shape; r = 16 on all linear layers. A step's time is that of --new tokens less
that of half as many, over the rest: prompts are not in it, nor the steps of rows that entered while others waited. What half as many take beside their
steps is the prompts' time; "forward" is a pass without a cache over up to 8 of the same prompts. Medians of three. --python: through transformers'
generate as well. --top_p: through C++ once more, drawn. --peer: transformers over bitsandbytes' layers in the same process.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time

from decode import through_generate
from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES


def seconds(work, rounds=3):
    import torch

    times = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if turn > 0:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--adapters", nargs="+", default=["none", "r16"])
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--top_p", type=float, help="tokens are drawn, at temperature 0.6, of so much probability")
    parser.add_argument("--profile", action="store_true", help="a table of the kernels of some steps")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import peft
    import qlorapp
    import torch
    import transformers
    from qlorapp import _C

    print(torch.cuda.get_device_name(), given.model, f"prompt {given.prompt}", flush=True)

    def ids_of(batch, vocabulary):
        return torch.randint(3, vocabulary - 3, (batch, given.prompt), generator=torch.Generator().manual_seed(1))

    def report(who, adapters, batch, run):
        half = given.new // 2
        short = seconds(lambda: run(half))
        step = (seconds(lambda: run(given.new)) - short) / (given.new - half)
        line = {
            "who": who,
            "adapters": adapters,
            "batch": batch,
            "tokens_s": round(batch / step),
            "step_ms": round(1e3 * step, 2),
            "prompt_tokens_s": round(batch * given.prompt / (short - half * step)),
        }
        print(json.dumps(line), flush=True)

    def report_forward(model, adapters, batch):
        ids = ids_of(batch, model.config.vocab_size).cuda()
        with torch.no_grad():
            took = seconds(lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False))
        line = {"who": "forward", "adapters": adapters, "batch": batch, "prompt_tokens_s": round(ids.numel() / took)}
        print(json.dumps(line), flush=True)

    def of_generate(model, batch):
        ids = ids_of(batch, model.config.vocab_size).cuda()
        return lambda count: through_generate(model, ids, count)

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_checkpoint(folder, SHAPES[given.model])
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        for adapters in given.adapters:
            model = qlorapp.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, device_map="cuda", quantization_config=qlorapp.BitsAndBytesConfig(**four_bits)
            )
            if adapters != "none":
                model = peft.get_peft_model(model, lora)
            model.eval()
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            core = base.forward.engine.core
            with torch.no_grad():
                model(input_ids=torch.tensor([[5]], device="cuda"))
            assert core.has_adapters == (adapters != "none")
            report_forward(model, adapters, min(8, max(given.batches)))
            for batch in given.batches:
                prompts = ids_of(batch, model.config.vocab_size).tolist()
                report(
                    "C++",
                    adapters,
                    batch,
                    lambda count, core=core, prompts=prompts: _C.generate(core, prompts, max_new_tokens=count),
                )
                if given.top_p is not None:
                    drawn = _C.SamplingOptions(do_sample=True, temperature=0.6, top_p=given.top_p)
                    report(
                        "C++, drawn", adapters, batch,
                        lambda count, core=core, prompts=prompts, how=drawn: _C.generate(
                            core, prompts, max_new_tokens=count, sampling=how
                        ),
                    )  # fmt: skip
                if given.python:
                    report("generate", adapters, batch, of_generate(model, batch))
                if given.profile:
                    _C.generate(core, prompts, max_new_tokens=20)
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                        _C.generate(core, prompts, max_new_tokens=20)
                    print(
                        profile.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=70),
                        flush=True,
                    )
            del model, base, core
            gc.collect()
            torch.cuda.empty_cache()
        if given.peer:
            options = {**four_bits, "bnb_4bit_compute_dtype": torch.bfloat16}
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, device_map="cuda", quantization_config=transformers.BitsAndBytesConfig(**options)
            )
            for adapters in given.adapters:
                if adapters != "none":
                    model = peft.get_peft_model(model, lora)
                model.eval()
                for batch in given.batches:
                    report("transformers + bitsandbytes", adapters, batch, of_generate(model, batch))


if __name__ == "__main__":
    main()
