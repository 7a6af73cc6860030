# SPDX-License-Identifier: Apache-2.0
"""The layer check itself: this tree is clean, and a made-up tree with each kind of mistake is not."""

import pathlib

import check_layers
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPDX = "// SPDX-License-Identifier: Apache-2.0\n"


def test_includes_of_this_tree_go_one_way():
    assert check_layers.check(ROOT) == []


@pytest.mark.parametrize(
    ("file", "include", "rule"),
    [
        ("include/qlorapp/core/a.hpp", '"qlorapp/format/nf4.hpp"', "an arrow from core to format goes up"),
        ("src/json/a.cpp", '"qlorapp/format/nf4.hpp"', "an arrow from json to format goes up"),
        ("src/files/a.cpp", '"qlorapp/format/nf4.hpp"', "an arrow from files to format goes up"),
        ("include/qlorapp/format/a.hpp", '"qlorapp/ops/quantize.hpp"', "an arrow from format to ops goes up"),
        ("src/text/a.cpp", '"qlorapp/data/dataset.hpp"', "an arrow from text to data goes up"),
        ("src/nn/a.cpp", '"qlorapp/train/trainer.hpp"', "an arrow from nn to train goes up"),
        ("src/nn/a.cpp", '"qlorapp/data/dataset.hpp"', "an arrow from nn to data goes up"),
        ("src/io/a.cpp", '"qlorapp/data/dataset.hpp"', "an arrow from io to data goes up or sideways"),
        ("src/train/a.cpp", '"../../cli/command.hpp"', "an arrow from train to cli goes up"),
        ("src/core/a.cpp", "<ATen/core/Tensor.h>", "core is torch-free"),
        ("cuda/a.cu", "<c10/cuda/CUDAStream.h>", "cuda is torch-free"),
        ("cli/a.cpp", "<torch/torch.h>", "half a minute"),
        ("tests/nn/a_test.cpp", "<torch/extension.h>", "half a minute"),
        ("src/misc/a.cpp", "<vector>", "'misc' is no layer"),
        ("src/io/a.cpp", "<filesystem>", "folder.hpp"),
    ],
)
def test_a_bad_include_is_named(tmp_path, file, include, rule):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "command.hpp").write_text(SPDX)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{SPDX}#include {include}\n")
    (error,) = check_layers.check(tmp_path)
    assert error.startswith(file) and rule in error


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("src/train/a.cpp", '"qlorapp/io/adapter.hpp"'),
        ("src/data/a.cpp", '"qlorapp/nn/batch.hpp"'),
        ("src/io/a.cpp", '"qlorapp/text/tokenizer.hpp"'),
        ("src/ops/a.cpp", "<ATen/ops/mm.h>"),
        ("cli/a.cpp", '"qlorapp/train/trainer.hpp"'),
        ("src/format/a.cpp", "<nlohmann/json.hpp>"),
    ],
)
def test_a_good_include_passes(tmp_path, file, include):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"{SPDX}#include {include}\n")
    assert check_layers.check(tmp_path) == []


def test_files_say_their_license_and_stay_short(tmp_path):
    (tmp_path / "src/core").mkdir(parents=True)
    (tmp_path / "src/core/a.cpp").write_text("int a;\n" * 501)
    assert [error.split(": ")[1].split(";")[0] for error in check_layers.check(tmp_path)] == [
        "begins without 'SPDX-License-Identifier",
        "501 lines",
    ]
