#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the field tables that a built qlorapp has.

PYTHONPATH=build/dev/python python scripts/make_configuration_page.py > docs/configuration.md
"""

import json
import sys

from qlorapp import _C
from qlorapp.hf import older_names
from qlorapp.hf.training_arguments import OWN

HEAD = """# Configuration

Made by `scripts/make_configuration_page.py` from the field tables of the library; a test keeps this page current.

## In Python

`TrainingArguments` and `SFTConfig` are subclasses of transformers' and TRL's: every option of theirs has their meaning and default. `LoraConfig` and
`BitsAndBytesConfig` are PEFT's and transformers' own. See their documentation. The C++ loop computes the options of a step that stand in the tables
below; one that changes a step and is not there moves `train()` to transformers' loop ([architecture.md](architecture.md#what-runs-in-c-and-what-does-not)). These options are added:
"""
COMMAND = """
## On the command line

Options of `qlorapp train`, and of the file that `--config` names, alike (`--learning_rate` or `--learning-rate`). Names, meanings and defaults are those of transformers,
TRL, PEFT and bitsandbytes where they have the option. Unless told otherwise the command stores linear layers as NF4 with double quantization and computes in the
dtype of the checkpoint; the first lines of a run say so.

Other names of transformers, PEFT and bitsandbytes are answered: `qlorapp train --help-all` lists those that change nothing and those that are refused, with the reason. Any
other name is an error that names the nearest one.
"""
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
    """The options that this library adds, and the older names that it reads."""
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for option, kind, default, doc, *_ in _C.training_arguments_fields():
        if option in OWN:
            lines.append(f"| `{option}` | {cell(kind)} | `{cell(json.dumps(json.loads(default)))}` | {cell(doc)} |")
    older = older_names._RENAMED | {old: f"{new}={value!r}" for old, (new, value) in older_names._SWITCHES.items()}
    lines.append(f"\nOlder names, each logged once: {names(older)}.")
    lines.append(f"Accepted without effect: {', '.join(f'`{old}`' for old in older_names._WITHOUT_EFFECT)}.")
    return lines


def page() -> str:
    parts = [HEAD, *python_options(), COMMAND]
    for name, (fields, aliases) in TABLES.items():
        parts.append(f"### {name}\n\n| option | type | default | |\n|---|---|---|---|")
        for option, kind, default, doc in fields():
            parts.append(f"| `{option}` | {cell(kind)} | `{cell(json.dumps(json.loads(default)))}` | {cell(doc)} |")
        parts.append(f"\nOther spellings: {names({alias: field for alias, (field, _) in aliases().items()})}.\n")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
