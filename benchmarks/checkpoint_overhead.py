# SPDX-License-Identifier: Apache-2.0
"""Measures what checkpoints cost a run: flushed, with checksums, committed as one.

    python benchmarks/checkpoint_overhead.py [--model DIR] [--rounds 3] [--saves 4] [--steps_between 6] [-- TRAIN-OPTIONS]

`qlorapp train` alternates without and with checkpoints; the difference of their run times, divided by the number of saves, is the cost of one. The peer
of the same run is a plain write: the same bytes with open() and write(), without flush or checksum, as transformers and safetensors write
them. Without --model: the bundled model of the demo. Checkpoints go to the folder of TMPDIR.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))
DATA = ROOT / "examples" / "data"


def train(options: list[str], out: pathlib.Path, steps: int, save: list[str]) -> float:
    """Seconds of the run, loading not counted."""
    shutil.rmtree(out, ignore_errors=True)
    words = [
        BUILD / "qlorapp",
        "train",
        "--defaults",
        "trainer",
        *options,
        "--output",
        out,
        "--max_steps",
        steps,
        "--lr_scheduler_type",
        "constant",
        *save,
    ]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    return float(re.findall(r"'train_runtime': ([0-9.]+)", done.stdout)[-1])


def plain_write(checkpoint: pathlib.Path, to: pathlib.Path) -> float:
    contents = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    shutil.rmtree(to, ignore_errors=True)
    begin = time.monotonic()
    to.mkdir()
    for name, content in contents.items():
        (to / name).write_bytes(content)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DATA / "tiny-llama")
    parser.add_argument("--data", default=DATA / "train.jsonl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--steps_between", type=int, default=6)
    parser.add_argument("options", nargs="*", help="behind --: options of qlorapp train")
    given = parser.parse_args()
    options = [
        "--model",
        str(given.model),
        "--data",
        str(given.data),
        "--target_modules",
        "all-linear",
        "--r",
        "16",
        *given.options,
    ]
    steps = given.saves * given.steps_between
    without, saving, plain = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        for _ in range(given.rounds):
            without.append(train(options, work / "out", steps, ["--save_strategy", "no"]))
            saving.append(
                train(options, work / "out", steps, ["--save_steps", str(given.steps_between), "--save_total_limit", "2"])
            )
            plain.append(plain_write(work / "out" / f"checkpoint-{steps}", work / "plain"))
        size = sum(path.stat().st_size for path in (work / "out" / f"checkpoint-{steps}").iterdir())
    step = statistics.median(without) / steps
    save = statistics.median(b - a for a, b in zip(without, saving, strict=True)) / given.saves
    print(
        json.dumps(
            {
                "step s": round(step, 4),
                "checkpoint MB": round(size / 1e6, 2),
                "save s": round(save, 4),
                "plain write s": round(statistics.median(plain), 4),
                "save / plain write": round(save / statistics.median(plain), 2),
                "share of step time at save_steps=50, %": round(100 * save / (50 * step), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
