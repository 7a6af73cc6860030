# SPDX-License-Identifier: Apache-2.0
"""Checks that the resident memory of a CPU training run over rows of mixed lengths does not grow.

    python benchmarks/cpu_ragged_memory.py [--program build/dev/qlorapp] [--model examples/data/tiny-llama] [--steps 2000] [--dtypes bf16]

Runs `qlorapp train` over synthetic rows of 8 to --longest tokens, 4 per step, so nearly every step has new shapes. Reads VmRSS ten times per
second. Prints the peak, the median of each tenth of the run, and the growth in the second half. Exits 1 if the growth exceeds --growth MiB.
--capacity N repeats the run with ONEDNN_PRIMITIVE_CACHE_CAPACITY=N (1024 is oneDNN's default). The difference is the saving of the library's
bound of 64 on a CPU with 16-bit matrix instructions.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def write_rows(path: pathlib.Path, count: int, longest: int, vocabulary: int) -> None:
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            row = [numbers.randrange(vocabulary) for _ in range(numbers.randint(8, longest))]
            file.write(json.dumps({"input_ids": row, "labels": row}) + "\n")


def resident_mib(pid: int) -> float:
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def run(command: list[str], environment: dict[str, str], log: pathlib.Path) -> tuple[list[float], float]:
    """VmRSS during the run in MiB, and the run's seconds."""
    begun, seen = time.monotonic(), []
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            seen.append(resident_mib(process.pid))
            time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(log.read_text()[-2000:])
    return [value for value in seen if value > 0], time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "dev" / "qlorapp")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "examples" / "data" / "tiny-llama")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=256, help="tokens")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=["bf16", "fp32"])
    parser.add_argument("--capacity", type=int, nargs="*", default=[], help="sizes of oneDNN's primitive cache, one run each")
    parser.add_argument("--growth", type=float, default=16, help="allowed growth in the second half, MiB")
    args = parser.parse_args()
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        write_rows(here / "rows.jsonl", 4000, args.longest, vocabulary)
        for dtype in args.dtypes:
            for capacity in [None, *args.capacity]:
                environment = {name: value for name, value in os.environ.items() if name != CAPACITY}
                if capacity is not None:
                    environment[CAPACITY] = str(capacity)
                command = [
                    str(args.program.resolve()),
                    "train",
                    "--defaults",
                    "trainer",
                    "--model",
                    str(args.model.resolve()),
                    "--data",
                    str(here / "rows.jsonl"),
                ]
                command += ["--output", str(here / f"{dtype}-{capacity}"), "--use_cpu", "--bf16", str(dtype == "bf16").lower()]
                command += ["--max_steps", str(args.steps), "--per_device_train_batch_size", "4", "--save_strategy", "no"]
                seen, seconds = run(command, environment, here / "log")
                tenths = [seen[i * len(seen) // 10 : (i + 1) * len(seen) // 10] for i in range(10)]
                medians = [statistics.median(tenth) for tenth in tenths if tenth]
                growth = medians[-1] - medians[len(medians) // 2 - 1]
                good = good and (capacity is not None or growth <= args.growth)
                name = f"{dtype}, cache of {'the library' if capacity is None else capacity}"
                print(
                    f"{name}: peak {max(seen):.0f} MiB, second half {growth:+.0f} MiB, {seconds:.0f} s; tenths {[round(m) for m in medians]}"
                )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
