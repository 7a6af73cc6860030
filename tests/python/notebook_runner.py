# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook without Jupyter: a stand-in for IPython's kernel that keeps what is displayed.

It knows what the notebooks here use: display, HTML, pictures and handles that are updated, the value of a cell's last line, `%pip` and `!` lines
(left out), and the parameters cell, whose values may be replaced.
"""

import ast
import contextlib
import io
import json
import pathlib
import sys
import types
from typing import Any


class HTML:
    def __init__(self, data: str) -> None:
        self.data = data


class Kernel:
    """Puts itself in IPython's place for as long as the `with` block runs."""

    def __init__(self) -> None:
        self.displayed: list[list[str]] = []  # of each output its versions, the last one is what is seen
        self.printed = io.StringIO()

    def display(self, value: Any, display_id: Any = None) -> Any:
        draw = getattr(value, "_repr_svg_", None)
        versions = [draw() if draw else getattr(value, "data", str(value))]
        self.displayed.append(versions)
        return types.SimpleNamespace(update=lambda new: versions.append(getattr(new, "data", str(new)))) if display_id else None

    @contextlib.contextmanager
    def running(self):
        events = types.SimpleNamespace(register=lambda *_: None)  # matplotlib draws figures there
        shell = types.SimpleNamespace(config={"IPKernelApp": {}}, events=events)
        ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        ipython.get_ipython, ipython.version_info = (lambda: shell), (9, 0)
        ipython.display = module
        module.display, module.HTML = self.display, HTML
        before = {name: sys.modules.get(name) for name in ("IPython", "IPython.display")}
        sys.modules.update({"IPython": ipython, "IPython.display": module})
        try:
            with contextlib.redirect_stdout(self.printed):
                yield self
        finally:
            for name, old in before.items():
                if old is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = old


def cells_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(path: pathlib.Path, parameters: dict[str, Any], kernel: Kernel) -> dict[str, Any]:
    """The variables of all cells, also those that a later cell deletes. `parameters` replace assignments of the cell tagged "parameters"."""
    seen: dict[str, Any] = {}
    variables: dict[str, Any] = {"__name__": "__main__", "display": kernel.display}
    left = set(parameters)
    with kernel.running():
        for cell in cells_of(path):
            if cell["cell_type"] != "code":
                continue
            source = "".join(line for line in cell["source"] if not line.lstrip().startswith(("%", "!")))
            tree = ast.parse(source)
            if "parameters" in cell["metadata"].get("tags", []):
                for node in tree.body:
                    if isinstance(node, ast.Assign) and (name := node.targets[0].id) in parameters:
                        node.value = ast.copy_location(ast.Constant(parameters[name]), node.value)
                        left.discard(name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), variables)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), str(path), "eval"), variables)
                if value is not None and not hasattr(value, "_ipython_display_"):
                    kernel.display(value)
            seen.update(variables)
    assert not left, f"no parameters of the notebook: {left}"
    return seen
