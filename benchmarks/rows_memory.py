# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of a training over few and over many rows, which Trainer reads as they are needed.

    PYTHONPATH=build/dev/python python benchmarks/rows_memory.py [--tokens 1e6 1e8] [--length 1024] [--steps 20]

Data sets of random tokens are written to Arrow files first. Then a fresh process for each size and each trainer, ours and transformers', trains the bundled
tiny-llama, with a log entry per step and a checkpoint at the end, and prints its peak resident memory, without the file pages that it has mapped.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

MODEL = pathlib.Path(__file__).parents[1] / "examples/data/tiny-llama"
RUN = """
import sys, threading, time
import datasets, torch, transformers
kind, folder, output, steps = sys.argv[1:5]
import qlorapp
own = (qlorapp if kind == "qlorapp" else transformers)
peak = 0
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.01)
model = qlorapp.AutoModelForCausalLM.from_pretrained({model!r}, quantization_config=qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
data = datasets.load_from_disk(folder)
args = own.TrainingArguments(
    output, max_steps=int(steps), per_device_train_batch_size=1, logging_steps=1, save_steps=int(steps), report_to="none", disable_tqdm=True, use_cpu=True)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
begin = time.perf_counter()
own.Trainer(model, args, train_dataset=data, data_collator=transformers.default_data_collator).train()
print("MEASURED", before, max(peak, anonymous()), time.perf_counter() - begin)
"""


def write_rows(folder: str, rows: int, length: int) -> None:
    import datasets
    import numpy as np

    def made():
        random = np.random.default_rng(1)
        for _ in range(rows):
            ids = random.integers(5, 600, length, dtype=np.int32)
            yield {"input_ids": ids, "labels": ids}

    with tempfile.TemporaryDirectory() as cache:
        kinds = datasets.Features({name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels")})
        datasets.Dataset.from_generator(made, features=kinds, cache_dir=cache).save_to_disk(folder)


def measured(kind: str, folder: str, steps: int) -> tuple[float, float, float]:
    """(before train(), peak) in MiB, and seconds."""
    with tempfile.TemporaryDirectory() as output:
        code = RUN.replace("{model!r}", repr(str(MODEL)))
        done = subprocess.run(
            [sys.executable, "-c", code, kind, folder, output, str(steps)], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(done.stderr)
    _, before, peak, seconds = next(line for line in done.stdout.splitlines() if line.startswith("MEASURED")).split()
    return int(before) / 1024, int(peak) / 1024, float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e8])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(folder, int(tokens) // options.length, options.length)
            for kind in ("qlorapp", "transformers"):
                before, peak, seconds = measured(kind, folder, options.steps)
                print(
                    f"{tokens:.0e} tokens, {kind}: {before:.0f} MiB before train(), {peak - before:.0f} MiB more at its peak, {seconds:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
