# SPDX-License-Identifier: Apache-2.0
"""Compares the memory plan with torch's max_memory_allocated on a GPU, over real shapes.

    python benchmarks/plan_accuracy_cuda.py [--build build/dev] [--models 1b,3b,8b,70b] [--seconds 270]

Runs bench_plan_accuracy (one process; models of random four-bit codes; one or two optimizer steps and one evaluated batch per point).
Prints the table, the size of the CUDA context, and the largest deviations. Exits 1 if a plan is more than 5 % over or 3 % under. Needs less than
five minutes on an H200.
"""

import argparse
import json
import pathlib
import subprocess
import sys

GIB = 1 << 30
OVER, UNDER = 0.05, -0.03
ROOT = pathlib.Path(__file__).resolve().parents[1]


def table(points: list[dict]) -> str:
    lines = [
        "| point | planned GiB | measured GiB | off | evaluation: planned, measured | off | reserved: planned, measured | fullest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        if "skipped" in p:
            lines.append(f"| {p['point']} | {p['skipped']} | | | | | | |")
            continue
        off, off_evaluation = deviations(p)
        evaluation = f"{p['planned_evaluation'] / GIB:.3f}, {p['measured_evaluation'] / GIB:.3f}"
        reserved = f"{p['planned_reserved'] / GIB:.2f}, {p['measured_reserved'] / GIB:.2f}"
        cells = [p["point"], f"{p['planned'] / GIB:.3f}", f"{p['measured'] / GIB:.3f}", f"{off:+.2%}", evaluation]
        lines.append("| " + " | ".join([*cells, f"{off_evaluation:+.2%}", reserved, p["phase"]]) + " |")
    return "\n".join(lines)


def deviations(p: dict) -> tuple[float, float]:
    return p["planned"] / p["measured"] - 1, p["planned_evaluation"] / p["measured_evaluation"] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds benchmarks/bench_plan_accuracy"
    )
    parser.add_argument("--models", default="1b,3b,8b,70b")
    parser.add_argument("--seconds", type=float, default=270, help="seconds after which no new point starts")
    parser.add_argument("--json", type=pathlib.Path, help="file for all measurements")
    args = parser.parse_args()
    program = args.build / "benchmarks" / "bench_plan_accuracy"
    if not program.is_file():
        print(f"{program} is not there: built without CUDA; nothing measured")
        return 0
    command = [str(program), "--models", args.models, "--seconds", str(args.seconds)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    if result.returncode != 0 or not rows:  # it has said why
        return result.returncode
    points = [row for row in rows if "point" in row]
    measured = [p for p in points if "skipped" not in p]
    print(f"{rows[0]['device']}: context {rows[0]['context'] / GIB:.3f} GiB at first, ", end="")
    print(f"{max((p['outside'] for p in measured), default=0) / GIB:.3f} GiB with all libraries loaded.\n")
    print(table(points))
    if not measured:
        return 1
    for i, what in enumerate(("step", "evaluation")):
        offs = sorted(deviations(p)[i] for p in measured)
        print(f"\n{what}: {len(offs)} points, {offs[0]:+.2%} … {offs[-1]:+.2%}, median {offs[len(offs) // 2]:+.2%}", end="")
    slowest = max(p["plan_seconds"] for p in measured)
    print(f"\nslowest plan: {slowest * 1e3:.0f} ms")
    return 0 if all(UNDER <= off <= OVER for p in measured for off in deviations(p)) else 1


if __name__ == "__main__":
    sys.exit(main())
