# SPDX-License-Identifier: Apache-2.0
"""Measures imports, and a script from its start to the end of its first step, in fresh processes, in turn with the peers'.

    python benchmarks/import_time.py [--rounds 7] [--model FOLDER]

`import qlorapp` is beside transformers' behind torch's own import. The scripts load FOLDER in four bits, add adapters and train one step by Trainer:
ours, and that of transformers, PEFT and bitsandbytes; beside them stands a bare `import torch, transformers, peft`. A first, uncounted
process of each warms the page cache.
"""

import argparse
import pathlib
import platform
import re
import statistics
import subprocess
import sys

TIMED = """
import time
begin = time.perf_counter(); import torch
middle = time.perf_counter(); import {name}
print(middle - begin, time.perf_counter() - middle)
"""
BARE = """
import time
begin = time.perf_counter()
import torch, transformers, peft
print(time.perf_counter() - begin)
"""
SCRIPT = """
import time
begin = time.perf_counter()
{imports}
model = AutoModelForCausalLM.from_pretrained({model!r}, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
args = TrainingArguments(output_dir="unused", max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
Trainer(model, args, train_dataset=[dict(input_ids=[3, 4, 5, 6], labels=[3, 4, 5, 6])] * 8).train()
print(time.perf_counter() - begin)
"""
NAMES = "AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments"
OURS = f"from qlorapp import {NAMES}, LoraConfig, get_peft_model"
THEIRS = f"from transformers import {NAMES}\nfrom peft import LoraConfig, get_peft_model"


def printed(code: str) -> list[float]:
    """The numbers in the last line of a fresh process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def slowest(count: int) -> list[str]:
    """qlorapp's modules by their own import time, from -X importtime."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch, qlorapp"], capture_output=True, text=True, check=True
    )
    found = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(qlorapp\S*)", done.stderr)
    return [f"{name} {int(own) / 1000:.1f} ms" for own, name in sorted(found, key=lambda entry: -int(entry[0]))[:count]]


def show(label: str, values: list[float]) -> float:
    middle = statistics.median(values)
    print(f"{label:44} {middle:.3f} s ({min(values):.3f} … {max(values):.3f})")
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default=str(pathlib.Path(__file__).parents[1] / "examples/data/tiny-llama"))
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {options.rounds} rounds, median (least … most)"
    )
    for name in ("qlorapp", "transformers"):
        code = TIMED.format(name=name)
        printed(code)
        pairs = [printed(code) for _ in range(options.rounds)]
        show("torch", [pair[0] for pair in pairs])
        show(f"{name} behind it", [pair[1] for pair in pairs])
    print("of qlorapp:", ", ".join(slowest(6)))
    programs = {
        "import torch, transformers, peft": BARE,
        "qlorapp until its first step": SCRIPT.format(imports=OURS, model=options.model),
        "transformers, PEFT, bitsandbytes until theirs": SCRIPT.format(imports=THEIRS, model=options.model),
    }
    found: dict[str, list[float]] = {label: [] for label in programs}
    for round_number in range(options.rounds + 1):
        for label, code in programs.items():
            (seconds,) = printed(code)
            if round_number > 0:
                found[label].append(seconds)
    bare, ours, theirs = (show(label, values) for label, values in found.items())
    print(f"qlorapp: {ours - bare:.2f} s above the bare import; the peers take {theirs / ours:.2f} times as long")


if __name__ == "__main__":
    main()
