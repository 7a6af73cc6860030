# SPDX-License-Identifier: Apache-2.0
"""Measures training steps on the CPU at Llama-3.2-1B layer shapes: qlorapp, and transformers + peft + bitsandbytes.

    python benchmarks/train_step.py [--layers 2] [--sequence 256] [--steps 5] [--dtype float32 bfloat16] [--checkpointing yes no]
                                    [--families Llama Qwen3 Gemma3]

Both sides train the same random model of a family (these shapes, vocabulary 32,000, r = 16 on all linear layers, NF4 with double quantization, batch 1,
torch's AdamW) on the same tokens, each in its own process, interleaved: A B A B. A row is one setting: tokens per second (median of
steps), the spread, the peak of the process's resident memory above that before the model, and the ratios. Peak memory includes loading
on both sides.

The share of GEMM and attention is the time of one step's products and attention alone over the median step: torch.mm on dense matrices of
the same shapes, and the attention operator, timed in our own process after its steps. On a CPU without 16-bit products the frozen weights'
products are float32 GEMMs, as ours are. The adapters' products are thin and memory-bound; the share without them is in brackets.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time


def make_model(folder: str, layers: int, family: str = "Llama") -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    kind(config).to(torch.bfloat16).save_pretrained(folder)


def memory_mark() -> None:
    """Starts the measurement of peak resident memory."""
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
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.config.use_cache = False
    model.train()
    return model, before


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
    model = qlorapp.get_peft_model(
        model, qlorapp.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    model.train()
    return model, before


def has_bf16_instructions() -> bool:
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def seconds_of(function, *arguments, repeat: int = 5, **named) -> float:
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        function(*arguments, **named)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def products_and_attention(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of one step's GEMMs and attention alone: (of the frozen weights, of the adapters)."""
    import torch

    bf16_instructions = args.bf16_instructions == "yes"
    dtype = getattr(torch, args.dtype) if bf16_instructions else torch.float32
    tokens, hidden, intermediate, kv, vocabulary = args.sequence, 2048, 8192, 512, 32000

    def forward(out: int, inner: int) -> float:
        return seconds_of(torch.mm, torch.randn(tokens, inner, dtype=dtype), torch.randn(out, inner, dtype=dtype).t())

    def backward(out: int, inner: int) -> float:
        return seconds_of(torch.mm, torch.randn(tokens, out, dtype=dtype), torch.randn(out, inner, dtype=dtype))

    def adapter(out: int, inner: int, rank: int = 16) -> tuple[float, float]:
        """Seconds of the adapter's two forward and four backward products."""
        own = getattr(torch, args.dtype)
        x, y, u = (torch.randn(tokens, width, dtype=own) for width in (inner, out, rank))
        a, b = torch.randn(rank, inner, dtype=own), torch.randn(out, rank, dtype=own)
        there = seconds_of(torch.mm, x, a.t()) + seconds_of(torch.addmm, y, u, b.t(), out=y)
        back = seconds_of(torch.mm, y, b) + seconds_of(torch.addmm, x, u, a, out=x)
        return there, back + seconds_of(torch.mm, y.t(), u) + seconds_of(torch.mm, u.t(), x)

    shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (intermediate, hidden), (intermediate, hidden)]
    down = (hidden, intermediate)
    again = sum(forward(*shape) for shape in shapes)  # a recompute stops before down_proj
    layer = again + forward(*down) + sum(backward(*shape) for shape in [*shapes, down])
    q, k, v = (torch.randn(tokens, heads, 64, dtype=getattr(torch, args.dtype)) for heads in (32, 8, 8))
    row = [0, tokens]
    ops = torch.ops.qlorapp
    attention = seconds_of(ops.attention, q, k, v, row, 0.125)
    out, lse = ops.attention(q, k, v, row, 0.125)
    layer += attention + seconds_of(ops.attention_backward, q, q, k, v, out, lse, row, 0.125)
    adapters = [adapter(*shape) for shape in [*shapes, down]]
    thin = sum(there + back for there, back in adapters)
    if args.checkpointing == "yes":
        layer += again + attention
        thin += sum(there for there, _ in adapters[:-1])
    return layer * args.layers + forward(vocabulary, hidden) + backward(vocabulary, hidden), thin * args.layers


def run_side(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    model, before = (ours if args.side == "ours" else peer)(args)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(tokens) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 32000, (1, args.sequence), generator=generator) for _ in range(args.steps + 2)]
    seconds, losses = [], []
    for tokens in batches:
        begin = time.perf_counter()
        losses.append(step(tokens))
        seconds.append(time.perf_counter() - begin)
    peak = memory("VmHWM") - before
    products = products_and_attention(args) if args.side == "ours" else (0.0, 0.0)
    print(json.dumps({"seconds": seconds[2:], "losses": losses, "peak": peak, "products": products}))


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
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--model",
                model,
                "--dtype",
                dtype,
                "--checkpointing",
                checkpointing,
            ]
            command += ["--steps", str(args.steps), "--sequence", str(args.sequence), "--threads", str(args.threads)]
            command += [
                "--layers",
                str(args.layers),
                "--bf16-instructions",
                "no" if environment or not has_bf16_instructions() else "yes",
            ]
            out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
            if out.returncode != 0:
                sys.exit(out.stderr[-2000:])
            one = json.loads(out.stdout.splitlines()[-1])
            result["seconds"] += one["seconds"]
            result["peak"] = max(result["peak"], one["peak"])
            result["loss"] = one["losses"][-1]
            wide, thin = (seconds / median(one["seconds"]) for seconds in one["products"])
            result.setdefault("share", []).append(wide + thin)
            result.setdefault("wide share", []).append(wide)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", choices=["ours", "peer"])
    parser.add_argument("--model")
    parser.add_argument("--bf16-instructions", choices=["yes", "no"], default="yes")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", nargs="+", default=["yes", "no"])
    parser.add_argument("--families", nargs="+", default=["Llama"])
    args = parser.parse_args()
    if args.side:
        args.dtype, args.checkpointing = args.dtype[0], args.checkpointing[0]
        run_side(args)
        return
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model_name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    print(f"CPU: {model_name}, {args.threads} threads; bare float32 GEMM {bare_gemm(args.threads, args.sequence):.0f} GFLOP/s")
    print(
        f"{args.layers} layers of Llama-3.2-1B's shape, vocabulary 32000, sequence {args.sequence}, batch 1, r=16 on all linear layers"
    )
    print(
        "| family | dtype | checkpointing | ours tok/s (min … max) | peer tok/s (min … max) | ratio | GEMM and attention | ours MiB | peer MiB | loss ours / peer |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for family in args.families:
        measure_family(args, family)


def measure_family(args: argparse.Namespace, family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, args.layers, family)
        for dtype in args.dtype:
            # Without bf16 instructions: oneDNN is told to leave them alone, on both sides.
            for environment in (
                [{}] if dtype == "float32" or not has_bf16_instructions() else [{}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}]
            ):
                for checkpointing in args.checkpointing:
                    results = measure(args, folder, dtype, checkpointing, environment)
                    rates = {s: sorted(args.sequence / t for t in r["seconds"]) for s, r in results.items()}
                    middle = {s: median(r) for s, r in rates.items()}
                    cells = [f"{middle[s]:.0f} ({rates[s][0]:.0f} … {rates[s][-1]:.0f})" for s in ("ours", "peer")]
                    without = dtype == "bfloat16" and (environment or not has_bf16_instructions())
                    label = dtype + (" without bf16 instructions" if without else "")
                    losses = f"{results['ours']['loss']:.4f} / {results['peer']['loss']:.4f}"
                    print(
                        f"| {family} | {label} | {checkpointing} | {cells[0]} | {cells[1]} | {middle['ours'] / middle['peer']:.2f} | "
                        f"{median(results['ours']['share']):.0%} ({median(results['ours']['wide share']):.0%}) | "
                        f"{results['ours']['peak']:.0f} | {results['peer']['peak']:.0f} | {losses} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
