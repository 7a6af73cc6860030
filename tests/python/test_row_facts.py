# SPDX-License-Identifier: Apache-2.0
"""What is said of rows: the place of malformed JSON, answers of nothing, and which special tokens count."""

import json
import random

import conftest
import pytest
from data_probe import DataProbe, ProbeError
from test_data import Data
from test_tokenizer import llama3_like
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = Data(tmp_path_factory.mktemp("row_facts"), llama3_like)
    yield out
    out.probe.close()


@pytest.fixture(scope="module")
def probe():
    out = DataProbe(conftest.BUILD)
    yield out
    out.close()


# --- malformed JSON


def place_of(text, damage):
    """Line and column of the first character of `damage`, as editors count them."""
    before = text[: text.index(damage)]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


@pytest.mark.parametrize("rows", [0, 1, 40_000], ids=["at the start", "behind a row", "far into the file"])
@pytest.mark.parametrize("indent", [None, 2], ids=["one line", "many lines"])
@pytest.mark.parametrize(
    "element, damage, at",
    [
        ('{"text": "é漢" "more": 1}', '"more"', 5),
        ('{"text":\n  "é",}', "}", 0),
        ('{"text": nul}', "nul", 3),
        ('{"text": "a"} {"text": "b"}', '{"text": "b"}', 0),
    ],
)
def test_malformed_json_in_an_array_is_named_by_line_and_column_of_the_file(tmp_path, probe, rows, indent, element, damage, at):
    good = json.dumps([{"text": f"zoé {i}"} for i in range(rows)], indent=indent, ensure_ascii=False)
    text = good[:-1].rstrip() + (", " if rows else "") + element.replace(damage, "\0" + damage, 1) + "]"
    line, column = place_of(text, "\0")
    path = tmp_path / "rows.json"
    path.write_text(text.replace("\0", ""))
    with pytest.raises(ProbeError, match=f"must be valid JSON in UTF-8; line {line}, column {column + at}: "):
        probe.ask("rows", path=str(path))


def test_a_comma_without_a_row_is_named_where_it_stands(tmp_path, probe):
    path = tmp_path / "rows.json"
    for text, line, column, side in [
        ('[{"text": "é"},]', 1, 15, "behind"),
        ('\n\n  [{"text": "a"}\n  ,\n\n]', 4, 3, "behind"),
        ('[,{"text": "a"}]', 1, 2, "in front of"),
        ('[{"text": "a"},\n{"text": "漢字"}, ,{"text": "b"}]', 2, 17, "in front of"),
    ]:
        path.write_text(text)
        with pytest.raises(
            ProbeError, match=rf"rows.json:{line}\] .*; line {line}, column {column}: there is no row {side} the comma"
        ):
            probe.ask("rows", path=str(path))


def test_malformed_json_lines_are_named_by_line_and_column(tmp_path, probe):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n  {"text": "a"}\n{"text": "\xc3\xa9" 1}\n')
    with pytest.raises(ProbeError, match=r"rows.jsonl:3\] .*; line 3, column 14: "):
        probe.ask("rows", path=str(path))
    path.write_bytes(b' \n  {"text" "a"}\n')
    with pytest.raises(ProbeError, match=r"rows.jsonl:2\] .*; line 2, column 13: "):
        probe.ask("rows", path=str(path))


# --- answers of nothing


def test_answers_of_nothing_are_counted_and_said(data):
    pair, empty = {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " \n"}
    got = data.read([pair, empty, pair, {"prompt": "d", "completion": ""}])
    assert got["empty_answers"] == 2
    assert any(w.startswith("2 of 4 rows have an empty answer or text (first in line 2)") for w in got["warnings"])
    assert data.read([pair, pair])["empty_answers"] == 0
    question, said, silent = ({"role": r, "content": c} for r, c in [("user", ""), ("assistant", "yes"), ("assistant", " ")])
    for options in ({}, {"assistant_only_loss": True}):
        got = data.read(
            [{"messages": [question, said]}, {"messages": [question, said, question, silent]}], chat="chatml", **options
        )
        assert got["empty_answers"] == 1, options
    got = data.read([{"prompt": [question, silent, question], "completion": [said]}], chat="chatml")
    assert got["empty_answers"] == 0  # the empty one is not trained


# --- special tokens, as transformers' AutoTokenizer has them


def folder_with(tmp_path, config, special_tokens_map):
    folder = tmp_path / "tokenizer"
    llama3_like(folder)
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()) | {"eos_token": "<|eot_id|>"} | config
    path.write_text(
        json.dumps({k: v for k, v in known.items() if v is not ...} | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    return folder


NAMED = {"content": "<|x|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
MAPS = {
    "another EOS": ({}, {"eos_token": "<|end_of_text|>"}),
    "an EOS with flags": ({}, {"eos_token": NAMED}),
    "an EOS that only the map names": ({"eos_token": ...}, {"eos_token": "<|x|>", "pad_token": "<mask>"}),
    "BOS and padding": ({}, {"bos_token": "<|x|>", "pad_token": "<|end_of_text|>"}),
    "another key": ({}, {"unk_token": "<|x|>"}),
    "a map beside the added tokens": (
        {"added_tokens_decoder": {"703": NAMED | {"special": True}}},
        {"eos_token": "<|end_of_text|>"},
    ),
    "no map": ({}, None),
}


@pytest.mark.parametrize("name", MAPS)
def test_special_tokens_are_those_of_transformers(tmp_path, probe, name):
    config, special_tokens_map = MAPS[name]
    folder = folder_with(tmp_path, config, special_tokens_map)
    if "added_tokens_decoder" in config:  # with the id that the token has
        path = folder / "tokenizer_config.json"
        known = json.loads(path.read_text())
        theirs = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        known["added_tokens_decoder"] = {
            str(next(t["id"] for t in theirs if t["content"] == "<|x|>")): NAMED | {"special": True}
        }
        path.write_text(json.dumps(known))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = probe.ask("load", folder=str(folder))
    assert [ours["bos"], ours["eos"], ours["pad"]] == [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id]


@pytest.mark.parametrize("split", [True, False])
def test_split_special_tokens_makes_text_of_them_as_in_transformers(tmp_path, probe, split):
    folder = folder_with(tmp_path, {"split_special_tokens": split}, None)
    theirs = AutoTokenizer.from_pretrained(folder)
    probe.ask("load", folder=str(folder))
    pieces = [
        "<|eot_id|>",
        "<|x|>",
        "<mask>",
        " ",
        "extra",
        "ext",
        "norm",
        "<|eot",
        "é",
        "the",
        "a",
        "\n",
        "<|begin_of_text|>",
        "zoo",
    ]
    generator = random.Random(5)
    texts = ["".join(generator.choices(pieces, k=generator.randrange(1, 9))) for _ in range(400)]
    assert probe.encode(texts) == [theirs(text)["input_ids"] for text in texts]
    assert (probe.encode(["<|eot_id|>"], special=False)[0] == [theirs.eos_token_id]) != split
