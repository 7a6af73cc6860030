# SPDX-License-Identifier: Apache-2.0
"""Writes the stubs in python/qlorapp: _C.pyi from the signatures that pybind11 puts into the built module's docstrings, and
_config_types.pyi, the configs as type checkers and editors see them, from the field tables.

python scripts/make_stubs.py [--check]      run it after a binding or a table has changed; a test compares the committed files
"""

import ast
import pathlib
import re
import sys
import textwrap
import types
import typing

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "python" / "qlorapp"
TARGET = PACKAGE / "_C.pyi"
CONFIGS = PACKAGE / "_config_types.pyi"
HEADER = """# SPDX-License-Identifier: Apache-2.0
# Made by scripts/make_stubs.py from the compiled module. Do not edit.
import collections.abc
import typing

import torch
"""
CONFIG_HEADER = """# SPDX-License-Identifier: Apache-2.0
# Made by scripts/make_stubs.py from the field tables. Do not edit.
import dataclasses
import os
import typing

import torch

from .field_table import Table
from .peft_config import PeftConfig
from .quantization import QuantizationTable
from .sft_config import SFTTable
from .training_arguments import TrainingTable
"""
#: {config: its bases}
CONFIG_BASES = {
    "TrainingArguments": "TrainingTable",
    "SFTConfig": "SFTTable, TrainingArguments",
    "LoraConfig": "PeftConfig, Table",
    "BitsAndBytesConfig": "QuantizationTable",
}
#: Fields that hold something else than the table's type, once they are settled.
_HELD = {
    **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"), "torch.dtype | None"),
    **dict.fromkeys(("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"), "dict[str, typing.Any] | None"),
    **dict.fromkeys(("model_init_kwargs", "dataset_kwargs"), "dict[str, typing.Any] | None"),
}
_OVERLOAD = re.compile(r"^\d+\. ", re.M)


class _Arguments(ast.NodeTransformer):
    """pybind11's bare dict, list, tuple and Callable, with the arguments that a strict type checker wants."""

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
    """A default that is no literal (a device's repr) becomes an ellipsis."""
    for values in (function.args.defaults, function.args.kw_defaults):
        for i, value in enumerate(values):
            if value is None:
                continue
            try:
                ast.literal_eval(value)
            except ValueError:
                values[i] = ast.Constant(...)


def _signatures(doc: str) -> list[tuple[str, str]]:
    """[(signature, text behind it)] of a pybind11 docstring; several of an overloaded function."""
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


def _config(name: str, kind: typing.Any, base: typing.Any) -> list[str]:
    """A dataclass whose constructor takes a little more than its fields hold: a string for a list, a dtype by name.

    base: the config that it derives from, whose fields it need not repeat; or None.
    """
    rows, aliases, doc = kind.field_rows, kind.field_aliases, kind.__doc__.partition("\n\nOptions:")[0]
    known = {row[0]: row[1] for row in base.field_rows} if base is not None else {}
    held, taken = {}, {}
    for field, kind, *_ in rows:
        kind = re.sub(r"\bdict\b(?!\[)", "dict[str, typing.Any]", kind)
        held[field] = _HELD.get(field, kind)
        wide = [held[field]]
        if kind.startswith("list[") and "str" not in kind.split(" | "):
            wide.append("str | None")
        if field in _HELD:
            wide.append("str")
        if field == "output_dir":
            wide.append("os.PathLike[str]")
        taken[field] = " | ".join(wide)
    text = "\n    ".join(line.strip() for line in doc.strip().splitlines())
    lines = ["@dataclasses.dataclass", f"class {name}({CONFIG_BASES[name]}):", f'    """{text}"""'.replace("\n    \n", "\n\n")]
    spelt = {row[0]: row[1] for row in rows}
    for field, kind in held.items():
        if known.get(field) != spelt[field]:
            lines.append(f"    {field}: {kind}" + ("  # type: ignore[assignment]" if field in known else ""))
    for alias, (field, _) in aliases.items():
        if base is not None and alias in base.field_aliases:
            continue
        lines += ["    @property", f"    def {alias}(self) -> {held[field]}: ..."]
    lines.append("    def __init__(")
    lines.append("        self,")
    lines += [f"        {field}: {kind} = ...," for field, kind in taken.items()]
    lines.append("        *,")
    lines += [f"        {alias}: {taken[field]} | None = ...," for alias, (field, _) in aliases.items()]
    lines.append("    ) -> None: ...")
    return lines


def config_stubs() -> str:
    """The text of the stub file of the configs."""
    import qlorapp

    blocks = []
    for name in CONFIG_BASES:
        base = qlorapp.TrainingArguments if name == "SFTConfig" else None
        blocks.append(_config(name, getattr(qlorapp, name), base))
    return CONFIG_HEADER + "\n" + "\n\n".join("\n".join(block) for block in blocks) + "\n"


def main() -> int:
    from qlorapp import _C

    texts = {TARGET: stubs(_C), CONFIGS: config_stubs()}
    if "--check" in sys.argv:
        return 0 if all(path.read_text(encoding="utf-8") == text for path, text in texts.items()) else 1
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
