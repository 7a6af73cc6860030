# SPDX-License-Identifier: Apache-2.0
"""Training steps on the CPU at Llama-3.2-1B layer shapes: qlorapp beside transformers + peft + bitsandbytes.

    python benchmarks/train_step.py [--layers 2] [--sequence 256] [--steps 5] [--dtype float32 bfloat16] [--checkpointing yes no]

Both sides train the same random model (vocabulary 32,000, r = 16 on all linear layers, NF4 with double quantization, batch 1,
torch's AdamW) on the same tokens, each in its own process, in turn: A B A B. A row is one setting: tokens a second (median of
steps), the spread, the peak of the process's resident memory from before the model is there, and the ratios. Peak memory
includes loading, which both do.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time


def make_model(folder: str, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=2048, rope_theta=500000.0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def memory_mark() -> None:
    """Peak resident memory counts from here."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def peer(args: argparse.Namespace):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = getattr(torch, args.dtype)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    before = memory("VmRSS")
    memory_mark()
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=quantization, dtype=dtype, device_map="cpu")
    if args.checkpointing == "yes":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(tokens) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, before


def ours(args: argparse.Namespace):
    import qlorapp
    import torch

    dtype = getattr(torch, args.dtype)
    quantization = qlorapp.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    before = memory("VmRSS")
    memory_mark()
    model = qlorapp.AutoModelForCausalLM.from_pretrained(args.model, quantization_config=quantization, dtype=dtype)
    if args.checkpointing == "yes":
        model.gradient_checkpointing_enable()
    model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(tokens) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, before


def run_side(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    step, before = (ours if args.side == "ours" else peer)(args)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 32000, (1, args.sequence), generator=generator) for _ in range(args.steps + 2)]
    seconds, losses = [], []
    for tokens in batches:
        begin = time.perf_counter()
        losses.append(step(tokens))
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[2:], "losses": losses, "peak": memory("VmHWM") - before}))


def bare_gemm(threads: int, sequence: int) -> float:
    """GFLOP/s of torch's float32 matrix product at the largest shape of the model."""
    import torch

    torch.set_num_threads(threads)
    x, w = torch.randn(sequence, 2048), torch.randn(8192, 2048)
    rates = []
    for _ in range(8):
        begin = time.perf_counter()
        torch.mm(x, w.t())
        rates.append(2 * sequence * 2048 * 8192 / (time.perf_counter() - begin) / 1e9)
    return sorted(rates)[len(rates) // 2]


def measure(args: argparse.Namespace, model: str, dtype: str, checkpointing: str, environment: dict[str, str]) -> dict:
    results: dict[str, dict] = {"ours": {"seconds": [], "peak": 0.0}, "peer": {"seconds": [], "peak": 0.0}}
    for _ in range(args.rounds):
        for side, result in results.items():
            command = [sys.executable, __file__, "--side", side, "--model", model, "--dtype", dtype, "--checkpointing", checkpointing]
            command += ["--steps", str(args.steps), "--sequence", str(args.sequence), "--threads", str(args.threads)]
            out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
            if out.returncode != 0:
                sys.exit(out.stderr[-2000:])
            one = json.loads(out.stdout.splitlines()[-1])
            result["seconds"] += one["seconds"]
            result["peak"] = max(result["peak"], one["peak"])
            result["loss"] = one["losses"][-1]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", choices=["ours", "peer"])
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", nargs="+", default=["yes", "no"])
    args = parser.parse_args()
    if args.side:
        args.dtype, args.checkpointing = args.dtype[0], args.checkpointing[0]
        run_side(args)
        return
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model_name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    print(f"CPU: {model_name}, {args.threads} threads; bare float32 GEMM {bare_gemm(args.threads, args.sequence):.0f} GFLOP/s")
    print(f"{args.layers} layers of Llama-3.2-1B's shape, vocabulary 32000, sequence {args.sequence}, batch 1, r=16 on all linear layers")
    print("| dtype | checkpointing | ours tok/s (min … max) | peer tok/s (min … max) | ratio | ours MiB | peer MiB | loss ours / peer |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, args.layers)
        for dtype in args.dtype:
            # Without bf16 instructions: oneDNN is told to leave them alone, on both sides.
            for environment in [{}] if dtype == "float32" else [{}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}]:
                for checkpointing in args.checkpointing:
                    results = measure(args, folder, dtype, checkpointing, environment)
                    rates = {s: sorted(args.sequence / t for t in r["seconds"]) for s, r in results.items()}
                    median = {s: r[len(r) // 2] for s, r in rates.items()}
                    cells = [f"{median[s]:.0f} ({rates[s][0]:.0f} … {rates[s][-1]:.0f})" for s in ("ours", "peer")]
                    label = dtype + (" without bf16 instructions" if environment else "")
                    losses = f"{results['ours']['loss']:.4f} / {results['peer']['loss']:.4f}"
                    print(
                        f"| {label} | {checkpointing} | {cells[0]} | {cells[1]} | {median['ours'] / median['peer']:.2f} | "
                        f"{results['ours']['peak']:.0f} | {results['peer']['peak']:.0f} | {losses} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
