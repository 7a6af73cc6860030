# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's classes over the engine."""

import importlib.metadata
import logging

#: {package: (oldest, newest) tested minor version}
TESTED = {"transformers": ((5, 22), (5, 23)), "peft": ((0, 20), (0, 21)), "trl": ((1, 16), (1, 16))}


def _check(versions: dict[str, str]) -> None:
    """Warns about a package newer than the tested versions. @raises ImportError for an older one."""
    for package, (oldest, newest) in TESTED.items():
        major, minor, *_ = versions[package].split(".")
        found = (int(major), int(minor))
        tested = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
        if found < oldest:
            raise ImportError(
                f"qlorapp needs {package} {tested}; {versions[package]} is installed: pip install -U '{package}>={'.'.join(map(str, oldest))}'.",
                name=package,
            )
        if found > newest:
            logging.getLogger("qlorapp").warning(
                "[import] %s %s is newer than the tested versions (%s). If something breaks: pip install '%s==%s.*'.",
                package, versions[package], tested, package, ".".join(map(str, newest)),
            )  # fmt: skip


_check({package: importlib.metadata.version(package) for package in TESTED})
