# SPDX-License-Identifier: Apache-2.0
"""The package itself: its versions agree, a torch that it was not built for is refused in one sentence, its modules stand in an order."""

import ast
import graphlib
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_versions_agree_with_the_build_and_with_torch():
    import qlorapp

    declared = re.search(r"project\(qlorapp VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    assert qlorapp.__version__ == qlorapp._C.__version__ == declared
    assert torch.__version__.startswith(qlorapp._C.torch_version + ".")


PACKAGE = ROOT / "python" / "qlorapp"


def name_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(path: pathlib.Path) -> set[str]:
    """The package's modules that a module imports, wherever in it; for type checkers alone does not count."""
    found = set()
    waiting = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id.endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            if node.module:
                folder = folder.joinpath(*node.module.split("."))
            found |= {folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return {name_of(module) for module in found if module.exists()}


def test_the_modules_import_each_other_in_one_direction():
    graph = {name_of(path): imports_of(path) for path in PACKAGE.rglob("*.py")}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a cycle
    assert len(order) == len(graph) and order.index("hf.pristine") < order.index("hf.forward") < order.index("hf.sft")


def import_with(path: pathlib.Path, build_dir: pathlib.Path) -> subprocess.CompletedProcess:
    """Imports qlorapp in a fresh interpreter that finds `path` before site-packages."""
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{build_dir / 'python'}"}
    return subprocess.run([sys.executable, "-c", "import qlorapp"], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["2.13.0", "2.10.1+cu128", "3.11.0", "2.1.1"])
def test_another_torch_is_refused_before_anything_is_loaded(tmp_path, build_dir, version):
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    result = import_with(tmp_path, build_dir)
    assert result.returncode == 1
    last = result.stderr.strip().split("\n")[-1]
    built, found = ".".join(torch.__version__.split(".")[:2]), ".".join(version.split(".")[:2])
    assert last.startswith(f"ImportError: qlorapp was built for torch {built} but torch {found} is installed: pip install")
    assert "undefined symbol" not in result.stderr


def test_the_same_minor_version_passes_the_check(tmp_path, build_dir):
    # A fake without libraries gets past the check and fails later, for another reason.
    (tmp_path / "torch.py").write_text(f"__version__ = {'.'.join(torch.__version__.split('.')[:2]) + '.99+cpu'!r}\n")
    assert "was built for torch" not in import_with(tmp_path, build_dir).stderr


def test_a_missing_torch_is_named(tmp_path, build_dir):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    last = import_with(tmp_path, build_dir).stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: qlorapp needs torch ") and "pip install" in last


def test_a_broken_torch_keeps_its_own_error(tmp_path, build_dir):
    (tmp_path / "torch.py").write_text("import a_module_that_is_not_there\n")
    assert "No module named 'a_module_that_is_not_there'" in import_with(tmp_path, build_dir).stderr.strip().split("\n")[-1]
