#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which targets to build and which tests to run for a change: the rules of `./dev check`.

    python scripts/touched.py [LAYER | FOLDER | FILE …]      default: the files that differ from the last commit, and untracked ones

Prints two lines: targets of the build, and tests. A test is a name of ctest (cpp.nn, layers) or a file of pytest.
"""

import functools
import itertools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHON_TESTS = ROOT / "tests" / "python"
CLI, MODULE = "qlorapp_cli", "_C"
SITE = "tests/python/test_docs_site.py"
#: Files outside of the layers, by the longest beginning of their path: (targets, tests). A name of ctest may be a pattern.
OTHERS: dict[str, tuple[list[str], list[str]]] = {
    "cli": ([CLI, MODULE], ["tests/python/test_cli.py", "tests/python/test_bad_input.py"]),
    "python/src": ([CLI, MODULE], [f"tests/python/test_{name}.py" for name in ("stubs", "package", "engine")]),
    "python": ([CLI, MODULE], ["tests/python/test_package.py", "tests/python/test_stubs.py"]),
    "scripts": ([CLI, MODULE], ["tests/python/test_notebook_install.py", "tests/python/test_touched.py", SITE]),
    "docs": ([CLI, MODULE], ["tests/python/test_docs_snippets.py", SITE]),
    "README.md": ([CLI, MODULE], ["tests/python/test_readme.py", "tests/python/test_docs_snippets.py"]),
    "CHANGELOG.md": ([], [SITE, "lint"]),
    "CONTRIBUTING.md": ([], [SITE, "lint"]),
    "include/qlorapp": ([], ["headers", "layers"]),
    "src": ([CLI, MODULE], ["layers"]),
    "examples/cpp": (["all"], ["example[.].*", "tests/python/test_docs_snippets.py"]),
    "examples/python": ([CLI, MODULE], ["tests/python/test_readme.py", "tests/python/test_trainer.py"]),
    "examples/notebooks": ([CLI, MODULE], ["tests/python/test_notebooks.py", "tests/python/test_notebook_install.py"]),
    "examples/data": ([CLI, MODULE], ["tests/python/test_demo_assets.py", "tests/python/test_data.py"]),
    "cmake": (["all"], ["tests/python/test_cmake_messages.py", "consumer.find_package", "layers"]),
    "CMakeLists.txt": (["all"], ["tests/python/test_cmake_messages.py", "consumer.find_package", "layers"]),
    "CMakePresets.json": ([], ["tests/python/test_cmake_messages.py"]),
    "pyproject.toml": (
        [CLI, MODULE],
        ["consumer.wheel", "tests/python/test_notebook_install.py", "tests/python/test_stubs.py"],
    ),
    "dev": ([], ["tests/python/test_touched.py", "lint"]),
    "scripts/dev": ([], ["tests/python/test_touched.py", "lint"]),
    "requirements": ([MODULE], ["lint", "tests/python/test_stubs.py"]),
    ".clang-format": ([], ["lint"]),
    "tests": (["core_tests"], ["cpp.core"]),
    "tests/headers": ([], ["headers"]),
    "tests/layers": ([], ["layers"]),
    "tests/faults": ([CLI, MODULE, "fault_shim"], ["faults", "powerloss", "flips"]),
    "tests/fuzz": (["all"], ["fuzz"]),
    "tests/reference": (["ops_tests", "nn_tests"], ["cpp.ops", "cpp.nn"]),
    "tests/consumer_wheel.py": ([CLI, MODULE], ["consumer.wheel"]),
    "tests/consumer_subdirectory": (["all"], ["consumer.subdirectory"]),
    "tests/consumer_find_package": (["all"], ["consumer.find_package"]),
    "tests/consumer": (["all"], ["consumer.find_package", "consumer.subdirectory"]),
}


def changed() -> list[str]:
    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return lines("diff", "--name-only", "HEAD") + lines("ls-files", "--others", "--exclude-standard")


def files_of(name: str) -> list[str]:
    """The files of a folder; another name is its own."""
    if not (ROOT / name).is_dir():
        return [name]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def layer_of(path: pathlib.PurePath) -> str | None:
    parts = path.parts
    if parts[:2] == ("include", "qlorapp") and len(parts) > 3:
        return parts[2]
    if parts[0] in ("src", "tests") and len(parts) > 2:
        return parts[1]
    return "cuda" if parts[0] == "cuda" else None


def of_others(name: str) -> tuple[list[str], list[str]]:
    found = [start for start in OTHERS if name.startswith(start)]
    return OTHERS[max(found, key=len)] if found else ([], [])


@functools.cache
def has_suite(layer: str) -> bool:
    listing = ROOT / "tests" / layer / "CMakeLists.txt"
    return listing.is_file() and f"qlorapp_test({layer} " in listing.read_text(encoding="utf-8")


@functools.cache
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
    for given in names:
        if not has_suite(given) and "/" not in given and not (ROOT / given).exists():
            sys.exit(f"[check] {given} must be a layer (a folder of tests/ with a C++ suite) or a file of the repository.")
    for name in itertools.chain.from_iterable([given] if has_suite(given) else files_of(given) for given in names):
        path = pathlib.PurePath(name)
        layer = name if has_suite(name) else layer_of(path)
        built, run = of_others(name)
        if layer is not None and has_suite(layer):
            built, run = [f"{layer}_tests"], [f"cpp.{layer}", "layers"]
        elif path.parts[:2] == ("tests", "python"):
            files = [path.name] if path.stem.startswith("test_") else python_tests_of(path.stem)
            built, run = [MODULE], [f"tests/python/{file}" for file in files]
        elif path.parts[:2] == ("python", "qlorapp") and path.stem != "__init__" and (files := python_tests_of(path.stem)):
            built, run = [MODULE], [f"tests/python/{file}" for file in files]
        targets.update(dict.fromkeys(built))
        tests.update(dict.fromkeys(run))
    return list(targets), list(tests)


if __name__ == "__main__":
    found = touched([pathlib.PurePath(name).as_posix() for name in sys.argv[1:]] or changed())
    print("\n".join(" ".join(line) for line in found))
