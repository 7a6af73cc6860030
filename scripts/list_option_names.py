#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists the options of Hugging Face's configurations, from released wheels.

    for wheel in transformers==5.23.0 transformers==4.57.6 transformers==4.46.3 peft==0.21.2 \
        trl==1.16.0 trl==0.24.0 trl==0.19.1 trl==0.15.2 trl==0.12.2 trl==0.9.6; do pip download --no-deps -d WHEELS $wheel; done
    python scripts/list_option_names.py WHEELS > tests/python/option_names.json

The wheels are parsed (ast), never imported, because these releases cannot be installed together. tests/python/test_option_names.py compares
qlorapp's field tables with the file.
"""

import ast
import json
import pathlib
import sys
import zipfile

#: (wheel, file, class): a class is read with the base classes that its own file defines.
SOURCES = [
    ("transformers-5.23.0", "transformers/training_args.py", "TrainingArguments"),
    ("transformers-4.57.6", "transformers/training_args.py", "TrainingArguments"),
    ("transformers-4.46.3", "transformers/training_args.py", "TrainingArguments"),
    ("transformers-5.23.0", "transformers/utils/quantization_config.py", "BitsAndBytesConfig"),
    ("transformers-4.57.6", "transformers/utils/quantization_config.py", "BitsAndBytesConfig"),
    ("transformers-4.46.3", "transformers/utils/quantization_config.py", "BitsAndBytesConfig"),
    ("peft-0.21.2", "peft/tuners/lora/config.py", "LoraConfig"),
    ("peft-0.21.2", "peft/config.py", "PeftConfig"),
    ("trl-1.16.0", "trl/trainer/base_config.py", "_BaseConfig"),
    ("trl-1.16.0", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-0.24.0", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-0.19.1", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-0.15.2", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-0.12.2", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-0.9.6", "trl/trainer/sft_config.py", "SFTConfig"),
    ("trl-1.16.0", "trl/trainer/sft_trainer.py", "SFTTrainer"),
    ("trl-0.24.0", "trl/trainer/sft_trainer.py", "SFTTrainer"),
    ("trl-0.9.6", "trl/trainer/sft_trainer.py", "SFTTrainer"),
]


def default_of(value: ast.expr | None) -> str:
    """A field's default as source text: from field(default=…), field(default_factory=…), or the value."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "field":
        for keyword in value.keywords:
            if keyword.arg == "default":
                return ast.unparse(keyword.value)
            if keyword.arg == "default_factory":
                return f"{ast.unparse(keyword.value)}()"
        return ""
    return "" if value is None else ast.unparse(value)


def takes_no_argument(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and getattr(keyword.value, "value", None) is False for keyword in value.keywords
    )


def options_of(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, list[str]]:
    """{option: [type, default]}: dataclass fields, else the parameters of __init__; base classes first."""
    found: dict[str, list[str]] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= options_of(base.id, classes)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not takes_no_argument(node.value):
            kind = ast.unparse(node.annotation)
            if not kind.startswith("ClassVar"):
                found[node.target.id] = [kind, default_of(node.value)]
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args.args[1:]
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
            for argument, default in zip(arguments, defaults, strict=True):
                kind = ast.unparse(argument.annotation) if argument.annotation else ""
                found[argument.arg] = [kind, default_of(default)]
    return found


def main() -> None:
    wheels = pathlib.Path(sys.argv[1])
    listed: dict[str, dict[str, dict[str, list[str]]]] = {}
    for release, path, name in SOURCES:
        (wheel,) = wheels.glob(f"{release}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            tree = ast.parse(archive.read(path))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        listed.setdefault(name, {})[release] = options_of(name, classes)
    json.dump(listed, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
