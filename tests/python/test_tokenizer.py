# SPDX-License-Identifier: Apache-2.0
"""The C++ tokenizer gives the ids, texts and pieces of Hugging Face's tokenizers package on hostile text."""

import json
import random
import subprocess
import sys
import time

import conftest
import pytest
from data_probe import DataProbe, ProbeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"\p{N}" + REST
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CODE_POINTS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
# All planes that have characters, and samples of the empty ones; test_the_tables_… covers the rest.
ASSIGNED = [c for c in CODE_POINTS if ord(c) < 0x33500 or 0xDFFF0 < ord(c) < 0xE0200 or ord(c) % 4096 > 4090]
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'd've said, isn't it? WE'LL SEE; you're right, I'm sure.",
    "for (int i = 0; i < 100; ++i) {\n\treturn x[i] * 3.14159;\n}\r\n\r\n    indented   text\n\n\n",
    "Ça va très bien, merci à l'été. Straße, naïve, coöperate. Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "日本語のテキストです。漢字とかなが混ざっています。中文也有。한국어 문장도 있습니다. ไทยก็มี हिन्दी भी है",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ☃️ e\u0301 a\u0308\u0323 1234567890 ½ Ⅷ ٣٤٥ 2024-12-31 $1,000.00 100% #tag @user http://example.com/?q=1&b=2",
] * 4

PIECES = [
    " ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "\u0085", "\u00a0", "\u2028", "\u3000", "\u200b", "\u200d", "\ufeff", "\0", "\x1c", "\x7f",
    "'s", "'S", "'ſ", "'t", "'RE", "'rE", "'ve", "'Ve", "'m", "'ll", "'lL", "'LL", "'D", "'", "''", "'k", "\u2019s", "'ﬆ", "'l", "'r",
    "a", "Z", "the", "ß", "ǅ", "é", "e\u0301", "\u0301", "漢字", "かな", "한국", "مرحبا", "שלום", "हिन्दी", "ไทย", "ﬀ", "𝕏", "𐐷", "\U00010d40",
    "0", "12", "12345678901234567890", "½", "Ⅷ", "٣", "²", "๑", "〇", "𝟘", "१२३", "👩‍👩‍👧‍👦", "🏳️‍🌈", "☃️", "🇩🇪", "😀", "$", "...", "!!!\n", "?\r\n\r\n",
    "<|eot_id|>", "<|eot", "_id|>", "<|x|>", "<mask>", "ext", "extra", "<|end", "<|eot_id|", "norm", "_", "-", "Ġ", "Ċ", "\u0120a", "\ufffd", "\U0010ffff",
]  # fmt: skip


def llama3_like(folder, merge_form="list"):
    """Llama 3's file: Split + ByteLevel, ignore_merges, special tokens of every kind, BOS by a template inside a Sequence."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=BYTE_ALPHABET, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", AddedToken("<|x|>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens(
        [AddedToken("extra", single_word=True), AddedToken("ext"), AddedToken("norm", normalized=True, lstrip=True)]
    )
    tokenizer.add_tokens(
        [AddedToken("<|eot", normalized=True), AddedToken("é", normalized=True), AddedToken("the", normalized=True)]
    )
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return save(
        tokenizer, folder, merge_form, bos_token="<|begin_of_text|>", eos_token={"content": "<|eot_id|>", "special": True}
    )


def qwen2_like(folder):
    """Qwen 2 and 3: NFC in front of a byte-level model; one digit a piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=BYTE_ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|x|>", AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens(
        [AddedToken("extra", single_word=True), AddedToken("e\u0301x"), AddedToken("a\u0300y", normalized=False)]
    )
    return save(tokenizer, folder, "string", bos_token=None, eos_token="<|endoftext|>")


def gpt2_like(folder, add_prefix_space=False, merge_form="string", digits=None):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    tokenizer.pre_tokenizer = byte_level if digits is None else pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=BYTE_ALPHABET, special_tokens=["<|endoftext|>", "<|x|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<mask>", rstrip=True), AddedToken("extra", single_word=True), "  \n"])
    return save(tokenizer, folder, merge_form, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def save(tokenizer, folder, merge_form, **config):
    folder.mkdir()
    described = json.loads(tokenizer.to_str())
    if merge_form == "string":
        described["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


KINDS = {
    "llama3": llama3_like,
    "qwen2": qwen2_like,
    "gpt2": gpt2_like,
    "gpt2_prefix_space": lambda f: gpt2_like(f, add_prefix_space=True, merge_form="list"),
    "smollm": lambda f: gpt2_like(f, digits=pre_tokenizers.Digits(individual_digits=True)),
}


@pytest.fixture(scope="module")
def build():
    return conftest.BUILD


@pytest.fixture(scope="module", params=KINDS)
def pair(request, build, tmp_path_factory):
    """(ours, theirs, what loading said) for one kind of tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    theirs = KINDS[request.param](folder)
    ours = DataProbe(build)
    yield ours, theirs, ours.ask("load", folder=str(folder))
    ours.close()


@pytest.fixture(scope="module")
def probe(build):
    ours = DataProbe(build)
    yield ours
    ours.close()


def assert_equal(ours, theirs, texts, special=True):
    expected = [e.ids for e in theirs.encode_batch(texts, add_special_tokens=special)]
    got = ours.encode(texts, special)
    for text, want, have in zip(texts, expected, got, strict=True):
        assert have == want, (
            f"{text!r}: {[theirs.id_to_token(i) for i in want]} but got {[theirs.id_to_token(i) for i in have]}"
        )
    assert ours.decode(expected) == theirs.decode_batch(expected, skip_special_tokens=False)
    assert ours.decode(expected, skip=True) == theirs.decode_batch(expected, skip_special_tokens=True)


def test_ten_thousand_hostile_texts_give_the_same_ids_and_come_back(pair):
    ours, theirs, _ = pair
    rng = random.Random(7)
    texts = ["", *PIECES, *CORPUS[:5]]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(8000)]
    texts += ["".join(rng.choices(CODE_POINTS, k=rng.randint(1, 8))) for _ in range(2000)]
    assert_equal(ours, theirs, texts)
    assert_equal(ours, theirs, texts[:500], special=False)


def test_every_code_point_between_letters_and_alone(pair):
    ours, theirs, _ = pair
    texts = ["".join(f"a{c} {c}" for c in ASSIGNED[i : i + 512]) for i in range(0, len(ASSIGNED), 512)]
    assert_equal(ours, theirs, texts)


def test_any_text(pair):
    ours, theirs, _ = pair

    @settings(max_examples=300, deadline=None)
    @given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
    def check(text):
        assert_equal(ours, theirs, [text])

    check()


def test_special_tokens_are_named_by_the_config(pair):
    _, theirs, about = pair
    assert about["vocab_size"] == theirs.get_vocab_size()
    name = "<|eot_id|>" if theirs.token_to_id("<|eot_id|>") is not None else "<|endoftext|>"
    assert about["eos"] == theirs.token_to_id(name) and about["eos_ids"] == [about["eos"]] and about["pad"] is None


@pytest.mark.parametrize(
    "split, pattern",
    [
        ("llama3", pre_tokenizers.Split(Regex(LLAMA3), "isolated")),
        ("qwen2", pre_tokenizers.Split(Regex(QWEN2), "isolated")),
        ("gpt2", pre_tokenizers.Split(Regex(GPT2), "isolated")),
        ("individual_digits", pre_tokenizers.Digits(True)),
        ("contiguous_digits", pre_tokenizers.Digits(False)),
    ],
)
def test_splits_fall_where_the_regex_engine_puts_them(probe, split, pattern):
    rng = random.Random(11)
    texts = ["".join(f"'{c}x'l{c} '{c}e" for c in CODE_POINTS[i : i + 512]) for i in range(0, 0x3000, 512)]  # case folding
    texts += ["".join(f"{c} {c}\n{c}1{c}a\t{c}'s" for c in ASSIGNED[i : i + 512]) for i in range(0, len(ASSIGNED), 512)]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 20))) for _ in range(3000)]
    got = probe.ask("split", split=split, texts=[t.encode().hex() for t in texts])
    for text, ends in zip(texts, got, strict=True):
        assert ends == [end for _, (_, end) in pattern.pre_tokenize_str(text)], repr(text[:200])


def test_contractions_fold_case_for_the_same_code_points(probe):
    pattern = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    texts = ["'" + c + "b" for c in ASSIGNED[:0x20000]] + ["'" + a + c + "b" for a in "lLrvſ" for c in ASSIGNED[:0x3000]]
    got = probe.ask("split", split="llama3", texts=[t.encode().hex() for t in texts])
    for text, ends in zip(texts, got, strict=True):
        assert ends == [end for _, (_, end) in pattern.pre_tokenize_str(text)], repr(text)


@pytest.mark.parametrize("script", ["make_unicode_tables.py", "make_normalization_tables.py"])
def test_the_tables_are_those_of_the_installed_engines_for_every_code_point(script):
    assert subprocess.run([sys.executable, conftest.ROOT / "scripts" / script, "--check"]).returncode == 0


@pytest.mark.parametrize("unit", ["a", "the ", "ab", "👩‍👩‍👧‍👦", " ", "\n", "1", "'", "漢"])
def test_a_piece_of_a_megabyte_is_not_quadratic(pair, unit):
    ours, theirs, _ = pair
    text = unit * (200_000 // len(unit.encode()))
    began = time.monotonic()
    ids = ours.encode([text])[0]
    assert time.monotonic() - began < 2.0
    assert ids == theirs.encode(text).ids


def test_ranges_cut_the_text_into_its_tokens(pair):
    ours, theirs, _ = pair
    text = "Hello <|x|> wörld's 12345 漢字  \n end"
    encoded, raw = theirs.encode(text), text.encode()
    ranges = ours.ask("ranges", text=raw.hex())
    covered = [raw[a:b] for a, b in ranges]
    in_front = encoded.tokens[0] == "Ġ"  # a space that was put there: it belongs to the first character
    assert ranges[: 2 * in_front] == [[0, 1]] * 2 * in_front
    assert b"".join(covered[in_front:]) == raw
    for token, piece in zip(encoded.tokens, covered, strict=True):
        if token != "<|begin_of_text|>" and not token.startswith("Ġ"):
            assert theirs.decoder.decode([token]).encode() == piece or "\ufffd" in theirs.decoder.decode([token])


@pytest.mark.parametrize(
    "raw, offset",
    [(b"ab\xff", 2), (b"\xc0\x80", 0), (b"a\xed\xa0\x80", 1), (b"\xf4\x90\x80\x80", 0), (b"ok\xe2\x82", 2), (b"\x80", 0), (b"\xf0\x82\x82\xac", 0)],
)  # fmt: skip
def test_ill_formed_utf8_is_refused_with_its_offset(pair, raw, offset):
    with pytest.raises(ProbeError, match=f"well-formed UTF-8; got byte {raw[offset]} at offset {offset}"):
        pair[0].ask("encode", texts=[raw.hex()])


def test_bytes_that_form_no_character_decode_as_the_engine_does(pair):
    ours, theirs, _ = pair
    rng = random.Random(3)
    singles = [theirs.token_to_id(c) for c in BYTE_ALPHABET]
    ids = [[rng.choice(singles) for _ in range(rng.randint(1, 9))] for _ in range(3000)] + [[10**6, singles[0], 2**31 - 1]]
    assert ours.decode(ids) == theirs.decode_batch(ids, skip_special_tokens=False)


def described(**changes):
    vocabulary = {c: i for i, c in enumerate(BYTE_ALPHABET)} | {"ab": 256, "abc": 257}
    file = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "vocab": vocabulary, "merges": ["a b", ["ab", "c"]]},
    }
    for path, value in changes.items():
        target, *rest = path.split("__")
        if rest:
            file[target] = dict(file[target], **{rest[0]: value})
        else:
            file[target] = value
    return file


TOKEN = {
    "id": 258,
    "content": "<x>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}
REFUSED = [
    ({"normalizer": {"type": "NFKC"}}, "Prepend, Replace and NFC; got NFKC"),
    ({"pre_tokenizer": {"type": "Punctuation"}}, "contain only Split, Digits, Metaspace and ByteLevel; got Punctuation"),
    (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}},
        "got \\(a\\+\\)\\+b",
    ),
    ({"pre_tokenizer": {"type": "Digits"}}, "must contain ByteLevel where the decoder is ByteLevel"),
    ({"post_processor": {"type": "RobertaProcessing"}}, "got RobertaProcessing"),
    ({"post_processor": dict(TEMPLATE, single=[])}, "must contain the text A"),
    ({"decoder": {"type": "Fuse"}}, "decoder must be ByteLevel where the pre_tokenizer is; got Fuse"),
    ({"decoder": None}, "decoder may contain only .* got null"),
    ({"model__type": "WordPiece"}, "model must be BPE or Unigram; got WordPiece"),
    ({"model__byte_fallback": True}, "byte_fallback must be false with ByteLevel"),
    ({"model__dropout": 0.1}, "dropout must be null"),
    ({"model__continuing_subword_prefix": "##"}, "continuing_subword_prefix must be null"),
    ({"model__merges": ["a b c"]}, "two tokens with a space between"),
    ({"model__merges": ["a q"]}, "must join known tokens"),
    ({"model__merges": [["a", 1]]}, "string or a pair of strings"),
    ({"model__vocab": {"a": -1}}, "whole number from 0"),
    ({"model__vocab": {"a": 1.5}}, "whole number from 0"),
    ({"model__vocab": {"a": 0, "b": 0}}, "its own id"),
    ({"model__vocab": {}}, "an object with tokens"),
    ({"model__new_thing": 1}, "key 'new_thing' of the model is not supported"),
    ({"new_thing": 1}, "key 'new_thing' of the file is not supported"),
    ({"added_tokens": [dict(TOKEN, id=300)]}, "must have the id that Hugging Face's tokenizers give it, 258; got 300"),
    ({"added_tokens": [dict(TOKEN, content="")]}, "1 to 4096 bytes"),
    ({"added_tokens": [TOKEN, dict(TOKEN, id=259)]}, "'<x>' must appear once"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m for _, m in REFUSED])
def test_what_is_not_known_is_refused_by_name_with_advice(probe, changes, message):
    assert probe.ask("from_json", text=json.dumps(described())) is True
    with pytest.raises(ProbeError, match=message) as error:
        probe.ask("from_json", text=json.dumps(described(**changes)))
    assert str(error.value).startswith("[t.json] ")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "valid JSON"),
        ("[" * 100000, "nested at most 64 levels"),
        ("[" * 65 + "]" * 65, "nested at most 64 levels"),
        ("[" * 64 + "]" * 64, "must be a JSON object"),
        ('{"a":1,"a":2}', "'a' appears twice"),
        ('{"version": NaN}', "valid JSON"),
        ('{"version": "\\ud800"}', "valid JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_hostile_json_is_one_clear_error(probe, text, message):
    with pytest.raises(ProbeError, match=message):
        probe.ask("from_json", text=text)


def test_a_byte_without_a_token_is_an_error_not_a_loss(probe):
    probe.ask("from_json", text=json.dumps(described(model__vocab={"a": 0, "b": 1, "ab": 2}, model__merges=["a b"])))
    assert probe.encode(["abba"]) == [[2, 1, 0]]
    with pytest.raises(ProbeError, match="none for byte 99"):
        probe.encode(["abc"])


def test_a_folder_without_tokenizer_is_named(probe, tmp_path):
    with pytest.raises(ProbeError, match="must contain tokenizer.json"):
        probe.ask("load", folder=str(tmp_path))
