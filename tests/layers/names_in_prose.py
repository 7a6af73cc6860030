# SPDX-License-Identifier: Apache-2.0
"""Names in docs and comments that nothing in the tree has: paths of files, members of classes and names of namespaces.

Prose is each line of a Markdown page and each comment or docstring of C++, CUDA, CMake and Python. A path counts if it begins with a folder of the
tree; a bare name counts if it is a header's. A member counts if its class is one of the tree: its body, its bases and its aliases are searched.
"""

import pathlib
import re
from collections.abc import Iterator

C_KINDS, HASH_KINDS = {".cpp", ".hpp", ".cu", ".cuh"}, {".py", ".pyi", ".cmake"}
LITERAL_OR_COMMENT = re.compile(r'R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
PATH = re.compile(r"(?<![\w/.<>$~:-])((?:[\w.-]+/)*[\w-]+\.(?:hpp|cuh|cpp|cu|py|md|cmake|svg))\b(?![\w/(]|\.\w)")
QUALIFIED = re.compile(r"(?<![\w:])((?:\w+::)+)(~?\w+)")
TYPE = re.compile(r"\b(?:class|struct|enum)\s+(?:class\s+)?(?:\[\[[^\]]*\]\]\s*)?(?:\w+::)*(\w+)(?:\s+final)?\s*(:[^{;]*)?\{")
ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*([\w:]+)")
#: Libraries' namespaces and classes that comments may name.
FOREIGN = {"std", "at", "c10", "c10d", "torch", "fmt", "nlohmann", "char", "Store", "CUDAAllocatorConfig", "Base"}
#: Written by CMake, and where other projects keep what a comment refers to.
ELSEWHERE = {"cmake/qlorappConfig.cmake", "data/README.md", "qlorapp/scripts/install_in_notebook.py"}
SKIPPED = {"build", ".venv", ".git", "node_modules"}


def files_of(root: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file() and not SKIPPED & set(path.relative_to(root).parts)]


def split(path: pathlib.Path) -> tuple[str, list[tuple[int, str]]]:
    """The code without comments and string contents, and (line, text) of the prose."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        replaced = re.search(r"^\*\*Status\*\* replaced", text, re.MULTILINE)  # such a page is about code that is gone
        return "", [] if replaced else list(enumerate(text.splitlines(), 1))
    prose: list[tuple[int, str]] = []
    if path.suffix in C_KINDS:

        def strip(match: re.Match) -> str:
            if match[0].startswith(("//", "/*")):
                prose.append((text[: match.start()].count("\n") + 1, match[0]))
                return " "
            return '""'

        return LITERAL_OR_COMMENT.sub(strip, text), prose
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#(.*)$", line):
            prose.append((number, comment[1]))
    for match in re.finditer(r'"""(.*?)"""', text, re.DOTALL):
        prose.append((text[: match.start()].count("\n") + 1, match[1]))
    return "", prose


def body_at(code: str, brace: int) -> str:
    depth = 0
    for i in range(brace, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if depth == 0:
            return code[brace:i]
    return code[brace:]


class Names:
    """What the C++ of a tree declares."""

    def __init__(self, codes: list[str]) -> None:
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        self.spaces: set[str] = set()
        self.words: set[str] = set()
        for code in codes:
            self.words |= set(re.findall(r"\w+", code))
            for found in re.findall(r"\bnamespace\s+([\w:]+)\s*\{", code):
                self.spaces |= set(found.split("::"))
            for match in TYPE.finditer(code):
                self.members.setdefault(match[1], set()).update(re.findall(r"\w+", body_at(code, match.end() - 1)))
                self.bases.setdefault(match[1], set()).update(re.findall(r"\w+", match[2] or ""))
            for alias, target in ALIAS.findall(code):
                self.members.setdefault(alias, set())
                self.bases.setdefault(alias, set()).update(target.split("::"))

    def has(self, owner: str, name: str, seen: frozenset[str] = frozenset()) -> bool:
        if owner not in self.members:
            return False
        if name == owner or name in self.members[owner]:
            return True
        return any(self.has(base, name, seen | {owner}) for base in self.bases[owner] - seen - {owner})

    def resolves(self, owners: list[str], name: str) -> bool:
        name = name.removeprefix("~")
        if FOREIGN & set(owners):
            return True
        return self.has(owners[-1], name) or (owners[-1] in self.spaces and name in self.words)


def is_path_of_tree(path: str, tails: set[str], folders: set[str]) -> bool:
    """Also true for a path that is another project's: one that begins with no folder of the tree."""
    path = re.sub(r"^(\.\.?/)+", "", path)
    if "/" not in path and not path.endswith((".hpp", ".cuh")):
        return True
    return path in tails or path in ELSEWHERE or ("/" in path and path.split("/")[0] not in folders)


def unresolved(root: pathlib.Path) -> Iterator[str]:
    files = files_of(root)
    parts = [path.relative_to(root).parts for path in files]
    tails = {"/".join(p[i:]) for p in parts for i in range(len(p))}
    folders = {folder for p in parts for folder in p[:-1]}
    prose, codes = [], []
    for path in files:
        if path.suffix in C_KINDS | HASH_KINDS | {".md"} or path.name == "CMakeLists.txt":
            code, texts = split(path)
            codes.append(code)
            prose += [(path.relative_to(root), line, text) for line, text in texts]
    names = Names(codes)
    for path, line, text in prose:
        for match in PATH.finditer(text):
            if not is_path_of_tree(match[1], tails, folders):
                yield f"{path}:{line}: no file {match[1]}"
        for match in QUALIFIED.finditer(text):
            if not names.resolves(match[1].split("::")[:-1], match[2]):
                yield f"{path}:{line}: nothing is called {match[0]}"
