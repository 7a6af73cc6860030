# SPDX-License-Identifier: Apache-2.0
"""What README shows runs: its Python, its C++, its command line. Every link in the docs leads somewhere."""

import importlib.util
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


#: What both runs of the page end in.
ANSWER = "Near the mill Mia has a kite."
#: Behind the snippet: the answers to questions that were never trained.
HELD_OUT = """
import json

held_out = [json.loads(line)["messages"] for line in open("examples/data/eval.jsonl")]
answers = [generate(chat[:-1], max_new_tokens=24)[0]["generated_text"][-1] for chat in held_out]
print("held out:", sum(answer == chat[-1] for answer, chat in zip(answers, held_out)), "of", len(held_out))
"""


def run(command: list, place: pathlib.Path) -> str:
    """Its standard output."""
    env = {**os.environ, "PYTHONPATH": str(conftest.BUILD / "python")}
    done = subprocess.run(
        [str(word) for word in command], cwd=place, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def here(tmp_path) -> pathlib.Path:
    """A folder to write into that has the repository's examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_python_snippet_trains_saves_and_answers_right(here):
    """Held-out questions are answered, too: the answer that it shows is not luck. Last bits differ between processors: a few may be wrong."""
    (code,) = snippets("python")
    statements = [line for line in code.splitlines() if line and not line.startswith((" ", "#", "import"))]
    assert len(statements) <= 12
    (here / "snippet.py").write_text(code + HELD_OUT)
    *_, answer, held_out = run([sys.executable, "snippet.py"], here).splitlines()
    assert ANSWER in code and re.fullmatch(r"Near the mill \w+ has an? \w+\.", answer)  # may be one of the few
    assert int(held_out.split()[2]) >= 90 and held_out.endswith(" of 96"), held_out
    assert json.loads((here / "adapter/adapter_config.json").read_text())["r"] == 16
    assert (here / "adapter/adapter_model.safetensors").stat().st_size > 0
    assert (here / "adapter/checkpoint-300/trainer_state.json").exists()


def test_the_c_plus_plus_snippet_compiles(here):
    (code,) = snippets("cpp")
    assert len(code.splitlines()) <= 16
    (here / "snippet.cpp").write_text(code)
    torch_includes = pathlib.Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", ROOT / "include", "-isystem", torch_includes, here / "snippet.cpp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[:2000]


def test_the_command_lines_run_and_answer_right(here):
    lines = "".join(snippets("sh")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("qlorapp ")]
    plan, train, generate = commands
    assert (plan[0], train[0], generate[0]) == ("plan", "train", "generate")
    assert re.search(r"[0-9.]+ h per epoch", run([conftest.BUILD / "qlorapp", *plan], here))
    run([conftest.BUILD / "qlorapp", *train], here)
    assert run([conftest.BUILD / "qlorapp", *generate], here).strip().endswith(ANSWER)
    assert f"`{ANSWER}`" in README


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


def test_the_page_of_options_is_what_its_script_makes():
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "make_configuration_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == module.page()


def test_its_figures_are_those_of_the_page_of_measurements():
    """The ratios of the first screen are those of the table's first row, which are the medians of docs/performance.md."""
    rows = [re.findall(r"([\d,]+) tok/s", line) for line in README.splitlines() if line.startswith("| ")]
    speeds = [[int(value.replace(",", "")) for value in row] for row in rows if row]
    ours, unsloth, stack = speeds[0]
    said = re.search(r"\*\*([\d.]+) times the tokens/s of unsloth, ([\d.]+) times", README)
    assert (float(said[1]), float(said[2])) == (round(ours / unsloth, 2), round(ours / stack, 2))
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"[\d,.]*\d", written))
    table = README[README.index("## Measured") : README.index("One NVIDIA H200")]
    found = [value for value in re.findall(r"([\d,.]+) (?:tok/s|s\b|MiB|GiB)", table)]
    assert len(found) > 20 and [value for value in found if value not in figures] == []


def test_the_demo_model_has_the_size_that_is_said():
    from safetensors import safe_open

    said = float(re.search(r"bundled ([0-9.]+)M-parameter", README).group(1))
    with safe_open(ROOT / "examples/data/tiny-llama/model.safetensors", "pt") as file:
        count = sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    assert round(count / 1e6, 1) == said
