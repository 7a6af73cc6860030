#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which targets to build and which tests to run for a change: the rules of `./dev check`.

    python scripts/touched.py [LAYER | FILE …]      default: the files that differ from the last commit, and untracked ones

Prints two lines: targets of the build, and tests. A test is a name of ctest (cpp.nn, layers) or a file of pytest.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHON_TESTS = ROOT / "tests" / "python"
#: Tests of what has no tests of its own name.
OF_FOLDER = {
    "cli": ["test_cli.py", "test_bad_input.py"], "python/src": ["test_stubs.py", "test_package.py", "test_engine.py"],
    "scripts": ["test_scripts.py", "test_notebook_install.py"], "docs": ["test_docs_snippets.py", "test_docs_site.py"],
}  # fmt: skip


def changed() -> list[str]:
    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return lines("diff", "--name-only", "HEAD") + lines("ls-files", "--others", "--exclude-standard")


def layer_of(path: pathlib.PurePath) -> str | None:
    parts = path.parts
    if parts[:2] == ("include", "qlorapp") and len(parts) > 3:
        return parts[2]
    if parts[0] in ("src", "tests") and len(parts) > 2:
        return parts[1]
    return "cuda" if parts[0] == "cuda" else None


def has_suite(layer: str) -> bool:
    listing = ROOT / "tests" / layer / "CMakeLists.txt"
    return listing.is_file() and f"qlorapp_test({layer} " in listing.read_text(encoding="utf-8")


def python_tests_of(module: str) -> list[str]:
    """Test files that import the module, or name it in their own name."""
    wanted = re.compile(rf"\b(?:from|import)\b.*\b{re.escape(module)}\b")
    found = []
    for file in sorted(PYTHON_TESTS.glob("test_*.py")):
        if module in file.stem or wanted.search(file.read_text(encoding="utf-8")):
            found.append(file.name)
    return found


def touched(names: list[str]) -> tuple[list[str], list[str]]:
    """(targets, tests) in the order in which they are found, each once."""
    targets: dict[str, None] = {}
    tests: dict[str, None] = {}
    for name in names:
        path = pathlib.PurePath(name)
        layer = name if has_suite(name) else layer_of(path)
        if layer is not None and has_suite(layer):
            targets[f"{layer}_tests"] = tests[f"cpp.{layer}"] = tests["layers"] = None
        elif path.parts[:2] == ("tests", "python"):
            targets["_C"] = None
            stem = path.stem
            files = [path.name] if stem.startswith("test_") else python_tests_of(stem)
            tests.update({f"tests/python/{file}": None for file in files})
        elif path.parts[:2] == ("python", "qlorapp"):
            targets["_C"] = None
            tests.update({f"tests/python/{file}": None for file in python_tests_of(path.stem)})
        else:
            for folder, files in OF_FOLDER.items():
                if name == folder or name.startswith(folder + "/"):
                    targets["qlorapp_cli"] = targets["_C"] = None
                    tests.update({f"tests/python/{file}": None for file in files if (PYTHON_TESTS / file).is_file()})
        if "/" not in name and not has_suite(name) and not (ROOT / name).exists():
            sys.exit(f"[check] {name} must be a layer (a folder of tests/ with a C++ suite) or a file of the repository.")
    return list(targets), list(tests)


if __name__ == "__main__":
    found = touched([pathlib.PurePath(name).as_posix() for name in sys.argv[1:]] or changed())
    print("\n".join(" ".join(line) for line in found))
