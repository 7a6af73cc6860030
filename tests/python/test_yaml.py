# SPDX-License-Identifier: Apache-2.0
"""The YAML reader against PyYAML: what it accepts means the same there, and what it refuses is named with line and column."""

import json
import random
import re
import subprocess

import pytest
import yaml

ORDINARY = [
    # as in transformers', TRL's and accelerate's examples
    "model: out/model\ndata: rows.jsonl\noutput: runs/a\nlearning_rate: 2.0e-4\nbf16: true\nnum_train_epochs: 3\n",
    "# a comment\nr: 16   # of the update\ntarget_modules:\n  - q_proj\n  - v_proj\nlora_alpha: 32\n",
    "target_modules:\n- q_proj\n- v_proj\nr: 8\n",
    "lr_scheduler_kwargs:\n  num_cycles: 2\n  min_lr: 1.0e-5\nlr_scheduler_type: cosine_with_min_lr\n",
    "lr_scheduler_kwargs: {num_cycles: 2, 'min_lr': 0.1, \"a\":1, deep: {b: [1, 2, ]}, empty: }\n",
    "target_modules: [q_proj, 'k_proj', \"v_proj\"]\nlist: []\nmap: {}\n",
    "target_modules: [q_proj,\n  k_proj,   # why\n  v_proj\n  ]\nr: 8\n",
    "---\nr: 8\n",
    "# first\n\n---   # then\n\nr: 8\n",
    "",
    "# nothing\n\n",
    "datasets:\n  - path: a\n    type: alpaca\n    split: train\n  - path: b\n    nested:\n      - - 1\n        - 2\n      - x: y\n",
    "a:\n  b:\n    c: d\n  e: f\ng:\n",
    "a: 'it''s'\nb: \"tab\\there \\u00e9 \\x41 \\U0001F600 \\\\ \\\"\"\nc: 'no \\n escape'\n",
    "url: http://host:80/path#anchor\nwindows: C:\\dir\nminus: -x\nquestion: ?x\ncolon: a:b\n",
    "pattern: .*layers\\.[0-9]+\\.(q|v)_proj$\nregex: a[1]{2}\n",
    "spaced key : value\n'quoted key': 1\n\"other\": 2\n",
    "text: several words, with a comma and 'quotes' inside\n",
    "trailing: value   \nempty: ''\nblank: \"\"\n",
    "a: é ü 漢字\nключ: значение\n",
    "r: 8\r\nalpha: 16\r\n# end\r\n",
    "a:\n  value below\nb:\n  'quoted below'\nc:\n  [1, 2]\n",
    "-\n  a: 1\n- b\n-\n",
    "- [a, [b, c], {d: e}]\n- {f: [g]}\n",
    "tab_in_quotes: \"a\tb\"\n# a\tb\n",
    "no_newline: 1",
    "\ufeffr: 8\n",
    "{\n  \"r\": 8,\n  \"list\": [1,\n 2]\n}\n",
    "yes: 1\nno: 2\n1: one\n",
    "numbers: [0, -1, +2, 1.5, -0.5, 1.0e+3, 1.0e-3, 12345678901]\n",
    "words: [true, True, FALSE, yes, No, on, OFF, ~, null, NULL]\ny: y\nn: n\nnone: None\n",
]  # fmt: skip

#: Refused, at this line and column.
HOSTILE = [
    ("a: &x 1\n", 1, 4), ("b: *x\n", 1, 4), ("a: !!int 3\n", 1, 4), ("a: !x\n", 1, 4), ("a: |\n  text\n", 1, 4), ("a: >-\n  text\n", 1, 4),
    ("a: 1\n---\nb: 2\n", 2, 1), ("---\n---\n", 2, 1), ("a: 1\n...\n", 2, 1), ("%YAML 1.1\n---\na: 1\n", 1, 1), ("--- a: 1\n", 1, 5),
    ("\ta: 1\n", 1, 1), ("a:\t1\n", 1, 3), ("a: 1\t# c\n", 1, 5), ("a:\n\t- b\n", 2, 1), ("a: [1,\t2]\n", 1, 7),
    ("a: 1\nb: 2\na: 3\n", 3, 1), ("x: {a: 1, 'a': 2}\n", 1, 11), ("<<: {a: 1}\n", 1, 1), ("- a: 1\n  \"a\": 2\n", 2, 3),
    ("? a\n: b\n", 1, 1), ("a: 1\n? b\n", 2, 1), ("[a]: b\n", 1, 4), ("{a: b}: c\n", 1, 7), ("{[a]: b}\n", 1, 2),
    ("a: b: c\n", 1, 5), ("a: - b\n", 1, 4), ("a: one\n  two\n", 2, 3), ("a: 'one\n  two'\n", 1, 4), ("a: \"one\\\n  two\"\n", 1, 9),
    ("a: 1\n  b: 2\n", 2, 3), ("  a: 1\nb: 2\n", 2, 1), ("a:\n    b: 1\n  c: 2\n", 3, 3), ("a: 1\n- b\n", 2, 1), ("- a\nb: 1\n", 2, 1),
    ("- a\n  - b\n", 2, 3), ("a: [1, 2\n", 2, 1), ("a: [1,\n2]\n", 2, 1), ("a: {b}\n", 1, 6), ("a: [b: c]\n", 1, 6), ("a: [1 2, , 3]\n", 1, 10),
    ("a: [1, 2] 3\n", 1, 11), ("a: 'b' c\n", 1, 8), ("a: \"b\"#c\n", 1, 7), ("a: [1]#c\n", 1, 7), ("a: {b:1}\n", 1, 8), ("a: [what?, b]\n", 1, 9),
    ("a: \"\\q\"\n", 1, 6), ("a: \"\\ud800\"\n", 1, 6), ("a: \"\\x4\"\n", 1, 6), ("a: \"\\u0000\"\n", 1, 6), ("a: \"b\n", 1, 4),
    ("a: @b\n", 1, 4), ("a: `b`\n", 1, 4), ("a: %b\n", 1, 4), ("a: }\n", 1, 4), ("a: ,\n", 1, 4), ("a: ]\n", 1, 4), ("just text\nmore\n", 2, 1),
    ("a: \x01\n", 1, 4), ("a: b\x85c\n", 1, 5), ("a: b\u2028c\n", 1, 5), ("é: b\rc\n", 1, 5), ("a: 1\nb\n", 2, 2), ("a: 1\n'b' c\n", 2, 5),
    ("- " * 70 + "a\n", 1, 131), ("[" * 70, 1, 65), ("a: " + "{a: " * 70, 1, 4 + 4 * 64),
]  # fmt: skip

#: Without a type, readers disagree on them.
AMBIGUOUS = ["010", "0x1F", "0o7", "0b1", "1_000", "1:30", ".inf", "-.inf", ".nan", "2024-01-31", "12e", "1.2.3", "="]


@pytest.fixture
def read(build_dir, tmp_path):
    """The probe's results for texts, in one process."""

    def read(texts):
        path = tmp_path / "texts.json"
        path.write_text(json.dumps(texts))
        result = subprocess.run([build_dir / "tests/format/format_probe", "yaml", path], capture_output=True, check=True)
        return json.loads(result.stdout)

    return read


def structure(value):
    """PyYAML's keys as text, as an option's name is one."""
    if isinstance(value, dict):
        return {str(key): structure(entry) for key, entry in value.items()}
    return [structure(entry) for entry in value] if isinstance(value, list) else value


def test_ordinary_files_mean_what_pyyaml_reads(read):
    for text, result in zip(ORDINARY, read(ORDINARY), strict=True):
        assert len(result) == 2, (text, result)
        assert result[0] == structure(yaml.load(text, yaml.BaseLoader)) or (
            result[0] == "" and yaml.load(text, yaml.BaseLoader) is None
        ), text
        plain = yaml.safe_load(text)
        if not (isinstance(plain, dict) and True in plain):  # PyYAML's key `yes` is True
            assert result[1] == structure(plain), text


def test_everything_else_is_refused_with_its_place(read):
    for (text, line, column), result in zip(HOSTILE, read([text for text, *_ in HOSTILE]), strict=True):
        refusal = result[-1].get("refused", "") if isinstance(result[-1], dict) else ""
        assert refusal.startswith(f"[f.yaml] line {line}, column {column}: "), (text, refusal or result)
        assert refusal.count("\n") == 0 and refusal.endswith(".")


def test_a_number_that_readers_resolve_differently_needs_a_type_or_quotes(read):
    texts = [f"a: {word}\n" for word in AMBIGUOUS]
    for text, result in zip(texts, read(texts), strict=True):
        assert result[0] == yaml.load(text, yaml.BaseLoader)
        assert "readers of YAML disagree" in result[1]["refused"], text
    (result,) = read(["a: [1e-4, 5E3, .5, 5., '010']\n"])
    assert result[1] == {"a": [1e-4, 5e3, 0.5, 5.0, "010"]}


def test_whatever_is_accepted_of_changed_files_means_the_same_in_pyyaml(read):
    random_ = random.Random(7)
    pieces = [
        *"abc019 \n\n  :-,[]{}#'\"?&*!|>%@`.~",
        ": ",
        "- ",
        "\n  ",
        "\n- ",
        "a: 1\n",
        " #",
        "''",
        "\\",
        "é",
        "\t",
        "---\n",
        "null",
        "\r\n",
    ]
    texts = []
    for _ in range(5_000):
        text = random_.choice(ORDINARY)
        for _ in range(random_.randint(1, 4)):
            at = random_.randint(0, len(text))
            text = text[:at] + random_.choice(pieces) + text[at + random_.randint(0, 2) :]
        texts.append(text)
    accepted = 0
    for text, result in zip(texts, read(texts), strict=True):
        if isinstance(result[0], dict) and "refused" in result[0]:
            assert re.match(r"\[f\.yaml\] line \d+, column \d+: ", result[0]["refused"])
            continue
        accepted += 1
        try:
            wanted = yaml.load(text, yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise AssertionError((text, result)) from error
        assert result[0] == structure(wanted) or (result[0] == "" and wanted is None), text
    assert accepted > 1000


def test_a_megabyte_of_it_is_read_and_more_is_refused(read):
    size = 1 << 20
    lines = "".join(f"key{i}: [a, b]\n" for i in range(40_000))[:size].rpartition("\n")[0]
    whole, more = read([lines + "\n", "a" * (size + 1)])
    assert len(whole[0]) == lines.count("\n") + 1
    assert "at most 1048576 bytes" in more[0]["refused"]
