# SPDX-License-Identifier: Apache-2.0
"""Measures the time from SIGTERM to the end of `qlorapp train`, with its checkpoint written and verified.

    python benchmarks/stop_latency.py [--model DIR] [--data FILE] [--signals 100] [--seed 0] [-- TRAIN-OPTIONS]

Each run is stopped at a random moment between its first steps. The peer of the same run is a plain exit: the same with SIGKILL, which writes
nothing. Without --model: the bundled model of the demo.
"""

import argparse
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))
DATA = ROOT / "examples" / "data"


def stop(line: list[str], how: signal.Signals, after: float) -> float:
    """@returns seconds from the signal to the end of the process. The signal comes `after` seconds behind the first step."""
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for text in process.stdout:
        if "'loss'" in text:
            break
    time.sleep(after)
    begin = time.monotonic()
    process.send_signal(how)
    process.communicate()
    seconds = time.monotonic() - begin
    expected = -how if how == signal.SIGKILL else 128 + how
    if process.returncode != expected:
        raise SystemExit(f"the run ended with {process.returncode}, not {expected}")
    return seconds


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DATA / "tiny-llama")
    parser.add_argument("--data", default=DATA / "train.jsonl")
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="behind --: options of qlorapp train")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    stopped, killed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.signals):
            out = pathlib.Path(folder) / str(number % 2)
            words = [
                BUILD / "qlorapp",
                "train",
                "--defaults",
                "trainer",
                "--model",
                given.model,
                "--data",
                given.data,
                "--output",
                out,
                "--max_steps",
                100000,
            ]
            words += [
                "--logging_steps",
                1,
                "--save_steps",
                20,
                "--overwrite_output_dir",
                "true",
                "--target_modules",
                "all-linear",
            ]
            line = [str(word) for word in (*words, *given.options)]
            stopped.append(stop(line, signal.SIGTERM, moments.uniform(0, 1)))
            checked = subprocess.run(
                [str(BUILD / "qlorapp"), "inspect", str(max(out.glob("checkpoint-*"), key=os.path.getmtime))],
                capture_output=True,
            )
            if checked.returncode != 0:
                raise SystemExit(f"a checkpoint is damaged: {checked.stdout.decode()}")
            if number < 5:
                killed.append(stop(line, signal.SIGKILL, moments.uniform(0, 1)))
    figures = {f"p{round(100 * share)} s": round(quantile(stopped, share), 3) for share in (0.5, 0.99, 1)}
    print(json.dumps({"signals": len(stopped), **figures, "SIGKILL p50 s": round(quantile(killed, 0.5), 3)}))


if __name__ == "__main__":
    main()
