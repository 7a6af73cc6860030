# SPDX-License-Identifier: Apache-2.0
"""Flips bits of a checkpoint, one at a time, and checks that none passes: all of the small files, then random ones of all files.

python tests/faults/flips.py [--flips N] [--seed S]
"""

import argparse
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator

import faults

sys.path.insert(0, str(faults.BUILD / "python"))


def bits(sizes: dict[str, int], count: int, chance: random.Random) -> Iterator[tuple[str, int]]:
    """(file, bit)"""
    left = count
    for name, size in sizes.items():
        if name.endswith(".json"):
            for bit in range(min(size * 8, left)):
                left -= 1
                yield name, bit
    names = list(sizes)
    for name in chance.choices(names, [sizes[name] for name in names], k=left):
        yield name, chance.randrange(sizes[name] * 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from qlorapp import _C

    silent = 0
    with tempfile.TemporaryDirectory() as name:
        made = pathlib.Path(name)
        faults.make_inputs(made)
        checkpoint = made / "trained" / "checkpoint-4"
        _C.check_checkpoint(str(checkpoint))
        files = {path.name: os.open(path, os.O_RDWR) for path in sorted(checkpoint.iterdir())}
        sizes = {name: os.fstat(file).st_size for name, file in files.items()}
        for name, bit in bits(sizes, given.flips, random.Random(given.seed)):
            byte = os.pread(files[name], 1, bit // 8)
            os.pwrite(files[name], bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
            try:
                _C.check_checkpoint(str(checkpoint))
            except _C.FormatError:
                pass
            else:
                silent += 1
                print(f"{name}, bit {bit}: no error")
            os.pwrite(files[name], byte, bit // 8)
        _C.check_checkpoint(str(checkpoint))
    print(json.dumps({"flips": given.flips, "silent": silent}))
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
