# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: a small mistake in one file, and the test that must find it.

Add one with each new check or rule: leave the check out, or be off by one. No mutant may be equivalent: if nothing can tell it from the original,
it does not belong here.
"""

import dataclasses

LIBRARY = "libqlorapp.so"
#: Linked without the library: their mutants are linked into them.
ALONE = ("core", "json", "files", "format", "text")


@dataclasses.dataclass(frozen=True)
class Killer:
    name: str
    #: What is linked with the mutant, relative to the build folder.
    program: str
    #: {build}: a folder that is the build, with the mutant. {root}: the repository.
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    #: What it replaces, which is in the file once, and by what.
    old: str
    new: str
    killer: Killer
    #: The sources to compile: the file, or those that include it.
    units: tuple[str, ...]


def cpp(layer: str, case: str) -> Killer:
    """@param case  the beginning of its name, without a comma."""
    program = f"tests/{layer}/{layer}_tests"
    words = (f"{{build}}/{program}", "--abort", f"{case}*")
    return Killer(f"{layer}_tests '{case}*'", program if layer in ALONE else LIBRARY, words)


def py(name: str, expression: str, program: str = LIBRARY) -> Killer:
    words = (
        "{python}",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"{{root}}/tests/python/{name}",
        "-k",
        expression,
    )
    return Killer(f"{name} -k '{expression}'", program, words)


def within(prefix: str, file: str, *changes: tuple[str, str, str, Killer], units: tuple[str, ...] = ()) -> list[Mutant]:
    """@param changes  (name, old, new, killer)."""
    return [Mutant(f"{prefix}.{name}", file, old, new, killer, units or (file,)) for name, old, new, killer in changes]
