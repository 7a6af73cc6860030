# SPDX-License-Identifier: Apache-2.0
"""Measures what transformers' training loop costs around the steps that C++ computes.

    python benchmarks/loop_overhead.py [--build build/dev] [--models deep small 1b 8b] [--batches 1 2] [--device cpu|cuda] [--rounds 3]

Both train the same rows of random tokens (2,048 each on a GPU, 256 on a CPU, 16 for "deep"), r = 16 on all linear layers, NF4 with double quantization,
8-bit AdamW, clipping, nothing checkpointed, interleaved in one process:

    trainer  qlorapp.Trainer, with a log entry every tenth step
    alone    the same windows given to C++ one after the other, already unpadded, and read every tenth step

"deep" has the modules of Llama 3.2 1B and next to no arithmetic: there the time is the host's. Prints the milliseconds of a step, median (least),
the ratio, and the largest relative difference of the mean losses of ten steps.
"""

import argparse
import gc
import pathlib
import statistics
import sys
import tempfile
import time

from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES, Shape

OWN_SHAPES = {
    "small": Shape(1024, 2816, 2, 16, 64, True, vocabulary=32000),
    "deep": Shape(64, 128, 16, 4, 16, True, 2, vocabulary=512),
}


def adapted_model(folder: pathlib.Path, options: argparse.Namespace):
    import peft
    import qlorapp
    import torch

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    four_bit = qlorapp.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bit, device_map=options.device, dtype=dtype
    )
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def arguments(output: str, batch: int, options: argparse.Namespace):
    import qlorapp

    on_gpu = options.device == "cuda"
    return qlorapp.TrainingArguments(
        output, per_device_train_batch_size=batch, max_steps=options.steps, optim="adamw_8bit", bf16=on_gpu, use_cpu=not on_gpu,
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True, gradient_accumulation_steps=options.accumulation,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip


def read_clock(options: argparse.Namespace) -> float:
    import torch

    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def by_trainer(folder: pathlib.Path, rows: list, batch: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """(seconds of a step, mean losses of ten steps)"""
    import qlorapp
    import transformers

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step in (options.warm, options.steps):
                times.append(read_clock(options))

    Clock.__module__ = "transformers.clock"  # behind other callbacks a window looks at the modules, which takes 2 ms here
    with tempfile.TemporaryDirectory() as output:
        trainer = qlorapp.Trainer(
            adapted_model(folder, options), arguments(output, batch, options), train_dataset=rows,
            data_collator=transformers.default_data_collator, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return (times[1] - times[0]) / (options.steps - options.warm), losses


def alone(folder: pathlib.Path, rows: list, batch: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The same of C++."""
    import transformers
    from qlorapp import _C
    from qlorapp.hf import passes, pristine
    from qlorapp.hf.forward import engine_of
    from qlorapp.hf.training_arguments import for_cpp

    model = adapted_model(folder, options)
    base = model.get_base_model()
    engine = engine_of(base)
    with tempfile.TemporaryDirectory() as output:
        args = arguments(output, batch, options)
    if reason := pristine.why_not(engine, base, needs_gradients=True):  # this call moves the adapter into C++'s memory
        sys.exit(reason)
    engine.keep(passes.kept_by(base, engine.core.body, training=True))
    runner = _C.StepRunner(engine.core, for_cpp(args, batch))
    engine.follow()
    batches = [
        passes.unpadded(engine.core, transformers.default_data_collator(rows[i : i + batch]), on_host=True)
        for i in range(0, len(rows), batch)
    ]
    begin, losses, total = 0.0, [], 0.0
    for step in range(1, options.steps + 1):
        runner.gradients(batches[(step - 1) * options.accumulation : step * options.accumulation], lambda: False)
        total = total + runner.mean_loss
        runner.update(args.learning_rate)
        if step % args.logging_steps == 0:
            runner.read()
            losses.append(float(total) / args.logging_steps)
            total = 0.0
        if step == options.warm:
            begin = read_clock(options)
    return (read_clock(options) - begin) / (options.steps - options.warm), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--models", nargs="+", default=["deep", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--warm", type=int, default=6)
    options = parser.parse_args()
    sys.path.insert(0, str(options.build / "python"))
    import torch
    import transformers

    print(
        f"{options.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for name in options.models:
        shape = OWN_SHAPES.get(name) or SHAPES[name]
        length = 16 if name == "deep" else 2048 if options.device == "cuda" else 256
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "model"
            write_checkpoint(folder, shape)
            for batch in options.batches:
                count = options.steps * batch * options.accumulation
                torch.manual_seed(1)
                ids = torch.randint(5, shape.vocabulary - 100, (count, length)).tolist()
                rows = [{"input_ids": row, "labels": row} for row in ids]
                seconds: dict[str, list[float]] = {"trainer": [], "alone": []}
                losses = {}
                for _ in range(options.rounds):
                    for measured in (by_trainer, alone):
                        kind = "alone" if measured is alone else "trainer"
                        took, losses[kind] = measured(folder, rows, batch, options)
                        seconds[kind].append(took)
                        gc.collect()
                        if options.device == "cuda":
                            torch.cuda.empty_cache()
                apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
                found = {kind: statistics.median(values) for kind, values in seconds.items()}
                line = ", ".join(f"{kind} {1000 * s:.2f} ({1000 * min(seconds[kind]):.2f}) ms" for kind, s in found.items())
                print(
                    f"{name}, {batch} x {length}, {options.accumulation} a step: {line}; trainer/alone {found['trainer'] / found['alone']:.3f}; "
                    f"losses differ by {apart:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
