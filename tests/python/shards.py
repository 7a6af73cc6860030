# SPDX-License-Identifier: Apache-2.0
"""The test files of each of N shards, which ctest runs beside each other: about as long in each, by the seconds that files took.

python tests/python/shards.py build/dev     stores the seconds of the last whole run, in seconds.json
"""

import functools
import json
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
RECORDED = HERE / "seconds.json"
#: In a build folder: {file: seconds} of the files that a process ran.
FOLDER = "test_seconds"


@functools.cache
def shards(count: int) -> list[set[str]]:
    """Names of files. The longest first, each to the shard that has least; a file that is not recorded counts as the median."""
    recorded = json.loads(RECORDED.read_text())
    usual = statistics.median(recorded.values())
    files = sorted(path.name for path in HERE.glob("test_*.py"))
    parts: list[set[str]] = [set() for _ in range(count)]
    seconds = [0.0] * count
    for name in sorted(files, key=lambda name: -recorded.get(name, usual)):
        least = seconds.index(min(seconds))
        parts[least].add(name)
        seconds[least] += recorded.get(name, usual)
    return parts


def note(build: pathlib.Path, seconds: dict[str, float]) -> None:
    """Leaves what a process measured."""
    folder = build / FOLDER
    folder.mkdir(exist_ok=True)
    for name, value in seconds.items():
        (folder / f"{name}.json").write_text(json.dumps({name: round(value, 1)}))


def main() -> None:
    found = {}
    for path in sorted((pathlib.Path(sys.argv[1]) / FOLDER).glob("*.json")):
        found |= json.loads(path.read_text())
    present = {path.name for path in HERE.glob("test_*.py")}
    missing = present - set(found)
    if missing:
        sys.exit(f"shards.py: no whole run: {', '.join(sorted(missing))}")
    RECORDED.write_text(json.dumps({name: found[name] for name in sorted(present)}, indent=0) + "\n")


if __name__ == "__main__":
    main()
