# SPDX-License-Identifier: Apache-2.0
"""The C++ tokenizer gives the ids, characters and texts of Hugging Face's tokenizers for each family's pipeline.

QLORAPP_TOKENIZER_TEXTS=100000 compares that many texts per family; the default is a few hundred.
"""

import json
import os
import random
import re
import time

import conftest
import family_tokenizers
import pytest
import transformers
from data_probe import DataProbe, ProbeError
from test_llama2_tokenizers import PIECES as SPELLINGS
from test_llama2_tokenizers import in_characters
from test_tokenizer import ASSIGNED, CODE_POINTS, described
from tokenizers import Regex, pre_tokenizers

TEXTS = int(os.environ.get("QLORAPP_TOKENIZER_TEXTS", "250"))
PIECES = SPELLINGS + [
    "ABC", "Ab", "aB", "ABCdef", "DŽ", "Dž", "dž", "ʰ", "ªº", "İ", "ıI", "ﬁ", "Ⅳⅳ", "A\u0301B", "b\u0301C", "\u0301\u0301", "\u20dd", "नी", "ก็",
    "'ſt", "'S't", "x'll", "X'LLy", "'Re", "3'd", "K", "'K", "/", "//\n", "/\r\n/", "!/", "¡a", "«b»", "-a", "_b", "#Tag", "@x1", "—", "（", "）。",
    "　", "！？", "‘a’", "゛", "ー", "・", "ｱ", "ㄅㄆ", "가나", "힣\u11a8", "ㆎ", "\u0800", "ࠀ一", "\u2000", "\u200a\u205f", "\u0b72", "①②", "๓๔", "\U0001fbf5",
    "\u2028\n", "\x0b\x0c", "\x85\n", "\r\r\n\n", " \r\n ", "\t \n\t", "    \n    ", "a  ", "  $", "\u00ad", "\u061c\u202e", "\ue000", "\U000f0000", "\u0378",
]  # fmt: skip
KINDS = family_tokenizers.kinds()


def hostile(count, seed):
    """Texts of spellings, of code points of all planes, and long runs."""
    rng = random.Random(seed)
    for i in range(count):
        if i % 5 == 4:
            yield "".join(rng.choices(CODE_POINTS if i % 2 else ASSIGNED, k=rng.randint(1, 10)))
        elif i % 97 == 0:
            yield rng.choice(PIECES) * rng.randint(50, 400) + rng.choice(PIECES)
        elif i % 7 == 0:
            yield "".join(p * rng.choice([1, 1, 2, 3, 9]) for p in rng.choices(PIECES, k=rng.randint(2, 8)))
        else:
            yield "".join(rng.choices(PIECES, k=rng.randint(1, 14)))


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


def assert_equal(ours, theirs, texts, name):
    expected = theirs.encode_batch(texts)
    got = ours.ask("encode_with_ranges", texts=[t.encode().hex() for t in texts])
    for text, want, (ids, ranges) in zip(texts, expected, got, strict=True):
        assert ids == want.ids, f"{name}: {text!r}: {want.tokens} but got {[theirs.id_to_token(i) for i in ids]}"
        of_text = [i for i, special in enumerate(want.special_tokens_mask) if not special]
        have, offsets = in_characters(text, [ranges[i] for i in of_text]), want.offsets
        assert have == [offsets[i] for i in of_text], f"{name}: {text!r}: {want.tokens} {offsets} but got {ranges}"
    ids = [e.ids for e in expected]
    assert ours.decode(ids) == theirs.decode_batch(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", KINDS)
def test_hostile_texts_give_the_same_ids_characters_and_texts(probe, name, tmp_path):
    theirs = KINDS[name](tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    texts = ["", *PIECES]
    for text in hostile(TEXTS, name):
        texts.append(text)
        if len(texts) == 5000:
            assert_equal(probe, theirs, texts, name)
            texts = []
    assert_equal(probe, theirs, texts, name)


@pytest.mark.parametrize(
    "name", [name for name in family_tokenizers.BYTE_LEVEL if TEXTS > 250 or "o200k" in name or "V3" in name]
)
def test_every_code_point_beside_letters_marks_digits_and_spaces(probe, name, tmp_path):
    theirs = KINDS[name](tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    step = 1 if TEXTS > 250 else 29
    points = ASSIGNED[::step]
    texts = ["".join(f"a{c}B {c}b\u0301{c}1{c}\n{c}!{c}'s" for c in points[i : i + 256]) for i in range(0, len(points), 256)]
    assert probe.encode(texts) == [e.ids for e in theirs.encode_batch(texts)]


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("name", ["cl100k: Phi-4, Granite 4, OLMo 2 and 3", "tekken: Mistral Nemo, Ministral 3"])
def test_bos_is_put_where_transformers_puts_it(probe, name, add_bos, tmp_path):
    """By the post-processor of tokenizer.json; add_bos_token of tokenizer_config.json changes nothing."""
    theirs = KINDS[name](tmp_path / "model")
    bos = "<s>" if "tekken" in name else "<|endoftext|>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos} | (
        {} if add_bos is None else {"add_bos_token": add_bos}
    )
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    for text in ("", "Hello you", bos + " x"):
        assert probe.encode([text])[0] == loaded(text)["input_ids"] == theirs.encode(text).ids
        assert probe.encode([text], special=False)[0] == loaded(text, add_special_tokens=False)["input_ids"]


def with_split(regex, behavior="Isolated", invert=False):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(described(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]}))


READ = [r"a|ab|abc", r"\s+$", r"(?:ab?c|a)b{2,3}", r"x(?!y)|xy", r"\p{Lu}(?=\p{Ll})\p{L}+", r"[^a-c\d]+", r"(a|b)?c", r"\S+", r".+", r"a$",
        r"[\S]|\s{2}", r"\P{L}\p{L}", r"(?i:'s|'ve)x?", r"a{2}b{2,}", r"[\]\-a]++b", r"a?+a", r"\.\*"]  # fmt: skip


@pytest.mark.parametrize("regex", READ)
@pytest.mark.parametrize("behavior, invert", [("Isolated", False), ("Isolated", True), ("Removed", True)])
def test_a_pattern_matches_where_the_regex_engine_does(probe, regex, behavior, invert):
    theirs = pre_tokenizers.Split(Regex(regex), behavior.lower(), invert)
    rng = random.Random(regex)
    texts = ["".join(rng.choices("aabbcxyABé'sve \n\t1.-]*漢", k=rng.randint(1, 14))) for _ in range(400)]
    got = probe.ask("split", json=with_split(regex, behavior, invert), texts=[t.encode().hex() for t in texts])
    for text, pieces in zip(texts, got, strict=True):
        assert pieces == [list(ends) for _, ends in theirs.pre_tokenize_str(text)], (text, regex)


REFUSED = [
    (r"(a+)+b", "a group must not be repeated"),
    (r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", "a group must not be repeated"),
    (r"a*", "must not match an empty text"),
    (r"\p{Han}+", r"\\p\{Han\} is not supported"),
    (r"(?<=a)b", "a group of this kind"),
    (r"(?i:straße)", "may hold only contractions"),
    (r"\bword", r"\\b is not supported"),
    (r"a+?", "a quantifier behind another"),
    (r"[a[b]]", "a class inside another"),
    (r"[a&&b]", "a class inside another"),
    (r"(a", "a group does not end"),
    (r"a)", "a '\\)' closes no group"),
    (r"[a", "a class does not end"),
    (r"[a-", "a class does not end"),
    ("a" * 5000, "at most 4096 bytes"),
    ("(a)?" * 200 + "b", "it is too long"),
]


@pytest.mark.parametrize("regex, rule", REFUSED, ids=[rule for _, rule in REFUSED])
def test_a_pattern_that_is_not_known_is_refused_with_the_reason(probe, regex, rule):
    with pytest.raises(ProbeError, match="the pattern of Split is not supported: .*" + rule) as error:
        probe.ask("from_json", text=with_split(regex))
    assert "transformers" in str(error.value)


def test_other_behaviors_of_a_regex_are_refused(probe):
    for behavior, invert in (("Removed", False), ("MergedWithNext", False), ("Contiguous", True)):
        with pytest.raises(ProbeError, match=f'Isolated, or Removed with invert; got "{behavior}"'):
            probe.ask("from_json", text=with_split("a+", behavior, invert))


def test_a_hostile_pattern_ends_with_an_error(probe):
    probe.ask("from_json", text=with_split("a?" * 40 + "a*a*a*a*ab"))
    began = time.monotonic()
    with pytest.raises(ProbeError, match="must divide a text in linear time"):
        probe.encode(["a" * 20000])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["o200k: Phi-4-mini, gpt-oss", "DeepSeek V3, R1 and Hunyuan", "DeepSeek LLM"])
def test_long_runs_are_not_quadratic(probe, name, tmp_path):
    theirs = KINDS[name](tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    units = " ", "a", "A", "漢", "1", "\n", "\u0301", "!", "aB", "Aa\u0301"
    began = time.monotonic()
    probe.encode([unit * (100_000 // len(unit.encode())) + "a" for unit in units])
    assert time.monotonic() - began < 5
    texts = [unit * 3000 + end for unit in units for end in ("a", "")]
    assert probe.encode(texts) == [e.ids for e in theirs.encode_batch(texts)]


@pytest.mark.parametrize("name", ["tekken: Mistral Nemo, Ministral 3", "DeepSeek V3, R1 and Hunyuan"])
def test_long_texts_are_cut_where_words_end(probe, name, tmp_path):
    theirs = KINDS[name](tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    rng = random.Random(3)
    words = [*"".join(PIECES).split(), " ", "\n", "the", "Fox", " of", "  "]
    text = " ".join(rng.choices(words, k=60_000))
    assert len(text.encode()) > 1 << 19  # more than one window
    assert probe.encode([text])[0] == theirs.encode(text).ids


def test_a_text_without_the_end_of_a_word_has_a_limit(probe, tmp_path):
    family_tokenizers.kinds()["DeepSeek LLM"](tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    with pytest.raises(ProbeError, match=re.escape("a text without the end of a word may have at most 8388608 bytes")):
        probe.encode(["漢1" * (5 << 20)])
