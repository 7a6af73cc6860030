# SPDX-License-Identifier: Apache-2.0
"""Llama-2-style tokenizers in C++ give the ids, ranges and texts of Hugging Face's tokenizers package."""

import json
import random

import conftest
import llama2_tokenizers
import pytest
from data_probe import DataProbe, ProbeError
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2_tokenizers import BYTES, MARK
from test_tokenizer import ASSIGNED, CODE_POINTS
from test_tokenizer import PIECES as BYTE_LEVEL_PIECES
from tokenizers import Tokenizer

PIECES = BYTE_LEVEL_PIECES + [
    " " * 3, " " * 7, " " * 16, " " * 40, "\n" * 3, "\n" * 4, " \n", "\t\t", MARK, MARK * 2, MARK + "a", " " + MARK, "e\u0301\u0323", "\u0338",
    "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>", "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[INST", "<|user|>",
    "<|end|>", "<|assistant|>", "norm al", "norm", " norm al", "girl", "girls", "<mask>", "  \n", "extra", "été", "x", "ab", "aab", "Lily", ".\n",
    "played", " the", "e t", "zebra", "Once upon", "[TOOL_CALLS]", "</s", "/s>", "\U000e0001", "\U0010ffff", "\ue000", "\u0378", "🧑🏽‍🚀",
]  # fmt: skip


@pytest.fixture(scope="module", params=llama2_tokenizers.KINDS)
def pair(request, tmp_path_factory):
    """(ours, theirs) for one kind of tokenizer."""
    folder = tmp_path_factory.mktemp("llama2") / request.param
    theirs = llama2_tokenizers.write(request.param, folder)
    theirs.kind = request.param
    ours = DataProbe(conftest.BUILD)
    ours.ask("load", folder=str(folder))
    yield ours, theirs
    ours.close()


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


def in_characters(text, ranges):
    """Ranges of bytes, none empty, as ranges of the characters that they touch."""
    character = [i for i, c in enumerate(text) for _ in c.encode()]
    return [(character[a], character[b - 1] + 1) for a, b in ranges]


def assert_equal(ours, theirs, texts):
    expected = theirs.encode_batch(texts)
    got = ours.ask("encode_with_ranges", texts=[t.encode().hex() for t in texts])
    for text, want, (ids, ranges) in zip(texts, expected, got, strict=True):
        assert ids == want.ids, f"{text!r}: {want.tokens} but got {[theirs.id_to_token(i) for i in ids]}"
        of_text = [i for i, special in enumerate(want.special_tokens_mask) if not special]
        have, offsets = in_characters(text, [ranges[i] for i in of_text]), want.offsets
        assert have == [offsets[i] for i in of_text], f"{text!r}: {want.tokens} {offsets} but got {ranges}"
    assert ours.encode(texts[:200], special=False) == [
        e.ids for e in theirs.encode_batch(texts[:200], add_special_tokens=False)
    ]
    ids = [e.ids for e in expected]
    assert ours.decode(ids) == theirs.decode_batch(ids, skip_special_tokens=False)
    if theirs.kind != "llama2_normalized":  # the test of skipped special tokens says why
        assert ours.decode(ids, skip=True) == theirs.decode_batch(ids, skip_special_tokens=True)


def test_hostile_texts_give_the_same_ids_ranges_and_texts(pair):
    rng = random.Random(17)
    texts = ["", *PIECES, *llama2_tokenizers.CORPUS[:4]]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(3000)]
    texts += ["".join(rng.choices(CODE_POINTS, k=rng.randint(1, 8))) for _ in range(1000)]
    assert_equal(*pair, texts)


@pytest.mark.parametrize("kind", ["llama2", "gemma", "some_bytes"])
def test_every_code_point_between_letters_and_alone(probe, kind, tmp_path):
    theirs = llama2_tokenizers.write(kind, tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    texts = ["".join(f"a{c} {c}" for c in ASSIGNED[i : i + 512]) for i in range(0, len(ASSIGNED), 512)]
    assert probe.encode(texts) == [e.ids for e in theirs.encode_batch(texts)]


def test_any_text(pair):
    @settings(max_examples=100, deadline=None)
    @given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
    def check(text):
        assert_equal(*pair, [text])

    check()


def test_all_added_tokens_beside_each_other_and_inside_words(pair):
    _, theirs = pair
    names = [token.content for token in theirs.get_added_tokens_decoder().values()]
    between = ["", " ", "  ", "a", " a", "a ", "\n", MARK, "é", "🙂"]
    texts = [first + gap + second for first in names for second in names for gap in between]
    texts += [before + name + after for name in names for before in between for after in between]
    assert_equal(*pair, texts)


def test_bytes_that_form_no_character_decode_as_the_engine_does(pair):
    ours, theirs = pair
    rng = random.Random(5)
    ids = list(range(theirs.get_vocab_size()))
    bytes_there = [i for i in (theirs.token_to_id(token) for token in BYTES) if i is not None] or ids
    cases = [rng.choices(bytes_there, k=rng.randint(1, 9)) for _ in range(1000)]
    cases += [[rng.choice(rng.choice([bytes_there, ids])) for _ in range(rng.randint(1, 9))] for _ in range(2000)]
    cases += [[], [10**6, ids[5], 2**31 - 1]]
    assert ours.decode(cases) == theirs.decode_batch(cases, skip_special_tokens=False)


@pytest.mark.parametrize("unit", ["a", "the ", "ab", "👩‍👩‍👧‍👦", " ", "\n", "1", "漢", "Lily loved to play. ", " a", MARK])
def test_a_long_text_is_one_piece(pair, unit):
    """Quadratic time would be minutes for each."""
    ours, theirs = pair
    text = unit * (200_000 // len(unit.encode()))
    assert ours.encode([text])[0] == theirs.encode(text).ids


def test_special_tokens_are_skipped_whatever_the_normalizer_makes_of_them(probe, tmp_path):
    """tokenizers 0.23 compares the normalized spelling with the special tokens and so prints them; older releases do not."""
    theirs = llama2_tokenizers.write("llama2_normalized", tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    ids = theirs.encode("a b").ids + [theirs.token_to_id("</s>")]
    assert probe.decode([ids], skip=True) == ["a b"]
    assert probe.decode([ids]) == [theirs.decode(ids, skip_special_tokens=False)]


def test_a_piece_of_a_conversation_keeps_its_first_space_in_the_sample(probe, tmp_path):
    """A sample is decoded as a whole and then cut: Strip takes a space from the start of the text, not from each part."""
    llama2_tokenizers.write("llama2", tmp_path / "model")
    probe.ask("load", folder=str(tmp_path / "model"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Lily loved", "completion": " to play ☃ here"}) + "\n")
    example = probe.ask("dataset", path=str(rows))["examples"][0]
    assert example["sample"] == "<s> Lily loved« to play ☃ here</s>»"


def changed(path, value, kind="llama2"):
    described = llama2_tokenizers.KINDS[kind]()
    *parents, last = path.split(".")
    target = described
    for name in parents:
        target = target[int(name) if name.isdigit() else name]
    target[last] = value
    return described


def replace(pattern, content="b"):
    return {"type": "Replace", "pattern": pattern, "content": content}


TWO = [llama2_tokenizers.added(900, "a b", normalized=True), llama2_tokenizers.added(901, "a▁b", normalized=True)]
REFUSED = [
    ("normalizer", {"type": "NFKC"}, "normalizer may contain only Sequence, Prepend, Replace and NFC; got NFKC"),
    ("normalizer", {"type": "Precompiled"}, "got Precompiled"),
    ("normalizer", {"prepend": "x"}, "got a component without a type"),
    ("normalizer", replace({"Regex": " {2,}"}), "normalizer Replace must have a String pattern; got the Regex \" \\{2,}\""),
    ("normalizer", replace({"String": ""}), "'String' of normalizer Replace must have 1 to 64 bytes; it has 0"),
    ("normalizer", replace({"String": "a"}, "b" * 65), "'content' of Replace must have 0 to 64 bytes; it has 65"),
    ("normalizer", replace({"String": "a"}) | {"limit": 1}, "key 'limit' of Replace is not supported"),
    ("normalizer", {"type": "Prepend"}, "Prepend must have the string 'prepend'; got null"),
    ("normalizer", {"type": "Sequence", "normalizers": [replace({"String": "a"})] * 33}, "array of at most 32 components"),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replace({"String": "a"})] * 20}] * 2},
     "normalizer may have at most 32 steps; it has more"),
    ("pre_tokenizer", {"type": "Whitespace"}, "Split, Digits, Metaspace and ByteLevel; got Whitespace"),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": "ab"}, "'replacement' of Metaspace must be one character; got 'ab'"),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "last"}, "must be never, first or always"),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": MARK, "add_prefix_space": False}, "must have prepend_scheme never"),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, llama2_tokenizers.metaspace()]}, "after another"),
    ("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}, 'got "Removed"'),
    ("pre_tokenizer", {"type": "Split", "pattern": {"String": "ab"}, "behavior": "Isolated", "invert": False}, "one character"),
    ("pre_tokenizer", {"type": "ByteLevel", "use_regex": False}, "byte_fallback must be false with ByteLevel"),
    ("decoder", None, "decoder may contain only .*; got null"),
    ("decoder", {"type": "BPEDecoder"}, "ByteFallback, Fuse and Strip; got BPEDecoder"),
    ("decoder", {"type": "ByteLevel"}, "pre_tokenizer must contain ByteLevel where the decoder is"),
    ("decoder.decoders.3.content", "ab", "'content' of Strip must be one character; got 'ab'"),
    ("decoder.decoders.3.start", -1, "'start' of Strip must be a whole number of at least 0"),
    ("decoder.decoders.0.pattern", {"Regex": "a*"}, "decoder Replace must have a String pattern"),
    ("model.unk_token", "<none>", "model.unk_token must be a token of model.vocab; got '<none>'"),
    ("model.unk_token", 3, "model.unk_token must be a string or null; got a number"),
    ("model.byte_fallback", 1, "'byte_fallback' must be true or false"),
    ("model.vocab.<0x00>", 1, "its own id"),
    ("model.vocab.a", 2**31, "whole number from 0 to 2147483647"),
    ("model.merges", [["▁", "nowhere"]], "must join known tokens into a known token"),
    ("added_tokens", [llama2_tokenizers.added(7, "<s>")], "that Hugging Face's tokenizers give it, 1; got 7"),
]  # fmt: skip


@pytest.mark.parametrize("path, value, message", REFUSED, ids=[m for _, _, m in REFUSED])
def test_what_is_not_known_is_refused_by_name_with_the_ways_out(probe, path, value, message):
    with pytest.raises(ProbeError, match=message) as error:
        probe.ask("from_json", text=json.dumps(changed(path, value)))
    assert str(error.value).startswith("[t.json] ")
    if "Copy tokenizer.json from the model again" not in str(error.value):
        assert "Give rows of input_ids, tokenized in Python, or use the wheel's qlorapp command" in str(error.value)


def test_added_tokens_that_the_normalizer_makes_equal_are_refused(probe):
    """Their engine finds either of the two, as its hash table has it."""
    described = llama2_tokenizers.llama2()
    next_id = len(described["model"]["vocab"])
    described["added_tokens"] = [dict(token, id=next_id + i) for i, token in enumerate(TWO)]
    with pytest.raises(ProbeError, match="'a▁b' must have a unique spelling after the normalizer; got '▁a▁b'"):
        probe.ask("from_json", text=json.dumps(described))


def test_a_normalizer_cannot_make_a_text_grow_without_end(probe):
    steps = [replace({"String": "~"}, "~" * 64)] * 8
    probe.ask("from_json", text=json.dumps(changed("normalizer", {"type": "Sequence", "normalizers": steps})))
    with pytest.raises(ProbeError, match="must be shorter than 1 GiB and at most 16 times as long as the text"):
        probe.encode(["~" * 1000])


def test_a_character_without_a_token_is_an_error_not_a_loss(probe):
    described = changed("model.unk_token", None, "without_bytes")
    probe.ask("from_json", text=json.dumps(described))
    assert probe.encode(["the"])[0]
    with pytest.raises(ProbeError, match="every character of the text must have a token; the vocabulary has no token for '☃'"):
        probe.encode(["the ☃"])


def test_bytes_are_missing_only_where_no_character_needs_them(probe):
    described = changed("model.byte_fallback", True, "without_bytes")
    theirs = Tokenizer.from_str(json.dumps(described))
    probe.ask("from_json", text=json.dumps(described))
    assert probe.encode(["the ☃"])[0] == theirs.encode("the ☃").ids
