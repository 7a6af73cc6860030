# SPDX-License-Identifier: Apache-2.0
"""Compares textbook checkpointing (every layer, every k-th, √N) with this library's keep policies: memory and time per step.

    python benchmarks/checkpointing.py                                      a small model of 16 layers on the CPU, one minute on two cores
    python benchmarks/checkpointing.py --device cuda                        8B, 1 x 2,048 tokens, less than 90 s on an H200
    python benchmarks/checkpointing.py --model 1b --batch 1 --sequence 512

Uses one process and one random model, with interleaved settings. Prints a Markdown table. "Activations" is the peak memory of the step minus
the memory before it (base, adapters, gradients, optimizer). The lesson's percentages refer to it.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MIB, GIB = 1 << 20, 1 << 30
SETTINGS = {
    "everything": "none",
    "input_only": "every layer",
    "every:2": "every 2nd layer",
    "every:4": "every 4th layer",
    "sqrt": "√N",
    "attention_only": "input and attention output",
    "input_on_host": "every layer, inputs on the host",
}


def device_name(device: str) -> str:
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name()
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores"
    return platform.machine()


def size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def table(rows: list[dict]) -> str:
    none = next(row for row in rows if row["keep"] == "everything")
    lines = [
        "| checkpointing | `checkpoint_keep` | peak | of none | activations | of none | step | time |",
        "|---|---|---|---|---|---|---|---|",
        "| *the lesson: none* | | | | | *100 %* | | *100 %* |",
        "| *the lesson: checkpointing* | | | | | *~30–40 %* | | *+25–35 %* |",
    ]
    for row in rows:
        activations, all_of = row["peak"] - row["rest"], none["peak"] - none["rest"]
        keep = f"`{row['keep']}`" if row["keep"] != "everything" else "`everything`, or no `gradient_checkpointing`"
        cells = [SETTINGS[row["keep"]], keep, size(row["peak"]), f"{row['peak'] / none['peak']:.0%}", size(activations)]
        cells += [
            f"{activations / all_of:.0%}",
            f"{row['seconds'] * 1e3:,.0f} ms",
            f"{row['seconds'] / none['seconds'] - 1:+.1%}",
        ]
        lines.append("| " + " | ".join(cells).replace("%", " %") + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds benchmarks/bench_checkpointing"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["tiny", "1b", "3b", "8b", "70b"], help="default: tiny on a CPU, 8b on a GPU")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, help="default: 1024 on a CPU, 2048 on a GPU")
    parser.add_argument("--rounds", type=int, help="timed steps per setting; default: 5 on a CPU, 9 on a GPU")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    model, length = args.model or ("8b" if on_gpu else "tiny"), args.sequence or (2048 if on_gpu else 1024)
    rounds = args.rounds or (9 if on_gpu else 5)
    program = args.build / "benchmarks" / "bench_checkpointing"
    command = [str(program), args.device, model, str(args.batch), str(length), str(rounds), *SETTINGS]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:  # it has said why
        return result.returncode
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    dtype = "bfloat16" if on_gpu else "float32"
    print(
        f"{device_name(args.device)}; {model}, {args.batch} x {length} tokens, {dtype}, r = 16 on all linear layers, 8-bit AdamW;"
    )
    print(
        f"median of {rounds} steps, spread at most {max(row['high'] / row['low'] - 1 for row in rows):.1%}.\n".replace(
            "%", " %"
        )
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
