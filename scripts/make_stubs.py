# SPDX-License-Identifier: Apache-2.0
"""Writes python/qlorapp/_C.pyi from the signatures in the built module's docstrings.

python scripts/make_stubs.py [--check]      run it after a binding changes; a test compares the committed file
"""

import ast
import pathlib
import re
import sys
import textwrap
import types
import typing

TARGET = pathlib.Path(__file__).resolve().parents[1] / "python" / "qlorapp" / "_C.pyi"
HEADER = """# SPDX-License-Identifier: Apache-2.0
# Made by scripts/make_stubs.py from the compiled module. Do not edit.
import collections.abc
import typing

import torch
"""
_OVERLOAD = re.compile(r"^\d+\. ", re.M)


class _Arguments(ast.NodeTransformer):
    """Adds the arguments that a strict type checker requires to pybind11's dict, list, tuple and Callable."""

    _WHOLE: typing.ClassVar = {
        "dict": "dict[typing.Any, typing.Any]",
        "list": "list[typing.Any]",
        "tuple": "tuple[typing.Any, ...]",
        "collections.abc.Callable": "collections.abc.Callable[..., typing.Any]",
    }

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.slice = self.visit(node.slice)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._whole(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._whole(node)

    def _whole(self, node: ast.expr) -> ast.AST:
        return ast.parse(self._WHOLE.get(ast.unparse(node), ast.unparse(node)), mode="eval").body


def _whole_types(function: ast.FunctionDef) -> None:
    for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
        if argument.annotation is not None:
            argument.annotation = _Arguments().visit(argument.annotation)
    if function.returns is not None:
        function.returns = _Arguments().visit(function.returns)


def _plain_defaults(function: ast.FunctionDef) -> None:
    """Replaces a default that is not a literal (a device's repr) by an ellipsis."""
    for values in (function.args.defaults, function.args.kw_defaults):
        for i, value in enumerate(values):
            if value is None:
                continue
            try:
                ast.literal_eval(value)
            except ValueError:
                values[i] = ast.Constant(...)


def _signatures(doc: str) -> list[tuple[str, str]]:
    """[(signature, text after it)] of a pybind11 docstring; several for an overloaded function."""
    first, _, rest = doc.partition("\n")
    if "Overloaded function." not in rest:
        return [(first, rest.strip())]
    parts = [part.strip() for part in _OVERLOAD.split(rest)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2].strip()) for part in parts]


def _docstring(text: str, indent: str) -> str:
    end = f"\n{indent}" if "\n" in text else ""
    return textwrap.indent(f'"""{text}{end}"""', indent)


def _function(name: str, doc: str, indent: str, decorator: str = "") -> list[str]:
    lines = []
    signatures = _signatures(doc)
    for signature, text in signatures:
        arguments = re.sub(
            r"= <[^<>]* object at 0x[0-9a-f]+>", "= ...", signature[signature.index("(") :].replace("qlorapp._C.", "")
        )
        parsed = ast.parse(f"def {name}{arguments}: ...").body[0]
        assert isinstance(parsed, ast.FunctionDef)
        for argument in [*parsed.args.posonlyargs, *parsed.args.args][:1]:
            if argument.arg in ("self", "arg0") and indent:
                argument.arg, argument.annotation = "self", None
        _plain_defaults(parsed)
        _whole_types(parsed)
        if len(signatures) > 1:
            lines.append(f"{indent}@typing.overload")
        if decorator:
            lines.append(f"{indent}{decorator}")
        head = ast.unparse(parsed).removesuffix("\n    ...")
        lines += [f"{indent}{head}", _docstring(text, f"{indent}    ")] if text else [f"{indent}{head} ..."]
    return lines


def _property(name: str, member: property) -> list[str]:
    lines = _function(name, member.fget.__doc__ or "(self) -> typing.Any", "    ", "@property")
    if member.__doc__ and member.__doc__ != member.fget.__doc__:
        text = member.__doc__.strip()
        lines[-1] = lines[-1].removesuffix(" ...")
        lines.append(_docstring(text, "        "))
    if member.fset is not None:
        setter = _function(name, member.fset.__doc__, "    ", f"@{name}.setter")
        lines += [line.replace("arg1:", "value:") for line in setter]
    return lines


def _class(name: str, kind: type) -> list[str]:
    base = next((b.__name__ for b in kind.__bases__ if b is not object and b.__module__ == "builtins"), "")
    lines = [f"class {name}({base}):" if base else f"class {name}:"]
    if kind.__doc__ and not base:
        lines.append(_docstring(kind.__doc__.strip(), "    "))
    for member_name, member in vars(kind).items():
        if isinstance(member, property):
            lines += _property(member_name, member)
        elif isinstance(member, staticmethod):
            lines += _function(member_name, member.__func__.__doc__ or "", "    ", "@staticmethod")
        elif callable(member) and (member.__doc__ or "").startswith(f"{member_name}("):
            lines += _function(member_name, member.__doc__, "    ")
    return lines if len(lines) > 1 else [f"{lines[0]} ..."]


def stubs(module: types.ModuleType) -> str:
    """The text of the stub file."""
    blocks = []
    for name, member in sorted(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(member, type):
            blocks.append(_class(name, member))
        elif callable(member):
            blocks.append(_function(name, member.__doc__ or "", ""))
        else:
            blocks.append([f"{name}: {type(member).__name__}"])
    return HEADER + "\n" + "\n\n".join("\n".join(block) for block in blocks) + "\n"


def main() -> int:
    from qlorapp import _C

    text = stubs(_C)
    if "--check" in sys.argv:
        return 0 if TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
