# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings for the site that `./dev docs` builds from build/docs/source (scripts/make_docs_source.py)."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]

project = "qlorapp"
release = re.search(r"project\(qlorapp VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
extensions = ["myst_parser", "breathe"]
root_doc = "index"
html_theme = "furo"
html_title = f"qlorapp {release}"
html_copy_source = False
html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6  # GitHub's anchors

breathe_projects = {"qlorapp": str(ROOT / "build" / "docs" / "xml")}
breathe_default_project = "qlorapp"
# Each page opens namespace qlorapp again, which Sphinx counts as one more declaration.
suppress_warnings = ["duplicate_declaration.cpp"]
