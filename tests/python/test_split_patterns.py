# SPDX-License-Identifier: Apache-2.0
"""Random regular expressions match where Oniguruma matches, which Hugging Face's tokenizers use, or are refused.

QLORAPP_SPLIT_PATTERNS=6000 tries that many; the default is a few hundred.
"""

import os
import random

import conftest
import pytest
from data_probe import DataProbe, ProbeError
from test_family_tokenizers import with_split
from tokenizers import Regex, pre_tokenizers

PATTERNS = int(os.environ.get("QLORAPP_SPLIT_PATTERNS", "400"))
ATOMS = [*"abAé漢'/. ", r"\n", r"\r", r"\t", r"\s", r"\S", r"\d", r"\D", r"\.", r"\-", r"\p{L}", r"\p{Lu}", r"\p{Ll}", r"\p{M}", r"\P{L}", r"\p{P}",
         r"\p{S}", r"\p{N}", r"\p{Cn}", r"\p{Zs}"]  # fmt: skip
MEMBERS = [
    *"ab!é'^",
    "A-Z",
    "a-z",
    "1-9",
    "一-龥",
    r"\s",
    r"\S",
    r"\r\n",
    r"\-",
    r"\]",
    r"\p{L}",
    r"\p{M}",
    r"\p{N}",
    r"\p{Lo}",
    r"\P{N}",
]
QUANTIFIERS = ["", "", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "?+", "++", "*+"]
CHARACTERS = "aabbABé漢字 \n\n\r\t  11٣.-!/'sS'LLſ\u0301\u00a0$]^\u0378𝟘ǅ"


class Patterns:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    def bracket(self):
        negated = self.rng.random() < 0.4
        members = self.rng.sample(MEMBERS, self.rng.randint(1, 4))
        if not negated and members[0] == "^":
            members[0] = "x"
        return "[" + "^" * negated + "".join(members) + "]"

    def part(self, depth):
        kind = self.rng.random()
        if kind < 0.5:
            return self.rng.choice(ATOMS) + self.rng.choice(QUANTIFIERS)
        if kind < 0.75 or (kind < 0.92 and depth == 2):
            return self.bracket() + self.rng.choice(QUANTIFIERS)
        if kind < 0.85:
            return self.rng.choice(["(?:", "("]) + self.alternatives(depth + 1) + ")" + self.rng.choice(["", "?"])
        if kind < 0.92:
            return self.rng.choice(["(?!", "(?="]) + self.alternatives(depth + 1) + ")"
        return "$" if kind < 0.95 else "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + self.rng.choice(["", "?"])

    def alternatives(self, depth=0):
        sequences = ["".join(self.part(depth) for _ in range(self.rng.randint(1, 4))) for _ in range(self.rng.randint(1, 3))]
        return "|".join(sequences)

    def text(self):
        return "".join(self.rng.choices(CHARACTERS, k=self.rng.randint(1, 16)))


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


def test_random_patterns_match_where_oniguruma_matches(probe):
    patterns, compared = Patterns(5), 0
    for _ in range(PATTERNS):
        expression = patterns.alternatives()
        try:
            theirs = pre_tokenizers.Split(Regex(expression), "isolated", False)
        except Exception:  # no regular expression
            continue
        texts = [patterns.text() for _ in range(25)]
        try:
            got = probe.ask("split", json=with_split(expression), texts=[t.encode().hex() for t in texts])
        except ProbeError as error:
            assert "the pattern of Split is not supported: " in str(error)
            continue
        for text, pieces in zip(texts, got, strict=True):
            assert pieces == [list(ends) for _, ends in theirs.pre_tokenize_str(text)], (expression, text)
        compared += 1
    assert compared > PATTERNS // 2


def test_damaged_patterns_are_refused_or_read(probe):
    patterns = Patterns(6)
    for _ in range(PATTERNS):
        expression = patterns.alternatives()
        at = patterns.rng.randrange(len(expression) + 1)
        expression = (
            expression[:at] + patterns.rng.choice("()[]{}?*+|\\^$.:!=i,1") + expression[at + patterns.rng.randint(0, 2) :]
        )
        try:
            probe.ask("split", json=with_split(expression), texts=[b"aB1 \n".hex()])
        except ProbeError as error:
            assert "the pattern of Split is not supported: " in str(error)
