# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel file for compute_75 and looks at its PTX: no instruction may have a bf16 operand, which sm_75 lacks.

    python tests/cuda/check_sm75_ptx.py [--nvcc /usr/local/cuda/bin/nvcc]

Needs nvcc, no GPU. Exit status 77 without nvcc.
"""

import argparse
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.]*)\s", re.MULTILINE)


def instructions(nvcc: str, source: pathlib.Path, folder: pathlib.Path) -> set[str]:
    out = folder / f"{source.stem}.ptx"
    include = ["-I", ROOT / "include", "-I", ROOT / "src", "-I", ROOT]
    subprocess.run([nvcc, "-ptx", "-arch=compute_75", "-std=c++20", *include, "-o", out, source], check=True)
    return set(INSTRUCTION.findall(out.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"))
    args = parser.parse_args()
    if not args.nvcc:
        print("check_sm75_ptx: skipped, there is no nvcc")
        return 77
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(sources, pool.map(lambda source: instructions(args.nvcc, source, pathlib.Path(folder)), sources), strict=True)
        )
    wrong = {source.name: sorted(i for i in used if "bf16" in i) for source, used in found.items()}
    wrong = {name: used for name, used in wrong.items() if used}
    for name, used in wrong.items():
        print(f"{name}: {', '.join(used)}")
    everything = set().union(*found.values())
    assert any(i.startswith("mma.sync") and "f16" in i for i in everything), "the PTX was not understood"
    print(
        f"check_sm75_ptx: {len(everything)} kinds of instructions in {len(sources)} files, {len(wrong)} files with bf16 among them"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
