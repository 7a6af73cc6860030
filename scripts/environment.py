#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an interpreter has, for ./dev. Runs in any Python 3, before anything is installed.

python environment.py torch            exits with 0 if it has torch >= 2.8 with headers
python environment.py headers          … if it has Python.h
python environment.py lacking          prints the packages of the tests and the pinned tools that it lacks
python environment.py hold_torch       prints a constraint that keeps its torch
python environment.py neighbor FOLDER  lets a venv in this folder find what this interpreter has beside torch
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import sys
import sysconfig

MODULES = "bitsandbytes transformers peft trl safetensors tokenizers pytest hypothesis scikit_build_core mypy".split()
TOOLS = ("cmake", "ninja")
LEAST_TORCH = (2, 8)


def has_torch():
    found = importlib.util.find_spec("torch")
    if not found or not os.path.exists(os.path.join(found.submodule_search_locations[0], "include", "torch", "library.h")):
        return False
    return tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) >= LEAST_TORCH


def lacking():
    present = {(d.name.lower(), d.version) for d in importlib.metadata.distributions() if d.name}
    pins = pathlib.Path(__file__).resolve().parents[1] / "requirements" / "lint.txt"
    exact = [line.strip() for line in pins.read_text().splitlines() if "==" in line]
    return [
        *(name.replace("_", "-") for name in MODULES if not importlib.util.find_spec(name)),
        *(name for name in TOOLS if not shutil.which(name)),
        *(pin for pin in exact if tuple(pin.replace("[toml]", "").split("==")) not in present),
    ]


def let_find_neighbors(venv):
    """torch and its dependencies then need no second download."""
    (site,) = pathlib.Path(venv).glob("lib/python*/site-packages")
    beside_torch = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
    (site / "neighbors.pth").write_text(f"{beside_torch}\n")


def main():
    what = sys.argv[1]
    if what == "torch":
        sys.exit(not has_torch())
    if what == "headers":
        sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
    if what == "lacking":
        print(*lacking())
    elif what == "hold_torch":
        print(f"torch=={importlib.metadata.version('torch')}")
    elif what == "neighbor":
        let_find_neighbors(sys.argv[2])
    else:
        sys.exit(f"environment.py: unknown: {what}")


if __name__ == "__main__":
    main()
