# SPDX-License-Identifier: Apache-2.0
"""Trains for hours with saves, evaluations, stops and resumes, and fits what memory and descriptors do over time.

    python tests/faults/soak.py [--minutes M] [--runs R] [--folder F]

Each of the R runs resumes the one before it, trains for M minutes and is stopped by SIGTERM. Of each, after the first tenth, a line is fitted through the
resident memory. It fails if memory grows by 1 MB per hour or more, if the number of descriptors changes between steps, or if a number is not finite.
"""

import argparse
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))
LINE = (
    "train --model {root}/examples/data/tiny-llama --data {root}/examples/data/train.jsonl --eval_data {root}/examples/data/eval.jsonl --output {out} "
    "--dtype float32 --lora_r 16 --target_modules all-linear --learning_rate 1e-4 --lr_scheduler_type constant --max_steps 10000000 --lora_dropout 0.05 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --gradient_checkpointing true --assistant_only_loss true "
    "--logging_steps 200 --save_steps 50 --eval_steps 200 --eval_strategy steps --save_total_limit 2 --resume_from_checkpoint {resume}"
)
#: Bytes per hour.
LIMIT = 1e6


def resident(pid: int) -> int:
    """Bytes."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares, in units per second."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def one_run(out: pathlib.Path, minutes: float, resume: bool) -> dict:
    """@returns what was measured of one process."""
    line = LINE.format(root=ROOT, out=out, resume=str(resume).lower())
    with open(out.parent / "log.txt", "a") as log:
        process = subprocess.Popen([BUILD / "qlorapp", *line.split()], stdout=log, stderr=log)
        begin, memory, descriptors = time.monotonic(), [], []
        while (now := time.monotonic() - begin) < minutes * 60:
            time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(f"soak: the run ended with {process.returncode}; {log.name} says why")
            if now > minutes * 6:
                memory.append((now, resident(process.pid)))
                descriptors.append(len(os.listdir(f"/proc/{process.pid}/fd")))
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    if code != 128 + signal.SIGTERM:
        raise SystemExit(f"soak: SIGTERM ended the run with {code}; {log.name} says why")
    state = json.loads(max(out.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime).read_text())
    numbers = [value for entry in state["log_history"] for value in entry.values() if isinstance(value, float)]
    # A save has its files open for a moment; what stays open would stay in every later sample.
    kept = [min(descriptors[at : at + 30]) for at in range(0, len(descriptors), 30)]
    return {
        "step": state["global_step"],
        "resident_MB": round(memory[-1][1] / 1e6, 1),
        "MB_per_hour": round(slope(memory) * 3600 / 1e6, 3),
        "descriptors": [min(kept), max(kept)],
        "not_finite": sum(not math.isfinite(value) for value in numbers),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=65)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path, help="for the checkpoints and log.txt; a temporary one unless given")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for run in range(given.runs):
            found = one_run(folder / "out", given.minutes, resume=run > 0)
            wrong += (
                found["MB_per_hour"] * 1e6 >= LIMIT
                or found["descriptors"][0] != found["descriptors"][1]
                or found["not_finite"] > 0
            )
            print(json.dumps(found), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
