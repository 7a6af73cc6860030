# SPDX-License-Identifier: Apache-2.0
"""Measures training on the blocks of a GGUF file beside NF4: milliseconds of forward and backward pass, and memory.

    python benchmarks/gguf_base.py [--build build/dev] [--device cuda] [--layers 8] [--rows 1x512 2x2048] [--types Q4_K_M Q6_K Q8_0 Q4_0] [--rounds 5]

Random weights at the shapes of Llama 3 8B with fewer layers, written once and exported to each type; r = 16 on all linear layers, bf16. The
models take turns, A B C A B C, a few steps each. Prints medians over the rounds and the ratio to NF4's time. On a GPU steps are timed by events.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def write_base(folder, layers, small):
    import torch
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 2048} if small else {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"] // 4, num_hidden_layers=layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny = ROOT / "examples" / "data" / "tiny-llama"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())


def step(model, ids, timer):
    begin = timer()
    model(input_ids=ids, labels=ids).loss.backward()
    end = timer()
    for parameter in model.parameters():
        parameter.grad = None
    return begin, end


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", nargs="+", default=["1x512", "2x2048"])
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q6_K", "Q8_0", "Q4_0"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="shapes that a CPU computes in a second")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import peft
    import qlorapp
    import torch

    cuda = given.device.startswith("cuda")

    def timer():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(begin, end):
        if cuda:
            end.synchronize()
        return begin.elapsed_time(end) if cuda else 1e3 * (end - begin)

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "base"
        write_base(folder, given.layers, given.small)
        models, four_bits = (
            {},
            qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        )
        options = {"dtype": torch.bfloat16, "device_map": given.device}
        for kind in ["nf4", *given.types]:
            name = folder
            if kind != "nf4":
                name = folder.with_name(f"{kind}.gguf")
                began = time.perf_counter()
                qlorapp.export(folder, gguf=name, type=kind)
                print(
                    f"{kind}: exported in {time.perf_counter() - began:.1f} s, {name.stat().st_size / 2**20:.0f} MiB",
                    flush=True,
                )
            before = torch.cuda.memory_allocated() if cuda else 0
            began = time.perf_counter()
            base = qlorapp.AutoModelForCausalLM.from_pretrained(
                name, **options, **({"quantization_config": four_bits} if kind == "nf4" else {})
            )
            loaded = time.perf_counter() - began
            if cuda:
                print(
                    f"{kind}: {(torch.cuda.memory_allocated() - before) / 2**20:.0f} MiB, loaded in {loaded:.1f} s", flush=True
                )
            adapters = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            models[kind] = peft.get_peft_model(base, adapters).train()
        for row in given.rows:
            batch, length = (int(part) for part in row.split("x"))
            ids = torch.randint(3, 600, (batch, length), device=given.device)
            times = {kind: [] for kind in models}
            for turn in range(given.rounds + 1):
                for kind, model in models.items():
                    for i in range(4):
                        marks = step(model, ids, timer)
                        if turn > 0 and i > 0:
                            times[kind].append(milliseconds(*marks))
            medians = {kind: statistics.median(values) for kind, values in times.items()}
            for kind, median in medians.items():
                print(
                    json.dumps({"row": row, "base": kind, "ms": round(median, 2), "of_nf4": round(median / medians["nf4"], 3)}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
