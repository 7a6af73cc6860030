# SPDX-License-Identifier: Apache-2.0
"""Snippets of the docs pages run, quotes equal their files, and quoted messages exist.

A page's Python is one script and its shell lines are another, each in page order and in one folder. The line above a fence can say:

    <!-- not run: REASON -->     needs a network, a GPU or minutes
    <!-- from: PATH -->          equals these lines of a file that another test builds or runs

A hub name is found in a cache that holds the bundled model under that name. Fences without a language are output.
"""

import os
import pathlib
import re
import subprocess
import sys

import conftest
import pytest

ROOT = conftest.ROOT
MODEL = ROOT / "examples" / "data" / "tiny-llama"
PAGES = [
    "quickstart-cpp.md",
    "quickstart-python.md",
    "quickstart-notebook.md",
    "sft.md",
    "migration.md",
    "troubleshooting.md",
    "lesson.md",
]
RUN, QUOTED = {"python", "sh"}, {"cpp", "cmake"}
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def fences(page: str) -> list[re.Match]:
    return list(FENCE.finditer(text_of(page)))


def snippets(page: str, language: str) -> list[str]:
    return [fence["text"] for fence in fences(page) if fence["language"] == language and not fence["mark"]]


@pytest.fixture
def hub(tmp_path) -> pathlib.Path:
    """A hub cache, as huggingface_hub lays it out: each name that a page uses is the bundled model."""
    for page in PAGES:
        for name in re.findall(r'"((?:meta-llama|HuggingFaceTB|NousResearch|unsloth)/[\w.-]+)"', text_of(page)):
            repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
            if not repository.exists():
                (repository / "refs").mkdir(parents=True)
                (repository / "refs" / "main").write_text("0123abcd")
                (repository / "snapshots").mkdir()
                (repository / "snapshots" / "0123abcd").symlink_to(MODEL)
    return tmp_path / "hub"


@pytest.fixture
def run(tmp_path, hub):
    """Runs a command in a folder that has the repository's examples; returns (standard output, standard error)."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(conftest.BUILD), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(conftest.BUILD / "python"),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
    }

    def start(*command: str) -> tuple[str, str]:
        done = subprocess.run(command, cwd=tmp_path / "here", env=env, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout, done.stderr

    return start


@pytest.mark.parametrize("page", PAGES)
def test_each_fence_is_run_or_quoted_or_says_why_not(page):
    assert text_of(page).count("\n```") == 2 * len(fences(page)), "a fence that was not understood"
    for fence in fences(page):
        mark, language = fence["mark"] or "", fence["language"]
        if language in QUOTED:
            assert re.fullmatch(r"from: \S+", mark), fence[0]
        else:
            assert language in RUN | {"", "json"} and (not mark or re.fullmatch(r"not run: .{10,}", mark)), fence[0]


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")])
def test_the_python_of_a_page_runs_from_its_first_line_to_its_last(page, run, tmp_path):
    """Lines print what their comments say, and C++ computes the steps of trainings."""
    code = "\n".join(snippets(page, "python"))
    (tmp_path / "page.py").write_text(code)
    printed, logged = run(sys.executable, str(tmp_path / "page.py"))
    assert "transformers' loop runs" not in logged, logged
    for line in re.findall(r"^print\(.*\)  # (.+)$", code, re.MULTILINE):
        assert line in printed.splitlines(), printed


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "sh")])
def test_the_shell_lines_of_a_page_run(page, run):
    run("sh", "-euc", "\n".join(snippets(page, "sh")))


@pytest.mark.parametrize("page", PAGES)
def test_a_quoted_file_has_these_lines(page):
    for fence in fences(page):
        if (fence["mark"] or "").startswith("from: "):
            path = fence["mark"].removeprefix("from: ")
            assert fence["text"] in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_umbrella_header_has_every_class_of_the_table():
    umbrella = (ROOT / "include/qlorapp/qlorapp.hpp").read_text(encoding="utf-8")
    table = re.findall(r"`include/(qlorapp/[\w/]+\.hpp)`", text_of("quickstart-cpp.md").split("## A model folder in")[0])
    assert len(set(table)) >= 6
    assert [header for header in table if f'#include "{header}"' not in umbrella] == []


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_each_link_into_a_page_names_a_heading_of_it(page):
    for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / link if link else ROOT / page
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in map(slug, headings), f"{link}#{anchor}"


# --- messages


def sources() -> str:
    """All strings of the library in one, the parts of a literal that spans several lines joined."""
    files = [
        path
        for folder, kinds in {"src": "[ch]pp", "cli": "cpp", "python/qlorapp": "py", "cmake": "cmake", "include": "hpp"}.items()
        for path in sorted((ROOT / folder).rglob(f"*.{kinds}"))
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(r'(?<!\\)"\s*\n\s*f?"', "", text)  # "one " "two"
    return text.replace('\\"', '"')


def messages(page: str) -> list[str]:
    """The first cells of its tables, except below a heading that says that others write them."""
    found, ours = [], True
    for line in text_of(page).splitlines():
        if line.startswith("#"):
            ours = "other libraries" not in line
        elif ours and line.startswith("| `"):
            found += [cell.replace("\\|", "|") for cell in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1])]
    return found


def test_the_messages_of_troubleshooting_are_those_of_the_sources():
    """… stands for what a message fills in."""
    written, found = sources(), messages("troubleshooting.md")
    assert len(found) > 30
    missing = [f"{part!r} of {message!r}" for message in found for part in re.split(r"\s*…\s*", message) if part not in written]
    assert not missing, "\n".join(missing)
