# SPDX-License-Identifier: Apache-2.0
"""Writes src/text/unicode_tables.cpp and category_tables.cpp from the regex engines inside the installed `tokenizers` package.

Byte-level BPE splits text with \\p{L}, \\p{N} and \\s, its added tokens look at \\w, and Digits asks Rust's is_numeric. The set that
these match depends on the Unicode version of each engine, and the versions differ inside one package. So the script asks the engines,
code point by code point. The other patterns of Split need each code point's general category, as the same engine knows it.
Usage: python scripts/make_unicode_tables.py [--check]
"""

import argparse
import pathlib
import re
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

TEXT = pathlib.Path(__file__).resolve().parents[1] / "src" / "text"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
LETTER, NUMBER, SPACE, WORD, NUMERIC = 1, 2, 4, 8, 16
#: In the order of unicode::kCategories, which has unassigned behind them.
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
UNASSIGNED, ALTERNATING = len(CATEGORIES), len(CATEGORIES) + 1  # also surrogates, which no text has


def chunks(points=CODE_POINTS, size=4096):
    for i in range(0, len(points), size):
        yield points[i : i + size]


def members(complement: str, points=CODE_POINTS) -> set[int]:
    """Code points that survive when everything that matches `complement` is removed."""
    remove = normalizers.Replace(Regex(complement), "")
    return {ord(c) for chunk in chunks(points) for c in remove.normalize_str("".join(map(chr, chunk)))}


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


def lines_of(ranges: list[list[int]]) -> str:
    lines, line = [], "   "
    for a, b, v in ranges:
        cell = f"{{0x{a:x}, 0x{b:x}, {v}}},"
        if len(line) + 1 + len(cell) > 126:
            lines.append(line)
            line = "   "
        line += " " + cell
    return "\n".join([*lines, line])


def category_ranges() -> list[list[int]]:
    """First, last, category. Upper and lower case in turn, as in Latin Extended, make one range of the value ALTERNATING."""
    categories = bytearray([UNASSIGNED]) * 0x110000
    assigned = sorted(members(r"\p{Cn}"))
    private = members(r"\P{Co}", assigned)
    assigned = [c for c in assigned if c not in private]
    for index, name in enumerate(CATEGORIES):
        for c in private if name == "Co" else members(rf"\P{{{name}}}", assigned):
            categories[c] = index
    ranges: list[list[int]] = []
    for c, value in enumerate(categories):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == value:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, value])
    out: list[list[int]] = []
    for a, b, value in ranges:
        in_turn = a == b and value in (0, 1) and out and out[-1][1] == a - 1
        if in_turn and out[-1][2] == ALTERNATING and (a - out[-1][0]) % 2 == value:
            out[-1][1] = a
        elif in_turn and value == 1 and out[-1][0] == out[-1][1] and out[-1][2] == 0:
            out[-1][1:] = [a, ALTERNATING]
        else:
            out.append([a, b, value])
    return [entry for entry in out if entry[2] != UNASSIGNED]


def render_categories() -> str:
    return f"""// SPDX-License-Identifier: Apache-2.0
// Written by scripts/make_unicode_tables.py from the regex engine of tokenizers {tokenizers.__version__}; not edited by hand.
// First and last code point, then the general category, an index into
// {" ".join(CATEGORIES)}; {ALTERNATING}: Lu, Ll, Lu … in turn.
#include "unicode.hpp"

namespace qlorapp::unicode {{

// clang-format off
const ClassRange kCategoryRanges[] = {{
{lines_of(category_ranges())}
}};
// clang-format on
const std::size_t kCategoryRangeCount = sizeof kCategoryRanges / sizeof kCategoryRanges[0];

}}  // namespace qlorapp::unicode
"""


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
    return f"""// SPDX-License-Identifier: Apache-2.0
// Written by scripts/make_unicode_tables.py from the regex engines of tokenizers {tokenizers.__version__}; not edited by hand.
// First and last code point, then the classes: 1 \\p{{L}}, 2 \\p{{N}}, 4 \\s, 8 \\w, 16 is_numeric (unicode.hpp).
#include "unicode.hpp"

namespace qlorapp::unicode {{

// clang-format off
const ClassRange kClassRanges[] = {{
{lines_of(ranges)}
}};
// clang-format on
const std::size_t kClassRangeCount = sizeof kClassRanges / sizeof kClassRanges[0];

}}  // namespace qlorapp::unicode
"""


def table(text: str) -> list[str]:
    return re.findall(r"\{0x.*?\}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed files and write nothing")
    check = parser.parse_args().check
    for name, text in (("unicode_tables.cpp", render()), ("category_tables.cpp", render_categories())):
        if not check:
            (TEXT / name).write_text(text)
        elif table((TEXT / name).read_text()) != table(text):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
