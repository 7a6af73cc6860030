# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' tests (tests/cuda, without torch) under compute-sanitizer's four tools. Fails on any finding.

    python scripts/sanitize_cuda.py [--build build/dev] [--tool memcheck racecheck initcheck synccheck] [--tests "*cross-entropy*"]

Needs a GPU, the CUDA toolkit's compute-sanitizer and a build with cuda_tests. Prints one line per tool. The tools run in parallel.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPTIONS = {"memcheck": ["--padding", "256"], "racecheck": ["--racecheck-report", "all"]}


def launch_functions() -> set[str]:
    """The functions of cuda/ that launch kernels."""
    declared = r"^(?:\[\[nodiscard\]\] )?cudaError_t (\w+)\("
    return {name for header in (ROOT / "cuda").glob("*.hpp") for name in re.findall(declared, header.read_text(), re.MULTILINE)}


def not_tested() -> set[str]:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "cuda").glob("*_test.cpp"))
    return {name for name in launch_functions() if f"cuda::{name}(" not in tests}


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer")
    for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        found = found or (folder and shutil.which("compute-sanitizer", path=f"{folder}/bin:{folder}/compute-sanitizer"))
    return found or sys.exit("sanitize_cuda: there is no compute-sanitizer. Put the CUDA toolkit's bin folder into PATH.")


def run(tool: str, program: pathlib.Path, tests: list[str], timeout: float) -> bool:
    # Results begin uninitialized for initcheck; elsewhere they hold a pattern that must survive around them.
    env = {**os.environ, "QLORAPP_TEST_UNINITIALIZED": "1" if tool == "initcheck" else "0"}
    command = [
        sanitizer(),
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",
        "20",
        *OPTIONS.get(tool, []),
        str(program),
        *([",".join(tests)] if tests else []),  # any of them
    ]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=env)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = f"{late.stdout or b''!r}\nstill running after {timeout:.0f} s", -1
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    looked = "skipped: there is no GPU" not in output and re.search(r"All tests passed.*", output)
    good = status == 0 and bool(looked) and bool(summary) and summary[-1].startswith("0 ")
    said = looked[0] if looked else "the tests did not pass, or found no GPU"
    print(
        f"{tool:10} {'ok' if good else 'FAILED'}  {summary[-1] if summary else 'no summary'}; {said}; {time.monotonic() - begin:.0f} s"
    )
    if not good:
        print(output[-6000:])
    sys.stdout.flush()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--tests", nargs="+", default=[], help="tests of tests/cuda: Catch2 names, with *; default: all")
    parser.add_argument("--timeout", type=float, default=500, help="seconds per tool")
    args = parser.parse_args()
    if missing := not_tested():
        sys.exit(f"sanitize_cuda: tests/cuda never calls {', '.join(sorted(missing))}.")
    program = args.build / "tests" / "cuda" / "cuda_tests"
    if not program.exists():
        sys.exit(f"sanitize_cuda: {program} is not there. Build it: cmake --build {args.build} --target cuda_tests")
    with concurrent.futures.ThreadPoolExecutor(len(TOOLS)) as pool:
        return 0 if all(list(pool.map(lambda tool: run(tool, program.resolve(), args.tests, args.timeout), args.tool))) else 1


if __name__ == "__main__":
    sys.exit(main())
