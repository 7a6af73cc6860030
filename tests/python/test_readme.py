# SPDX-License-Identifier: Apache-2.0
"""What README shows runs: its Python, its C++, its command line. Every link in the docs leads somewhere."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import conftest
import pytest
import torch
from tiny_run import qlorapp

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def here(tmp_path) -> pathlib.Path:
    """A folder to write into that has the repository's examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_python_snippet_trains_and_saves(here):
    (code,) = snippets("python")
    statements = [line for line in code.splitlines() if line and not line.startswith((" ", "#", "import"))]
    assert len(statements) <= 8
    short = code.replace("max_steps=200", "max_steps=2").replace(
        "per_device_train_batch_size=16", "per_device_train_batch_size=2"
    )
    assert short != code
    (here / "snippet.py").write_text(short)
    env = {**os.environ, "PYTHONPATH": str(conftest.BUILD / "python"), "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, "snippet.py"], cwd=here, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads((here / "adapter/adapter_config.json").read_text())["r"] == 16
    assert (here / "adapter/adapter_model.safetensors").stat().st_size > 0
    assert (here / "adapter/checkpoint-2/trainer_state.json").exists()


def test_the_c_plus_plus_snippet_compiles(here):
    (code,) = snippets("cpp")
    assert len(code.splitlines()) <= 16
    (here / "snippet.cpp").write_text(code)
    torch_includes = pathlib.Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", ROOT / "include", "-isystem", torch_includes, here / "snippet.cpp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[:2000]


def test_the_command_lines_run(here):
    train, generate = [line for snippet in snippets("sh") for line in snippet.splitlines() if line.startswith("qlorapp ")]
    (here / "chats.jsonl").write_text(
        "\n".join((ROOT / "examples/data/train.jsonl").read_text(encoding="utf-8").splitlines()[:4])
    )
    for line, extra in [(train, ["--max_steps", "1"]), (generate, ["--max_new_tokens", "3"])]:
        words = shlex.split(line.replace("DIR", "examples/data/tiny-llama"))[1:]
        result = qlorapp(*words, *extra, cwd=here)
        assert result.returncode == 0, result.stderr
        assert line is generate or "{'loss': " in result.stdout


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
)
def test_links_and_paths_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith(("http://", "https://")):
            assert (ROOT / page).parent.joinpath(link).exists(), link
    for path in re.findall(r"`((?:include|src|tests|scripts|cli|python|examples)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_demo_model_has_the_size_that_is_said():
    from safetensors import safe_open

    said = float(re.search(r"bundled ([0-9.]+)M-parameter", README).group(1))
    with safe_open(ROOT / "examples/data/tiny-llama/model.safetensors", "pt") as file:
        count = sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    assert round(count / 1e6, 1) == said
