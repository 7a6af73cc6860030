# SPDX-License-Identifier: Apache-2.0
"""Reads every #include of the sources and fails on an arrow that goes up (docs/architecture.md, ADR 1).

    python tests/layers/check_layers.py [repository]

Also: core, json, files, format, text and cuda know nothing of torch; torch's umbrella headers are used nowhere, std::filesystem nowhere in the library;
every file of ours begins with its SPDX line and has at most 500 lines.
"""

from __future__ import annotations

import pathlib
import re
import sys

# A layer may include itself and what stands in its row.
ALLOWED = {
    "core": set(),
    "json": {"core"},
    "files": {"json", "core"},
    "format": {"files", "json", "core"},
    "text": {"files", "json", "core"},
    "cuda": {"core", "format"},
    "ops": {"cuda", "format", "core"},
    "quant": {"ops", "format", "core"},
    "adapters": {"quant", "ops", "format", "json", "core"},
    "dist": {"core"},
    "nn": {"dist", "adapters", "quant", "ops", "format", "core"},
    "io": {"nn", "dist", "adapters", "quant", "ops", "format", "text", "files", "json", "core"},
    "data": {"nn", "adapters", "quant", "ops", "format", "text", "files", "json", "core"},
    "memory": {"nn", "dist", "adapters", "quant", "ops", "format", "files", "json", "core"},
}
ALLOWED["train"] = {"io", "data", "memory", "dist", "nn", "adapters", "quant", "ops", "format", "text", "files", "json", "core"}
ALLOWED["cli"] = ALLOWED["python"] = ALLOWED["train"] | {"train"}

TORCH_FREE = {"core", "json", "files", "format", "text", "cuda"}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
# 36 and 62 seconds a file. Use ATen/core/Tensor.h, ATen/ops/*.h, torch/library.h, torch/csrc/utils/pybind.h.
UMBRELLAS = {"torch/torch.h", "torch/extension.h", "torch/all.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
SOURCES = {".hpp", ".h", ".cpp", ".cu", ".cuh", ".inc"}
MAX_LINES = 500


def layer_of(path: pathlib.PurePath) -> str | None:
    """include/qlorapp/<layer>/…, src/<layer>/…, cuda/…, cli/…, python/src/…; None for what is outside the house."""
    parts = path.parts
    if parts[:2] == ("include", "qlorapp") and len(parts) > 3:
        return parts[2]
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    if parts[0] in ("cuda", "cli", "python"):
        return parts[0]
    return None


def target_of(include: str, source: pathlib.PurePath, root: pathlib.Path) -> str | None:
    """The layer that an include leads to; None if it is not ours."""
    if include.startswith("qlorapp/"):
        parts = include.split("/")
        return parts[1] if len(parts) > 2 else None
    beside = (root / source.parent / include).resolve()
    if beside.exists() and beside.is_relative_to(root.resolve()):
        return layer_of(beside.relative_to(root.resolve()))
    for folder in ("src", "cuda", "."):  # a private header named from the top of a folder
        candidate = root / folder / include
        if candidate.exists():
            return layer_of(candidate.relative_to(root))
    return None


def check(root: pathlib.Path) -> list[str]:
    """All that is wrong, as `file: rule` lines."""
    errors = []
    for folder in ("include", "src", "cuda", "cli", "python", "examples", "benchmarks", "tests", "scripts"):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root)
            if path.suffix not in SOURCES | {".py"} or "__pycache__" in name.parts:
                continue
            text = path.read_text(encoding="utf-8")
            if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(text.split("\n")[:2]):
                errors.append(f"{name}: begins without 'SPDX-License-Identifier: Apache-2.0'")
            lines = text.count("\n")
            if lines > MAX_LINES and not name.stem.endswith("_table"):
                errors.append(f"{name}: {lines} lines; {MAX_LINES} at most (one concept a file)")
            if path.suffix in SOURCES:
                errors += [f"{name}: {error}" for error in check_includes(name, text, root)]
    return errors


def check_includes(name: pathlib.PurePath, text: str, root: pathlib.Path) -> list[str]:
    errors = []
    layer = layer_of(name)
    if layer is not None and layer not in ALLOWED:
        return [f"'{layer}' is no layer of this house; known are {', '.join(ALLOWED)}"]
    for include in INCLUDE.findall(text):
        if include in UMBRELLAS and (layer is not None or name.parts[0] == "tests"):
            errors.append(f"includes <{include}>, which costs half a minute a file; take the light headers")
        if layer is None:
            continue
        if include == "filesystem":
            errors.append("includes <filesystem>, of which torch's wheels export a foreign copy; take files/folder.hpp")
        if layer in TORCH_FREE and TORCH.match(include):
            errors.append(f"includes <{include}>, but {layer} is torch-free")
        target = target_of(include, name, root)
        if target is not None and target != layer and target not in ALLOWED[layer]:
            errors.append(f"includes {include}: an arrow from {layer} to {target} goes up or sideways")
    return errors


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2])
    errors = check(root)
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
