# SPDX-License-Identifier: Apache-2.0
"""The NFC normalizer in C++ gives the characters and ranges of Hugging Face's, whose Unicode version it has."""

import json
import random
import unicodedata

import conftest
import llama2_tokenizers
import pytest
from data_probe import DataProbe
from test_llama2_tokenizers import assert_equal
from test_tokenizer import CODE_POINTS, PIECES
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def composing(tmp_path_factory):
    """(ours, theirs): every character a token of its own behind NFC, so that ranges show where each comes from."""
    described = llama2_tokenizers.llama2()
    digits = {"type": "Split", "pattern": {"String": "5"}, "behavior": "Isolated", "invert": False}
    described |= {"normalizer": {"type": "NFC"}, "pre_tokenizer": digits}
    described["model"] |= {"merges": []}
    folder = tmp_path_factory.mktemp("composing")
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    ours = DataProbe(conftest.BUILD)
    ours.ask("load", folder=str(folder))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.kind = "composing"
    yield ours, theirs
    ours.close()


MARKS = [c for c in CODE_POINTS if unicodedata.combining(c)]
JOINING = [c for c in CODE_POINTS if unicodedata.normalize("NFD", c) != c and not 0xAC00 <= ord(c) < 0xD7A4]
JAMO = [
    chr(c) for c in [*range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11A7, 0x11C3), 0xAC00, 0xAC01, 0xD788, 0xD7A3]
]


def test_nfc_composes_and_sorts_as_the_engine_does(composing):
    rng = random.Random(23)
    parts = [list(unicodedata.normalize("NFD", c)) for c in JOINING]
    texts = ["".join(f"{c}a" for c in JOINING[i : i + 64]) for i in range(0, len(JOINING), 64)]
    texts += ["".join(c) + "." for c in parts]
    texts += ["a" + "".join(rng.choices(MARKS, k=rng.randint(1, 6))) + "b" for _ in range(3000)]
    texts += ["".join(rng.choices(JAMO, k=8)) for _ in range(1000)]
    texts += [
        "".join(rng.choice(rng.choice([MARKS, JOINING, JAMO, PIECES, *parts[:300]])) for _ in range(8)) for _ in range(4000)
    ]
    assert_equal(*composing, texts)
