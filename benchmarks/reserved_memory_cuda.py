# SPDX-License-Identifier: Apache-2.0
"""Compares reserved with allocated memory below a cap: 8B, with fixed and with expandable segments.

    python benchmarks/reserved_memory_cuda.py [--build build/dev] [--caps 16 7 24 12 10 8 20] [--steps 20] [--fixed_steps 2] [--seconds 470]

Writes a checkpoint of random bf16 weights at the shape of Llama 3.1 8B (--model 1b: of Llama 3.2 1B) into /dev/shm (--folder keeps it). Every
measurement runs in its own process (bench_reserved_memory), with the allocator capped from the start. It loads the checkpoint in four bits, adds
adapters (r = 16 on all linear layers), and trains with qlorapp's Trainer, 4 rows of 2,048 tokens per step:

    memory_budget    memory_budget's choice, at every cap
    find             the planned largest batch of rows of --find_sequence tokens below the largest cap, for each policy of --find
    long             one row of --long tokens, input_on_host, below the largest cap

each with PYTORCH_ALLOC_CONF=expandable_segments:False (fewer steps: the first shows whether memory runs out) and without the variable, the
library's default. The Trainer splits a step that does not fit: "parts" counts those warnings. "retries" counts how often the allocator freed its
cache and tried again. Exits 1 if a default run has parts, an error or too few steps, or reserves more than its allocations + 2 % + 64 MiB.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from load_cuda import write_checkpoint
from train_step_peers import SHAPES

ROOT = pathlib.Path(__file__).resolve().parents[1]
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(program: pathlib.Path, folder: pathlib.Path, words: dict[str, object], fixed: bool, seconds: float) -> dict:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if fixed:
        environment[VARIABLES[0]] = "expandable_segments:False"
    command = [str(program), str(folder), *(f"{name}={value}" for name, value in words.items())]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": said[-1] if said else f"exit code {done.returncode}"}


def is_good(answer: dict, steps: int) -> bool:
    if answer.get("error") or answer["parts"] or answer["steps"] < steps:
        return False
    return answer["reserved_gib"] <= answer["allocated_gib"] * 1.02 + 64 / 1024


def row(name: str, cap: float, answer: dict) -> str:
    if "steps" not in answer:
        return f"| {name} | {cap:g} | | | | | | | {answer['error']} |"
    over = answer["reserved_gib"] - answer["allocated_gib"]
    cells = [
        name, f"{cap:g}", "expandable" if answer["expandable"] else "fixed", answer["chosen"].split(": ", 1)[-1],
        f"{answer['allocated_gib']:.2f}", f"{answer['reserved_gib']:.2f} (+{over * 1024:.0f} MiB, {over / answer['allocated_gib']:.1%})",
        f"{answer['steps']}, {answer['parts']}, {answer['retries']}", f"{answer['tokens_per_second']:,}", answer["error"],
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds benchmarks/")
    parser.add_argument("--model", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the checkpoint, which is kept")
    parser.add_argument("--caps", type=float, nargs="*", default=[16, 7, 24, 12, 10, 8, 20], help="GiB, in this order")
    parser.add_argument("--find", nargs="*", default=["input_only"], help="policies")
    parser.add_argument("--find_sequence", type=int, default=2048)
    parser.add_argument("--long", type=int, default=131072, help="tokens of the long row; 0: none")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fixed_steps", type=int, default=2, help="steps with fixed segments; 0: skip them")
    parser.add_argument("--long_steps", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=470, help="seconds after which no new measurement starts; one takes at most a minute"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for all measurements")
    args = parser.parse_args()
    program = args.build / "benchmarks" / "bench_reserved_memory"
    if not program.is_file():
        print(f"{program} is not there: built without CUDA; nothing measured")
        return 0
    begun = time.monotonic()
    kept = args.folder is not None
    parent = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None))
    folder = args.folder if kept else parent / args.model
    try:
        if not (folder / "config.json").is_file():
            write_checkpoint(folder, SHAPES[args.model], with_tokenizer=False)
            say(f"checkpoint written after {time.monotonic() - begun:.0f} s")
        top = max(args.caps, default=24)
        found = [(f"find, {keep}", top, {"find": 1, "keep": keep, "sequence": args.find_sequence}) for keep in args.find]
        chosen = [("memory_budget", cap, {"budget": f"{cap:g}GiB"}) for cap in args.caps]
        long = [(f"1 x {args.long}", top, {"batch": 1, "sequence": args.long, "keep": "input_on_host"})] if args.long else []
        # The default first, as time may run out; and what ran out of memory with fixed segments beside it.
        order = [(*run, fixed) for run in found for fixed in (False, True)]
        order += [(*run, False) for run in chosen + long] + [(*run, True) for run in long + chosen]
        order = [run for run in order if args.fixed_steps > 0 or not run[3]]
        rows, good = [], True
        for name, cap, words, fixed in order:
            steps = args.long_steps if words.get("sequence") == args.long else args.fixed_steps if fixed else args.steps
            left = args.seconds - (time.monotonic() - begun)
            if left > 0:
                answer = measure(program, folder, {**words, "cap": cap, "steps": steps}, fixed, max(left, 60))
            else:
                answer = {"error": "out of time", "skipped": True}
            good = good and (fixed or is_good(answer, steps))
            rows.append({"run": name, "cap": cap, "fixed": fixed, "asked": steps, **answer})
            say(f"{time.monotonic() - begun:5.0f} s  {row(name, cap, answer)}")
        print("| run | cap GiB | segments | chosen | allocated GiB | reserved GiB | steps, parts, retries | tokens/s | error |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(row(each["run"], each["cap"], each) for each in rows))
        print("\nThe default keeps its bound in every run." if good else "\nThe default does NOT keep its bound in every run.")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2))
        return 0 if good else 1
    finally:
        shutil.rmtree(parent)


if __name__ == "__main__":
    sys.exit(main())
