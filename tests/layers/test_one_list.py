# SPDX-License-Identifier: Apache-2.0
"""The names of a model's parameters stand in one file."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = ROOT / "src/format/model_families.cpp"
CODE = [
    path
    for folder in ("include", "src", "cli", "python")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".hpp", ".cpp", ".py")
]


def words_in(text: str, words: list[str]) -> set[str]:
    """Those that stand in string literals, whole or as the end of a path."""
    literals = re.findall(r'"([^"\n]*)"', text)
    return {word for word in words for literal in literals if re.search(rf"(^|[.\s]){word}$", literal)}


def test_the_list_of_parameters_is_the_only_one():
    words = re.findall(r'\{"(?:\w+\.)?(\w+)", k\w+[,}]', HOME.read_text())
    assert len(set(words)) > 8 and {"q_proj", "down_proj", "input_layernorm"} <= set(words)
    lists = {
        path.relative_to(ROOT): found for path in CODE if path != HOME and len(found := words_in(path.read_text(), words)) > 2
    }
    assert lists == {}


def test_a_second_list_is_found():
    assert words_in('names = ("self_attn.q_proj", "v_proj", "x_proj")  # down_proj', ["q_proj", "v_proj", "down_proj"]) == {
        "q_proj",
        "v_proj",
    }
