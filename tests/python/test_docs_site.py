# SPDX-License-Identifier: Apache-2.0
"""The site of `./dev docs` covers every page and every public header. It is not built here."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import make_docs_source as site


def test_the_navigation_reaches_every_page_and_names_no_other():
    linked = {page for _, pages in site.navigation((ROOT / "docs" / "index.md").read_text(encoding="utf-8")) for page in pages}
    assert {"../include/qlorapp/", "../python/qlorapp/"} <= linked
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or name in linked or f"{name.rpartition('/')[0]}/" in linked, f"docs/index.md links no {name}"
    assert not [page for page in linked if not (ROOT / "docs" / page).exists()]


def test_every_public_header_has_a_page_that_names_it():
    """Breathe finds a header by its name alone: two headers of one name would share a page."""
    pages = site.header_pages()
    headers = {path.relative_to(ROOT / "include" / "qlorapp") for path in (ROOT / "include").rglob("*.hpp")}
    assert len({header.name for header in headers}) == len(headers) > 50
    for header in headers:
        assert f"{{doxygenfile}} {header.name}\n" in pages[f"cpp/{header.with_suffix('.md')}"]
        assert f"/cpp/{header.with_suffix('')}\n" in pages["cpp/index.md"]


@pytest.mark.parametrize(
    "setting", ["INPUT = include", "RECURSIVE = YES", "FILE_PATTERNS = *.hpp", "WARN_AS_ERROR = FAIL_ON_WARNINGS"]
)
def test_doxygen_reads_the_public_headers_and_fails_on_a_warning(setting):
    text = (ROOT / "docs" / "Doxyfile").read_text(encoding="utf-8")
    assert setting in [re.sub(r" +", " ", line) for line in text.splitlines()]


def test_a_file_outside_the_pages_is_linked_and_a_folder_without_a_page_is_text():
    """Links as seen from build/docs/source."""
    page = site.page(site.pathlib.PurePath("quickstart-cpp.md"))
    assert "](../../../examples/cpp/01_quantize.cpp)" in page
    assert "](adr/index.md)" in site.page(site.pathlib.PurePath("architecture.md"))
    assert "](../" not in site.page(site.pathlib.PurePath("performance.md"))


def test_a_dry_run_prints_the_commands_and_warnings_are_errors():
    run = subprocess.run(["./dev", "docs", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    commands = [line.strip() for line in run.stdout.splitlines() if line.strip().startswith("$ ")]
    assert "$ doxygen docs/Doxyfile" in commands
    assert commands[-2].endswith("scripts/make_docs_source.py")
    assert (
        " -m sphinx " in commands[-1] and " -W " in commands[-1] and commands[-1].endswith("build/docs/source build/docs/html")
    )
