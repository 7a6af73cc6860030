# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json files in the forms that Llama 2, TinyLlama, Mistral, Phi-3 and Gemma publish, trained here on a few sentences.

Each builder returns a dict; `write` saves it. `python tests/python/llama2_tokenizers.py DIR` writes all of them.
"""

import copy
import json
import pathlib
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'd've said, isn't it? You're right, I'm sure of it.",
    "for (int i = 0; i < 100; ++i) {\n\treturn x[i] * 3.14159;\n}\r\n\r\n    indented   text\n\n\n",
    "Ça va très bien, merci à l'été. Straße, naïve. Привет, мир! Γειά σου Κόσμε. 日本語のテキストです。 한국어 ½ 2024-12-31",
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her friends.",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "▁"


def trained(first_tokens, merged_runs=True):
    """(vocabulary, merges) as SentencePiece lays them out: special tokens, bytes, then what was learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=len(first_tokens) + 500, special_tokens=first_tokens, limit_alphabet=90, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(m) for m in model["merges"]]
    if merged_runs:  # runs of spaces, which Metaspace never shows to the trainer
        for length in range(2, 17):
            vocabulary[MARK * length] = len(vocabulary)
            merges += [(MARK * left, MARK * (length - left)) for left in range(1, length)]
    return vocabulary, merges


def added(token_id, content, **flags):
    token = {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return token | {"special": True} | flags


def text_tokens(vocabulary, taken=0):
    """Tokens that are not special, with each flag. `taken`: added tokens behind the vocabulary before them."""
    tokens = [
        added(None, "extra", single_word=True, normalized=True, special=False),
        added(None, "norm al", normalized=True, lstrip=True, special=False),
        added(None, "<mask>", lstrip=True, rstrip=True, special=False),
        added(None, "girl", single_word=True, special=False),
        added(None, "  \n", normalized=True, rstrip=True, special=False),
        added(None, "é", normalized=True, special=False),
    ]
    next_id = len(vocabulary) + taken
    for token in tokens:  # a token of the vocabulary keeps its id
        token["id"] = vocabulary.get(token["content"], next_id)
        next_id += token["id"] == next_id
    return tokens


def template(before=(), after=()):
    tokens = dict(before) | dict(after)
    special = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
    single = [*map(special, dict(before)), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, dict(after))]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in tokens.items()},
    }


def decoder(strip=True):
    steps = [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {"type": "Sequence", "decoders": steps + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * strip}


def replace_spaces():
    return {"type": "Replace", "pattern": {"String": " "}, "content": MARK}


def metaspace(scheme="first", split=False):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


def file(vocabulary, merges, tokens, **components):
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [list(merge) for merge in merges],
    }
    described = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None}
    described |= {"pre_tokenizer": None, "post_processor": template([("<s>", 1)]), "decoder": decoder(), "model": model}
    return described | components


def llama2():
    """Llama 2 and TinyLlama: legacy=true."""
    vocabulary, merges = trained(["<unk>", "<s>", "</s>", *BYTES])
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace_spaces()]}
    tokens = [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>"), *text_tokens(vocabulary)]
    return file(vocabulary, merges, tokens, normalizer=normalizer)


def llama2_normalized():
    """The first Llama 2 files: the normalizer is applied to special tokens, too."""
    described = llama2()
    for token in described["added_tokens"]:
        token["normalized"] = True
    return described


def llama2_strings():
    """Merges as strings, as tokenizers < 0.20 wrote them."""
    described = llama2()
    described["model"]["merges"] = ["#version: 0.2", *(" ".join(merge) for merge in described["model"]["merges"])]
    return described


def with_metaspace(scheme, split):
    """legacy=false: no normalizer."""

    def build():
        return llama2() | {"normalizer": None, "pre_tokenizer": metaspace(scheme, split)}

    return build


def mistral():
    """Mistral v3: control tokens inside the vocabulary, EOS put behind the text."""
    control = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    vocabulary, merges = trained(["<unk>", "<s>", "</s>", *control, *BYTES])
    names = ["<unk>", "<s>", "</s>", *control]
    tokens = [added(i, name) for i, name in enumerate(names)] + text_tokens(vocabulary)
    ends = template([("<s>", 1)], [("</s>", 2)])
    return file(vocabulary, merges, tokens, pre_tokenizer=metaspace(), post_processor=ends)


def phi3():
    """Phi-3: turn tokens behind the vocabulary that eat the white space after them."""
    described = llama2()
    start = len(described["model"]["vocab"])
    names = ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"]
    described["added_tokens"][2]["rstrip"] = True
    described["added_tokens"][3:] = [added(start + i, name, rstrip=i > 0) for i, name in enumerate(names)]
    described["added_tokens"] += text_tokens(described["model"]["vocab"], len(names))
    return described


def gemma():
    """Gemma: no space in front, a tab instead of its byte, line ends that merge and that are tokens."""
    vocabulary, merges = trained(["<pad>", "<eos>", "<bos>", "<unk>", *BYTES])
    names = {"<0x09>": "\t", "\t": "<unused0>"}
    renamed = {names.get(token, token): i for token, i in vocabulary.items()}
    for length in (1, 2, 3):
        if "\n" * length not in renamed:
            renamed["\n" * length] = len(renamed)
        merges += [("\n" * left, "\n" * (length - left)) for left in range(1, length)]
    tokens = [added(i, name) for i, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>"])]
    tokens.append(added(renamed["\n\n\n"], "\n\n\n", special=False))
    tokens += [added(len(renamed), "<start_of_turn>"), added(len(renamed) + 1, "<end_of_turn>")]
    tokens += text_tokens(renamed, 2)
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    parts = {"normalizer": replace_spaces(), "pre_tokenizer": split, "decoder": decoder(strip=False)}
    return file(renamed, merges, tokens, post_processor=template([("<bos>", 2)]), **parts)


def across_words():
    """Merges that join a word with the next one's space, so that no text may be cut at spaces; whole texts may be tokens."""
    described = llama2()
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    fresh = [["e", MARK], ["e" + MARK, "t"], ["<0xF0>", MARK], [MARK + "a", MARK + "a"], [".", "<0x0A>"]]
    for left, right in fresh:
        assert left in vocabulary and right in vocabulary, (left, right)
        vocabulary[left + right] = len(vocabulary)
    described["model"]["merges"] = fresh + merges
    described["added_tokens"][3:] = text_tokens(vocabulary)
    return described


def ignoring_merges():
    described = with_metaspace("always", True)()
    described["model"]["ignore_merges"] = True
    vocabulary = described["model"]["vocab"]
    for word in (MARK + "zebra", MARK + "the", "漢字"):
        vocabulary.setdefault(word, len(vocabulary))
    described["added_tokens"][3:] = text_tokens(vocabulary)
    return described


def without_some_bytes(fuse_unk):
    """byte_fallback with half of the bytes: what cannot be spelled becomes <unk>."""

    def build():
        vocabulary, merges = trained(["<unk>", "<s>", "</s>", *BYTES[:0xA0], *BYTES[0xE0:0xE4]])
        described = llama2()
        tokens = [*described["added_tokens"][:3], *text_tokens(vocabulary)]
        described = file(vocabulary, merges, tokens, normalizer=described["normalizer"])
        described["model"]["fuse_unk"] = fuse_unk
        return described

    return build


def without_bytes():
    """SentencePiece without byte_fallback; Metaspace decodes."""
    vocabulary, merges = trained(["<unk>", "<s>", "</s>"])
    tokens = [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>"), *text_tokens(vocabulary)]
    described = file(vocabulary, merges, tokens, pre_tokenizer=metaspace("always", True), decoder=metaspace("always", True))
    described["model"]["byte_fallback"] = False
    return described


def deleting():
    """Replacements that shorten and lengthen the text, digits apart, and a prefix of two characters."""
    described = llama2()
    replaced = [("x", ""), ("été", "e"), ("ß", "ss"), ("ab", "b" + MARK), (" ", MARK)]
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in replaced]
    described["normalizer"] = {"type": "Sequence", "normalizers": [*steps, {"type": "Prepend", "prepend": MARK + "é"}]}
    digits = {"type": "Digits", "individual_digits": True}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [metaspace("first", True), digits]}
    described["decoder"]["decoders"][3] |= {"start": 3, "stop": 0}
    return described


KINDS = {
    "llama2": llama2,
    "llama2_normalized": llama2_normalized,
    "llama2_strings": llama2_strings,
    "metaspace_first": with_metaspace("first", False),
    "metaspace_always_split": with_metaspace("always", True),
    "metaspace_never": with_metaspace("never", False),
    "mistral": mistral,
    "phi3": phi3,
    "gemma": gemma,
    "across_words": across_words,
    "ignoring_merges": ignoring_merges,
    "some_bytes": without_some_bytes(fuse_unk=True),
    "some_bytes_unfused": without_some_bytes(fuse_unk=False),
    "without_bytes": without_bytes,
    "deleting": deleting,
}


def write(kind: str, folder: pathlib.Path) -> Tokenizer:
    """Saves a folder as models have it and returns what Hugging Face's package makes of it."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(copy.deepcopy(KINDS[kind]()), ensure_ascii=False), encoding="utf-8")
    names = {"bos_token": "<bos>", "eos_token": "<eos>"} if kind == "gemma" else {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    for name in KINDS:
        write(name, pathlib.Path(sys.argv[1]) / name)
