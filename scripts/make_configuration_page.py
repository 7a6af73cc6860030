#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the field tables that a built qlorapp has.

PYTHONPATH=build/dev/python python scripts/make_configuration_page.py > docs/configuration.md
"""

import json
import sys

import qlorapp
from qlorapp import _C, sft_config

HEAD = """# Configuration

Every option of the four configurations, made by `scripts/make_configuration_page.py` from the field tables of the library; a test
keeps this page current. Names, meanings and defaults are those of transformers (4.46 to 5.23), TRL (0.9 to 1.16), PEFT and
bitsandbytes, in Python, in JSON and, but for SFTConfig, on the command line alike (`--learning_rate` or `--learning-rate`). Unless told otherwise the command stores linear layers as NF4
with double quantization and computes in the dtype of the checkpoint; the first lines of a run say so. An option is

- **used**: it has the effect that stands beside it;
- **no effect**: it is accepted, changes nothing here, and is said once with the reason when it is set;
- **refused**: setting it is an error that says why, and what to do instead.

A name that is in no table is an error that names the nearest one.
"""
TABLES = {
    "TrainingArguments": (_C.training_arguments_fields, _C.training_arguments_aliases),
    "SFTConfig": (sft_config.fields, sft_config.aliases),
    "LoraConfig": (_C.lora_config_fields, _C.lora_config_aliases),
    "BitsAndBytesConfig": (_C.bits_and_bytes_config_fields, _C.bits_and_bytes_config_aliases),
}
STATUS = {"used": "used", "accepted_and_said": "no effect", "refused": "refused"}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    parts = [HEAD]
    for name, (fields, aliases) in TABLES.items():
        parts.append(f"## {name}\n\n{getattr(qlorapp, name).__doc__.strip().splitlines()[0]}\n")
        if name == "SFTConfig":
            parts.append("These have another default than TrainingArguments', or are no options of it:\n")
        parts.append("| option | type | default | | |\n|---|---|---|---|---|")
        for option, kind, default, doc, status, reason in fields():
            shown = json.dumps(json.loads(default))
            text = ": ".join(part for part in (doc, reason) if part)
            parts.append(f"| `{option}` | {cell(kind)} | `{cell(shown)}` | {STATUS[status]} | {cell(text)} |")
        parts.append(
            "\nOther spellings: " + ", ".join(f"`{alias}` for `{field}`" for alias, (field, _) in aliases().items()) + ".\n"
        )
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
