# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's classes over the engine."""

import importlib.metadata
import logging

#: {package: (oldest, newest) tested minor version}
TESTED = {"transformers": ((5, 22), (5, 24)), "peft": ((0, 20), (0, 21)), "trl": ((1, 16), (1, 16))}


def _check(versions: dict[str, str]) -> None:
    """Warns once about packages newer than the tested versions. @raises ImportError for an older one."""
    newer, install = [], []
    for package, (oldest, newest) in TESTED.items():
        found = tuple(int(part) for part in versions[package].split(".")[:2])
        first, last = (".".join(map(str, version)) for version in (oldest, newest))
        if found < oldest:
            raise ImportError(
                f"qlorapp needs {package} {first} to {last}; {versions[package]} is installed: pip install -U '{package}>={first}'.",
                name=package,
            )
        if found > newest:
            newer.append(f"{package} {versions[package]} ({first} to {last})")
            install.append(f"'{package}=={last}.*'")
    if newer:
        logging.getLogger("qlorapp").warning(
            "[import] newer than the tested versions: %s. If something breaks: pip install %s.",
            ", ".join(newer),
            " ".join(install),
        )


_check({package: importlib.metadata.version(package) for package in TESTED})
