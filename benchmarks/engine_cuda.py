# SPDX-License-Identifier: Apache-2.0
"""Measures transformers models over the engine on a GPU: loading, generate(), a step by autograd, and training, beside peers.

    python benchmarks/engine_cuda.py [--build build/dev] [--model 8b] [--folder DIR] [--rounds 5]

The checkpoint has random bf16 weights at the shape of Llama 3.1 8B or Llama 3.2 1B (benchmarks/load_cuda.py writes it). One process runs:

    loading     the C++ loader alone, AutoModelForCausalLM.from_pretrained, and with get_peft_model; medians, the files in the page cache
    generate    greedy, a prompt of 64 tokens, 128 new ones, batch 1 and 8, without adapters: the engine; transformers' forward over the same
                Linear4bit layers; transformers over bitsandbytes' layers if it is installed
    step        forward and backward of 1 x 2048 tokens, r = 16 on all linear layers, everything kept: CausalLM::forward_backward, the engine under
                autograd, transformers' forward over Linear4bit
    training    optimizer steps of the same rows with 8-bit AdamW and clipping, double quantization: Trainer.train() from Python, and
                bench_train_step, which is C++ only, interleaved

Prints device, shape, medians and ratios.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES

NEW_TOKENS, PROMPT, SEQUENCE = 128, 64, 2048


def median_of(rounds: int, work) -> float:
    """Median seconds of a call, after one warm-up call."""
    import torch

    times = []
    for i in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if i == 0:
            times.clear()
    return statistics.median(times)


@contextlib.contextmanager
def transformers_alone(model):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    engine = base.forward.engine
    engine.enabled = False
    try:
        yield
    finally:
        engine.enabled = True


def generate_lines(name: str, model, rounds: int, vocabulary: int) -> dict[int, float]:
    import torch

    rates = {}
    for batch in (1, 8):
        torch.manual_seed(1)
        ids = torch.randint(5, vocabulary - 300, (batch, PROMPT), device="cuda")
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        seconds = median_of(
            rounds, lambda ids=ids, mask=mask, options=options: model.generate(ids, attention_mask=mask, **options)
        )
        rates[batch] = batch * NEW_TOKENS / seconds
        print(f"generate, batch {batch}: {name}: {rates[batch]:.0f} tokens/s", flush=True)
    return rates


def step_lines(model, rounds: int, vocabulary: int) -> None:
    import torch

    ids = torch.randint(5, vocabulary - 300, (1, SEQUENCE), device="cuda")

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    autograd = median_of(rounds, step)
    engine = model.get_base_model().forward.engine
    batch = engine.core.unpad(ids, None, ids)
    scale = torch.tensor(1.0 / SEQUENCE, device="cuda")
    direct = median_of(rounds, lambda: engine.core.forward_backward(batch, scale))
    with transformers_alone(model):
        alone = median_of(1, step)
    rates = [SEQUENCE / s for s in (direct, autograd, alone)]
    print("step: C++ {:.0f}, engine under autograd {:.0f}, transformers over Linear4bit {:.0f} tokens/s".format(*rates))
    print(f"engine/C++ {rates[1] / rates[0]:.3f}  engine/transformers {rates[1] / rates[2]:.2f}", flush=True)
    assert not engine._told - {""}, engine._told


def training_lines(options: argparse.Namespace, folder: pathlib.Path, vocabulary: int, steps: int = 24, warm: int = 6) -> None:
    program = options.build / "benchmarks" / "bench_train_step"
    import peft
    import qlorapp
    import torch
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step in (warm, steps):
                torch.cuda.synchronize()
                times.append(time.perf_counter())

    four_bit = qlorapp.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    rates: dict[str, list[float]] = {"Trainer": [], "C++": []}
    for i in range(2):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bit, device_map="cuda")
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        ids = torch.randint(5, vocabulary - 300, (steps, SEQUENCE)).tolist()
        rows = [{"input_ids": row, "labels": row} for row in ids]
        with tempfile.TemporaryDirectory() as output:
            args = qlorapp.TrainingArguments(
                output, per_device_train_batch_size=1, max_steps=steps, optim="adamw_8bit", bf16=True, logging_strategy="no",
                save_strategy="no", report_to="none", disable_tqdm=True,
            )  # fmt: skip
            times: list[float] = []
            qlorapp.Trainer(peft.get_peft_model(model, lora), args, train_dataset=rows, callbacks=[Clock()]).train()
        rates["Trainer"].append((steps - warm) * SEQUENCE / (times[1] - times[0]))
        del model
        gc.collect()
        torch.cuda.empty_cache()
        if program.is_file():
            done = subprocess.run(
                [program, options.model, "1", str(SEQUENCE), "everything", str(steps)],
                capture_output=True,
                text=True,
                check=True,
            )
            rates["C++"].append(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])
        print(f"training, round {i + 1}: " + ", ".join(f"{name} {r[-1]:.0f}" for name, r in rates.items() if r), flush=True)
    if rates["C++"]:
        best = {name: max(found) for name, found in rates.items()}
        print(f"training: Trainer/C++ {best['Trainer'] / best['C++']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--model", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path.insert(0, str(options.build / "python"))
    import peft
    import qlorapp
    import torch
    import transformers
    from qlorapp import _C

    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    shape = SHAPES[options.model]
    print(
        f"{torch.cuda.get_device_name()}, {options.model}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or pathlib.Path(scratch) / "model"
        if not folder.exists():
            write_checkpoint(folder, shape)
        four_bit = qlorapp.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

        def load_core():
            return _C.load_model(str(folder), compute_dtype=torch.bfloat16, double_quant=False, device=torch.device("cuda"))

        def load():
            return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bit, device_map="cuda")

        core_seconds = median_of(2, load_core)
        gc.collect()
        loaded = median_of(2, load)
        gc.collect()
        seconds = median_of(2, lambda: peft.get_peft_model(load(), config))
        print(
            f"loading: C++ {core_seconds:.2f} s, in Python {loaded:.2f} s ({loaded / core_seconds:.2f}x), trainable by PEFT {seconds:.2f} s "
            f"({seconds / core_seconds:.2f}x)",
            flush=True,
        )
        gc.collect()

        model = load()
        mine = generate_lines("engine", model, options.rounds, shape.vocabulary)
        with transformers_alone(model):
            theirs = generate_lines("transformers over Linear4bit", model, 1, shape.vocabulary)
        print("  ".join(f"engine/transformers, batch {b}: {mine[b] / theirs[b]:.2f}" for b in mine), flush=True)

        step_lines(peft.get_peft_model(model, config), options.rounds, shape.vocabulary)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        training_lines(options, folder, shape.vocabulary)
        if importlib.util.find_spec("bitsandbytes"):
            theirs_config = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
            peer = transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=theirs_config, device_map={"": 0}
            )
            peers = generate_lines("transformers over bitsandbytes", peer, 1, shape.vocabulary)
            print("  ".join(f"engine/bitsandbytes, batch {b}: {mine[b] / peers[b]:.2f}" for b in mine), flush=True)


if __name__ == "__main__":
    main()
