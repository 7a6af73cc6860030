# SPDX-License-Identifier: Apache-2.0
"""Writes src/text/unicode_tables.cpp from the regex engines inside the installed `tokenizers` package.

Byte-level BPE splits text with \\p{L}, \\p{N} and \\s, its added tokens look at \\w, and Digits asks Rust's is_numeric. The set that
these match depends on the Unicode version of each engine, and the versions differ inside one package. So the script asks the engines,
code point by code point.
Usage: python scripts/make_unicode_tables.py [--check]
"""

import argparse
import pathlib
import re
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "src" / "text" / "unicode_tables.cpp"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
LETTER, NUMBER, SPACE, WORD, NUMERIC = 1, 2, 4, 8, 16


def chunks(size=4096):
    for i in range(0, len(CODE_POINTS), size):
        yield CODE_POINTS[i : i + size]


def members(complement: str) -> set[int]:
    """Code points that survive when everything that matches `complement` is removed."""
    remove = normalizers.Replace(Regex(complement), "")
    return {ord(c) for chunk in chunks() for c in remove.normalize_str("".join(map(chr, chunk)))}


def word_characters() -> set[int]:
    """\\w of the engine for added tokens: it finds no single_word token before a word character."""
    tokenizer = Tokenizer(models.BPE({}, []))
    tokenizer.add_tokens([AddedToken("T", single_word=True, normalized=False)])
    words = set()
    for chunk in chunks():
        text = "".join("T" + chr(c) + "\n" for c in chunk)
        found = {begin // 3 for begin, _ in tokenizer.encode(text).offsets if begin % 3 == 0}
        words |= {c for i, c in enumerate(chunk) if i not in found}
    return words


def numeric_characters() -> set[int]:
    """Characters that Digits isolates between two letters."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    numeric = set()
    for chunk in chunks():
        pieces = digits.pre_tokenize_str("".join("a" + chr(c) for c in chunk))
        numeric |= {chunk[begin // 2] for _, (begin, end) in pieces if begin % 2 == 1 and end == begin + 1}
    return numeric


def render() -> str:
    sets = [(LETTER, members(r"\P{L}")), (NUMBER, members(r"\P{N}")), (SPACE, members(r"\S")), (WORD, word_characters())]
    sets.append((NUMERIC, numeric_characters()))
    classes = bytearray(0x110000)
    for bit, points in sets:
        for c in points:
            classes[c] |= bit
    ranges = []
    for c, value in enumerate(classes):
        if not value:
            continue
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == value:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, value])
    cells = [f"{{0x{a:x}, 0x{b:x}, {v}}}," for a, b, v in ranges]
    lines, line = [], "   "
    for cell in cells:
        if len(line) + 1 + len(cell) > 126:
            lines.append(line)
            line = "   "
        line += " " + cell
    lines.append(line)
    return f"""// SPDX-License-Identifier: Apache-2.0
// Written by scripts/make_unicode_tables.py from the regex engines of tokenizers {tokenizers.__version__}; not edited by hand.
// First and last code point, then the classes: 1 \\p{{L}}, 2 \\p{{N}}, 4 \\s, 8 \\w, 16 is_numeric (unicode.hpp).
#include "unicode.hpp"

namespace qlorapp::unicode {{

// clang-format off
const ClassRange kClassRanges[] = {{
{chr(10).join(lines)}
}};
// clang-format on
const std::size_t kClassRangeCount = sizeof kClassRanges / sizeof kClassRanges[0];

}}  // namespace qlorapp::unicode
"""


def table(text: str) -> list[str]:
    return re.findall(r"\{0x.*?\}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file and write nothing")
    text = render()
    if parser.parse_args().check:
        return 0 if table(OUTPUT.read_text()) == table(text) else 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
