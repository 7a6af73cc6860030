#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the field tables of a built qlorapp.

PYTHONPATH=build/dev/python python scripts/make_configuration_page.py > docs/configuration.md
"""

import json
import sys

from qlorapp import _C
from qlorapp.hf import older_names
from qlorapp.hf.training_arguments import OWN

HEAD = """# Configuration

`scripts/make_configuration_page.py` writes this page from the library's field tables. A test checks that it is current.

## In Python

`TrainingArguments` and `SFTConfig` are subclasses of transformers' and TRL's. All of their options keep their meaning and default. `LoraConfig` and
`BitsAndBytesConfig` are PEFT's and transformers'; see their documentation. C++ computes the options in the tables below. An option that changes a
step and is not listed leaves the steps to torch ([architecture.md](architecture.md#what-runs-in-c-and-what-does-not)). Added options:
"""
COMMAND = """
## On the command line

These are the options of `qlorapp train` and of the file given by `--config` (`--learning_rate` or `--learning-rate`). Options on the line override the file.
It is JSON, or YAML if its name ends in `.yaml` or `.yml`: mappings, lists, one-line values, quotes and comments. Each value has the type of its option, so `1e-4`,
`no`, `on` and `null` mean what they mean in configs of transformers. Anchors, tags, text over several lines, several documents, tabs and duplicate keys are errors that
name line and column ([ADR 27](adr/0027-own-yaml-reader.md)). Names and meanings follow transformers, TRL, PEFT and bitsandbytes.

The command has defaults of its own for adapters on a 4-bit base ([sft.md](sft.md#defaults-of-the-command)); the tables
mark them, and `--defaults trainer` replaces them with the value in brackets. A list is separated by commas or spaces. In the file, a key that begins with `//` is
a comment. By default the command stores linear layers as NF4 with double quantization and computes in the dtype of the
checkpoint. The first lines of a run log both.

`qlorapp train --help-all` lists the other names of transformers, PEFT and bitsandbytes: those without effect, and those that raise an error with the reason. Any
other name is an error that suggests the nearest option, or the name here of another trainer's option.
"""
COMMAND_DEFAULTS = json.loads(_C.command_defaults())
TABLES = {
    "TrainingArguments": (_C.training_arguments_fields, _C.training_arguments_aliases),
    "LoraConfig": (_C.lora_config_fields, _C.lora_config_aliases),
    "BitsAndBytesConfig": (_C.bits_and_bytes_config_fields, _C.bits_and_bytes_config_aliases),
}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def names(pairs: dict[str, str]) -> str:
    return ", ".join(f"`{old}` for `{new}`" for old, new in pairs.items())


def python_options() -> list[str]:
    """The table of options that this library adds, and of older names that it accepts."""
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for option, kind, default, doc, *_ in _C.training_arguments_fields():
        if option in OWN:
            lines.append(f"| `{option}` | {cell(kind)} | `{cell(json.dumps(json.loads(default)))}` | {cell(doc)} |")
    older = older_names._RENAMED | {old: f"{new}={value!r}" for old, (new, value) in older_names._SWITCHES.items()}
    lines.append(f"\nOlder names, each logged once: {names(older)}.")
    lines.append(f"Accepted without effect: {', '.join(f'`{old}`' for old in older_names._WITHOUT_EFFECT)}.")
    return lines


def default_of(option: str, default: str) -> str:
    plain = f"`{cell(json.dumps(json.loads(default)))}`"
    return f"**`{json.dumps(COMMAND_DEFAULTS[option])}`** ({plain})" if option in COMMAND_DEFAULTS else plain


def page() -> str:
    parts = [HEAD, *python_options(), COMMAND]
    for name, (fields, aliases) in TABLES.items():
        parts.append(f"### {name}\n\n| option | type | default | |\n|---|---|---|---|")
        for option, kind, default, doc in fields():
            parts.append(f"| `{option}` | {cell(kind)} | {default_of(option, default)} | {cell(doc)} |")
        parts.append(f"\nOther spellings: {names({alias: field for alias, (field, _) in aliases().items()})}.\n")
    parts.append("## In the config.json of a model\n")
    parts.append(
        "The scalar keys that C++ reads; [formats/model.md](formats/model.md) has the others. A missing key has the default of transformers'"
    )
    parts.append("config class of the family.\n\n| key | type | | |\n|---|---|---|---|")
    for key, kind, least, most, required, doc in _C.config_fields():
        span = {"int": f"{least:.0f} to {most:.0f}", "float": f"between {least:g} and {most:g}", "bool": ""}[kind]
        parts.append(f"| `{key}` | {kind} | {span}{', required' if required else ''} | {doc} |")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
