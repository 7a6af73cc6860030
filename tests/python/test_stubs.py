# SPDX-License-Identifier: Apache-2.0
"""_C.pyi says what the compiled module has; importing the package is quick and brings nothing that is not needed."""

import ast
import importlib.util
import os
import subprocess
import sys

from conftest import ROOT
from qlorapp import _C


def stub_maker():
    spec = importlib.util.spec_from_file_location("make_stubs", ROOT / "scripts" / "make_stubs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_stubs_are_those_of_the_module():
    maker = stub_maker()
    text = maker.TARGET.read_text(encoding="utf-8")
    assert text == maker.stubs(_C), "a binding has changed: python scripts/make_stubs.py"
    named = {node.name for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert named == {name for name, value in vars(_C).items() if callable(value) and not name.startswith("__")}


def test_the_import_beyond_torchs_takes_less_than_three_tenths_of_a_second(build_dir):
    code = (
        "import sys, torch, time; t = time.process_time(); import qlorapp; took = time.process_time() - t; "
        "assert not {'transformers', 'peft', 'accelerate', 'pandas'} & set(sys.modules); print(took)"
    )
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    times = [
        float(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(times) <= 0.3, times
