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
    ],
)
def test_a_change_runs_its_tests(name, targets, test):
    built, run = touched.touched([name])
    assert targets in built and test in run


def test_what_no_test_covers_runs_none_and_a_wrong_name_is_refused():
    assert touched.touched(["LICENSE"]) == ([], [])
    with pytest.raises(SystemExit, match="nosuch must be a layer"):
        touched.touched(["nosuch"])
