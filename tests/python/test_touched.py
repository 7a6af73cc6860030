# SPDX-License-Identifier: Apache-2.0
"""What `./dev check` builds and runs for a change."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import touched


@pytest.mark.parametrize(
    ("name", "targets", "test"),
    [
        ("nn", "nn_tests", "cpp.nn"),
        ("src/train/clip.cpp", "train_tests", "cpp.train"),
        ("include/qlorapp/quant/quantizer.hpp", "quant_tests", "cpp.quant"),
        ("python/qlorapp/hf/engine.py", "_C", "tests/python/test_engine.py"),
        ("tests/python/test_plan.py", "_C", "tests/python/test_plan.py"),
        ("tests/python/tiny_trainer.py", "_C", "tests/python/test_trainer_memory.py"),
        ("cli/plan.cpp", "qlorapp_cli", "tests/python/test_cli.py"),
        ("src/nn", "nn_tests", "cpp.nn"),
        ("README.md", "qlorapp_cli", "tests/python/test_readme.py"),
        ("CMakeLists.txt", "all", "consumer.find_package"),
        ("cmake", "all", "tests/python/test_cmake_messages.py"),
        ("examples", "all", "example[.].*"),
        ("requirements", "_C", "lint"),
        ("python/qlorapp/__init__.py", "_C", "tests/python/test_package.py"),
        (".", "train_tests", "headers"),
    ],
)
def test_a_change_runs_its_tests(name, targets, test):
    built, run = touched.touched([name])
    assert targets in built and test in run


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("include/qlorapp/qlorapp.hpp", "headers"),
        ("include/qlorapp/fwd.hpp", "headers"),
        ("CHANGELOG.md", "tests/python/test_docs_site.py"),
        ("dev", "lint"),
    ],
)
def test_a_change_that_needs_no_build_of_its_own_runs_its_tests(name, test):
    built, run = touched.touched([name])
    assert built == [] and test in run


def test_each_file_of_pytest_that_is_named_exists():
    _, run = touched.touched(["."])
    assert all((ROOT / test).is_file() for test in run if test.startswith("tests/"))


def test_what_no_test_covers_runs_none_and_a_wrong_name_is_refused():
    assert touched.touched(["LICENSE"]) == ([], [])
    with pytest.raises(SystemExit, match="nosuch must be a layer"):
        touched.touched(["nosuch"])
