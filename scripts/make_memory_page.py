#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates the figures of docs/memory.md: its table of options, the output of each command after a `$`, and its pictures.

One picture runs a step of the demo's model on the CPU.

PYTHONPATH=build/dev/python python scripts/make_memory_page.py --program build/dev/qlorapp
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import tempfile

import qlorapp

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "memory.md"
HEADING = "| options, 2,048 tokens per row |"
COLUMNS = [
    ("llama-3.2-1b", 1),
    ("llama-3.2-1b", 2),
    ("llama-3.1-8b", 1),
    ("llama-3.1-8b", 2),
    ("llama-3.1-8b", 4),
    ("llama-3.1-70b", 1),
]
STEPS = [
    ("`everything`", {}),
    ("`input_only`", {"gradient_checkpointing": True, "checkpoint_keep": "input_only"}),
    ("`input_on_host`", {"checkpoint_keep": "input_on_host"}),
    ("+ `loss_chunk_rows=512`", {"loss_chunk_rows": 512}),
    ("+ `weight_workspace=stack`", {"weight_workspace": "stack"}),
    ("+ `embedding_on_host`", {"embedding_on_host": True}),
    ("+ `mlp_tile_rows=1024`", {"mlp_tile_rows": 1024}),
    ("`weight_workspace=projection` instead", {"weight_workspace": "projection"}),
    ("+ `base_on_host`", {"base_on_host": True}),
]


def peak(model: str, batch: int, options: dict, tokens: int = 2048) -> float:
    """Peak GiB in training, without load and merge."""
    phases = qlorapp.plan(
        model,
        lora_config=qlorapp.LoraConfig(r=16, target_modules="all-linear"),
        args=qlorapp.TrainingArguments(bf16=True, optim="adamw_8bit", **options),
        gpu="H200",
        batch=batch,
        max_seq_length=tokens,
    ).phases
    return max(phase["allocated"] for name, phase in phases.items() if name not in ("load", "merge")) / 2**30


def table() -> str:
    """The cumulative options, and the cost of longer rows."""
    names = [f"{model.rsplit('-', 1)[1].upper()}, batch {batch}" for model, batch in COLUMNS]
    lines = [f"{HEADING} {' | '.join(names)} |", "|---|" + "---|" * len(COLUMNS)]
    options: dict = {}
    for name, more in STEPS:
        options |= more
        lines.append(f"| {name} | " + " | ".join(f"{peak(*column, options):.2f}" for column in COLUMNS) + " |")
    options |= {"weight_workspace": "stack", "base_on_host": False}
    short, long = (peak("llama-3.1-8b", 1, options, tokens) for tokens in (2048, 16384))
    slope = (long - short) * 2**30 / (16384 - 2048) / 1e3
    lines += [
        "",
        f"With `stack` and tiles, 8B and 16,384 tokens per row: {long:.2f} GiB, or {slope:.0f} kB per additional token.",
    ]
    last, first = ("input_on_host,everything:12", "everything:12,input_on_host")
    sizes = [
        peak("llama-3.1-8b", batch, {"gradient_checkpointing": True, "loss_chunk_rows": 512, "checkpoint_keep": keep})
        for batch in (1, 4)
        for keep in (last, first)
    ]
    lines.append(
        f"8B with `loss_chunk_rows=512` and 12 of 32 blocks that keep everything: {sizes[0]:.2f} GiB if they are the last and "
        f"{sizes[1]:.2f} if they are the first at batch 1, {sizes[2]:.2f} and {sizes[3]:.2f} at batch 4."
    )
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    begin = text.index(HEADING)
    return text[:begin] + table() + text[text.index("\n\n", text.index("at batch 4.", begin)) + 1 :]


def with_answers(text: str, program: str) -> str:
    def answer(match: re.Match) -> str:
        with tempfile.TemporaryDirectory() as folder:
            command = [program, *shlex.split(match[1])]
            said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        return f"```\n$ qlorapp {match[1]}\n{said.strip()}\n```"

    return re.sub(r"```\n\$ qlorapp (plan [^\n]*)\n.*?```", answer, text, flags=re.DOTALL)


def pictures(text: str) -> list[str]:
    """The page's commands that write its pictures; run from the repository's root."""
    return re.findall(r"`qlorapp (plan [^`]*--svg docs/[^`]*)`", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True, help="a built qlorapp")
    program = str(parser.parse_args().program.resolve())
    for command in pictures(PAGE.read_text(encoding="utf-8")):
        subprocess.run([program, *shlex.split(command)], cwd=PAGE.parents[1], check=True, stdout=subprocess.DEVNULL)
    PAGE.write_text(with_answers(with_table(PAGE.read_text(encoding="utf-8")), program), encoding="utf-8")
