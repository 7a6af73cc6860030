# SPDX-License-Identifier: Apache-2.0
"""Writes src/text/normalization_tables.cpp for the NFC of the installed `tokenizers` package.

Its NFC has an older Unicode version than Python's. Assigned decompositions and combining classes never change, so the values come from
Python, and the package's engine decides which of them exist.
Usage: python scripts/make_normalization_tables.py [--check]
"""

import argparse
import pathlib
import re
import sys
import unicodedata

import tokenizers
from tokenizers import normalizers

OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "src" / "text" / "normalization_tables.cpp"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xD7A4)
NFC, NFD = normalizers.NFC(), normalizers.NFD()


def combining_classes() -> dict[int, int]:
    """The classes that the engine knows: it moves a known mark before U+0345, whose class 240 is the largest."""
    classes = {0x345: 240}
    for c in CODE_POINTS:
        if c in HANGUL or c == 0x345 or NFD.normalize_str(chr(c)) != chr(c):
            continue
        moved = NFD.normalize_str("a\u0345" + chr(c))[-1] == "\u0345"
        if moved != bool(unicodedata.combining(chr(c))) and moved:
            raise SystemExit(f"U+{c:04X} has a combining class in tokenizers and none in this Python: use a newer Python")
        if moved:
            classes[c] = unicodedata.combining(chr(c))
    return classes


def decompositions() -> list[tuple[int, int, int, int]]:
    """(code point, first, second or 0, whether NFC composes the two again)."""
    out = []
    for c in CODE_POINTS:
        if c in HANGUL or NFD.normalize_str(chr(c)) == chr(c):
            continue
        parts = unicodedata.decomposition(chr(c))
        if not parts or parts.startswith("<"):
            raise SystemExit(f"U+{c:04X} decomposes in tokenizers and not in this Python: use a newer Python")
        first, *second = (int(part, 16) for part in parts.split())
        composes = bool(second) and NFC.normalize_str(chr(first) + chr(second[0])) == chr(c)
        out.append((c, first, second[0] if second else 0, int(composes)))
    return out


def in_lines(cells: list[str]) -> str:
    lines, line = [], "   "
    for cell in cells:
        if len(line) + 1 + len(cell) > 128:
            lines.append(line)
            line = "   "
        line += " " + cell
    return "\n".join([*lines, line])


def render() -> str:
    ranges: list[list[int]] = []
    for c, value in sorted(combining_classes().items()):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == value:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, value])
    pairs = [f"{{0x{c:x}, 0x{a:x}" + f", 0x{b:x}" * bool(b) + f", {k}" * k + "}," for c, a, b, k in decompositions()]
    return f"""// SPDX-License-Identifier: Apache-2.0
// Written by scripts/make_normalization_tables.py for the NFC of tokenizers {tokenizers.__version__}; not edited by hand.
#include "nfc.hpp"

namespace qlorapp::unicode {{

// clang-format off
const CombiningRange kCombiningRanges[] = {{
{in_lines([f"{{0x{a:x}, 0x{b:x}, {v}}}," for a, b, v in ranges])}
}};
const Decomposition kDecompositions[] = {{
{in_lines(pairs)}
}};
// clang-format on
const std::size_t kCombiningRangeCount = sizeof kCombiningRanges / sizeof kCombiningRanges[0];
const std::size_t kDecompositionCount = sizeof kDecompositions / sizeof kDecompositions[0];

}}  // namespace qlorapp::unicode
"""


def table(text: str) -> list[str]:
    return re.findall(r"\{0x.*?\}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file and write nothing")
    arguments = parser.parse_args()
    text = render()
    if arguments.check:
        return 0 if table(OUTPUT.read_text()) == table(text) else 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
