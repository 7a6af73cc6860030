# SPDX-License-Identifier: Apache-2.0
"""Gives random files to our safetensors reader and to the safetensors package, and compares their verdicts.

    python tests/fuzz/differential.py JUDGE [--inputs N] [--jobs J] [--seed S]

JUDGE is the program `judge` of this folder. What the package refuses must be refused; what it accepts must be accepted, unless we are stricter on purpose
(STRICTER). Prints inputs, accepted ones, and differences.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import struct
import subprocess
import sys

import safetensors

#: Bits.
DTYPES = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
          "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip
NAMES = list(DTYPES)
#: Parts of our messages where the package accepts.
STRICTER = ("unknown field", "twice", "unique", "64-bit integer", "got null", "NUL")
WRONG = (-1, 0, 1, 2.0, 1e30, 2**31, 2**62, 2**63, 2**64, True, None, "1", [1])


def near_miss(rng: random.Random) -> bytes:
    """A file that is right, or nearly: fields changed to what might be believed, bytes flipped, ends cut."""
    header, begin = {}, 0
    for i in range(rng.randrange(4)):
        dtype = rng.choice(NAMES)
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        size = DTYPES[dtype] * math.prod(shape) // 8
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    if header and rng.random() < 0.5:
        tensor = header[f"t{rng.randrange(len(header))}"]
        field = rng.choice(("dtype", "shape", "data_offsets", "drop"))
        if field == "drop":
            tensor.pop(rng.choice(list(tensor)))
        elif field == "dtype":
            tensor["dtype"] = rng.choice((*NAMES, "f32", "", None, 1))
        else:
            value = [rng.choice(WRONG), rng.choice(WRONG)]
            tensor[field] = rng.choice(([], [0], value, [0, begin], [*tensor[field], rng.choice(WRONG)], None))
    if rng.random() < 0.3:
        header["__metadata__"] = rng.choice(({}, {"format": "pt"}, {"a": 1}, {"a": None}, {"a": {}}, "x", 1, []))
    text = (rng.choice(("", "", " ", "\n\t")) + json.dumps(header) + rng.choice(("", "", "  ", "\x00", "x", "{}"))).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + bytes((rng.randrange(256),)) + text[at + 1 :]
    length = len(text) + (rng.choice((-1, 1, 7, 2**40, 2**63)) if rng.random() < 0.1 else 0)
    data = struct.pack("<Q", max(length, 0)) + text + bytes(begin)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + b"x"
    return data


def names_twice(data: bytes) -> bool:
    """The package takes the last of them."""
    try:
        pairs = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]], object_pairs_hook=list)
    except ValueError:
        return False
    names = [name for name, _ in pairs]
    return len(set(names)) < len(names)


def compare(judge: str, count: int, seed: int) -> tuple[int, list[str]]:
    """@returns how many of `count` inputs are accepted, and the differences."""
    rng = random.Random(seed)
    accepted, different = 0, []
    with subprocess.Popen([judge, "stream"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        done = 0
        while done < count:
            inputs = [near_miss(rng) for _ in range(min(200, count - done))]  # their answers fit into a pipe
            done += len(inputs)
            process.stdin.write(b"".join(struct.pack("<I", len(data)) + data for data in inputs))
            process.stdin.flush()
            for data in inputs:
                ours = process.stdout.readline().decode(errors="replace").rstrip("\n")
                try:
                    safetensors.deserialize(data)
                    theirs = "ok"
                except safetensors.SafetensorError as error:
                    theirs = str(error)
                accepted += ours == "ok"
                if (ours == "ok") == (theirs == "ok"):
                    continue
                if ours == "ok" or not (any(reason in ours for reason in STRICTER) or names_twice(data)):
                    different.append(f"{data!r}: ours {ours}; theirs {theirs}")
        process.stdin.close()
    return accepted, different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    part = 20_000
    parts = [min(part, given.inputs - at) for at in range(0, given.inputs, part)]
    accepted = wrong = 0
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        seeds = [given.seed * 1_000_003 + number for number in range(len(parts))]
        for found, different in pool.map(compare, [given.judge] * len(parts), parts, seeds):
            accepted += found
            wrong += len(different)
            for text in different[:5]:
                print(text, flush=True)
    print(json.dumps({"inputs": given.inputs, "accepted": accepted, "different": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
