# SPDX-License-Identifier: Apache-2.0
"""Docs and comments name files, classes, members and functions that exist."""

import pathlib

import names_in_prose
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_what_docs_and_comments_of_this_tree_name_is_there():
    assert list(names_in_prose.unresolved(ROOT)) == []


HEADER = (
    "class Base { void inherited(); };\n"
    "class Lamp : public Base { void shine(); /* void flicker(); */ enum class Color { kRed }; };\n"
    "using Light = Lamp;\n"
    "namespace room::corner { int width(); }\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("See `Lamp::flicker`.", "nothing is called Lamp::flicker"),  # in a comment alone
        ("See `Light::flicker`.", "nothing is called Light::flicker"),
        ("See `Torch::shine`.", "nothing is called Torch::shine"),
        ("See `room::depth()`.", "nothing is called room::depth"),
        ("It is in src/house/torch.hpp.", "no file src/house/torch.hpp"),
        ("It is in [torch](../src/house/torch.hpp).", "no file ../src/house/torch.hpp"),
        ("It is in torch.hpp.", "no file torch.hpp"),
        ("See `Lamp::shine`, `Light::inherited`, `Color::kRed`, `Lamp::~Lamp` and `corner::width`.", None),
        ("See `std::vector`, `at::mean` and `torch::nn::Linear`.", None),
        ("It is in lamp.hpp, house/lamp.hpp and [src](../src/house/lamp.hpp); PEFT's is in tuners/lora/layer.py.", None),
    ],
)
@pytest.mark.parametrize("path", ["docs/page.md", "src/house/other.cpp", "scripts/tool.py"])
def test_a_name_that_is_gone_is_found_in_each_kind_of_file(tmp_path, path, text, reason):
    (tmp_path / "src/house").mkdir(parents=True)
    (tmp_path / "src/house/lamp.hpp").write_text(HEADER)
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    mark = {".md": "", ".cpp": "// ", ".py": "# "}[file.suffix]
    file.write_text(f"{mark}{text}\n")
    found = list(names_in_prose.unresolved(tmp_path))
    assert [line.split(": ", 1)[1] for line in found] == ([] if reason is None else [reason])


def test_a_page_about_code_that_was_replaced_may_name_it(tmp_path):
    (tmp_path / "page.md").write_text("# It\n\n**Status** replaced by another.\n\n`Lamp::flicker` did it.\n")
    assert list(names_in_prose.unresolved(tmp_path)) == []
