# SPDX-License-Identifier: Apache-2.0
"""Measures the time that `import qlorapp` adds to torch's import, in fresh processes, and its slowest modules.

    python benchmarks/import_time.py [--rounds 7]

Peers in the same run: torch, imported first each time, and then transformers, which qlorapp does not import. A first, uncounted process warms
the page cache.
"""

import argparse
import platform
import re
import statistics
import subprocess
import sys

TIMED = """
import time
begin = time.perf_counter(); import torch
middle = time.perf_counter(); import {name}
print(middle - begin, time.perf_counter() - middle)
"""


def timed(name: str) -> tuple[float, float]:
    """Seconds of (import torch, then import name) in a fresh process."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(name=name)], capture_output=True, text=True, check=True)
    of_torch, of_name = done.stdout.split()[-2:]
    return float(of_torch), float(of_name)


def slowest(count: int) -> list[str]:
    """qlorapp's modules by their own import time, from -X importtime."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch, qlorapp"], capture_output=True, text=True, check=True
    )
    found = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(qlorapp\S*)", done.stderr)
    return [f"{name} {int(own) / 1000:.1f} ms" for own, name in sorted(found, key=lambda entry: -int(entry[0]))[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {rounds} rounds, median (least … most)"
    )
    for name in ("qlorapp", "transformers"):
        timed(name)
        pairs = [timed(name) for _ in range(rounds)]
        for label, values in (("torch", [p[0] for p in pairs]), (f"{name} behind it", [p[1] for p in pairs])):
            print(f"{label:22} {statistics.median(values):.3f} s ({min(values):.3f} … {max(values):.3f})")
    print("of qlorapp:", ", ".join(slowest(6)))


if __name__ == "__main__":
    main()
