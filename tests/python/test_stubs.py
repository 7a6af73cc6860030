# SPDX-License-Identifier: Apache-2.0
"""The stubs say what the compiled module has, the package is strictly typed, and its import brings nothing that is not needed."""

import ast
import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT
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


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -r requirements/test.txt")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(BUILD / "mypy"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_package_is_strictly_typed():
    """pyproject.toml says strict, and of which packages no types are asked."""
    checked = mypy()
    assert checked.returncode == 0, checked.stdout


def test_a_script_is_typed_as_one_of_transformers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import qlorapp\n"
        "args = qlorapp.SFTConfig('out', report_to='none', max_seq_length=512, packing=True, loss_chunk_rows=64)\n"
        "lora = qlorapp.LoraConfig(r=8, target_modules='all-linear')\n"
        "model = qlorapp.get_peft_model(qlorapp.AutoModelForCausalLM.from_pretrained('folder'), lora)\n"
        "qlorapp.SFTTrainer(model, args).train()\n"
    )
    said = mypy("--strict", str(script))
    assert said.returncode == 0, said.stdout
    script.write_text("import qlorapp\nqlorapp.Quantizer(block_siz=64)\nqlorapp.plan()\n")
    said = mypy("--strict", str(script))
    assert 'Unexpected keyword argument "block_siz"' in said.stdout and "plan" in said.stdout


UNWANTED = ("transformers", "peft", "trl", "accelerate", "bitsandbytes", "datasets", "pandas", "tokenizers", "safetensors", "IPython",
            "tqdm", "huggingface_hub", "tensorboard")  # fmt: skip


def test_the_import_brings_no_package_that_is_not_needed_yet(build_dir):
    """Beyond what torch brings itself."""
    code = "import sys, torch, numpy; before = set(sys.modules); import qlorapp; print(*sorted(set(sys.modules) - before))"
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert "qlorapp" in packages and not packages & set(UNWANTED)
    others = {name for name in packages if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert others <= {"qlorapp", "torch", "numpy"}, others


def test_trainers_names_do_without_trl(build_dir):
    code = (
        "import sys, qlorapp; "
        "qlorapp.AutoModelForCausalLM, qlorapp.get_peft_model, qlorapp.Trainer, qlorapp.TrainingArguments; print('trl' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


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
