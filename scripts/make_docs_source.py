# SPDX-License-Identifier: Apache-2.0
"""Writes what Sphinx reads into build/docs/source: the pages of docs/, a page per public header, and a page per name of `import qlorapp`.

Breathe renders the headers from Doxygen's XML. griffe reads the Python sources and stubs without importing them, so nothing is built.
The lists of links in docs/index.md are the site's navigation. A link to a folder becomes a link to an index of its pages.
"""

import os
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS, HEADERS, OUTPUT = ROOT / "docs", ROOT / "include", ROOT / "build" / "docs" / "source"
#: A linked folder, and the folder of its pages in the site. Other folders have no page, and links to them become text.
FOLDERS = {"adr/": "adr", "formats/": "formats", "../include/qlorapp/": "cpp", "../python/qlorapp/": "python"}
#: What a page of a header shows: nothing private or protected.
SECTIONS = (
    "briefdescription detaileddescription innernamespace innerclass public-type public-func public-attrib public-static-func "
    "public-static-attrib user-defined define typedef enum func var"
)


def toctree(entries: list[str], caption: str = "", options: str = "") -> str:
    return (
        f"\n```{{toctree}}\n{f':caption: {caption}' + chr(10) if caption else ''}{options}\n" + "\n".join(entries) + "\n```\n"
    )


def link(target: str, path: pathlib.PurePath) -> str | None:
    """Where a link of a page of docs/ leads in the site; None for a folder without a page. Sphinx copies files from outside docs/ into the site."""
    if target in FOLDERS:
        return f"{FOLDERS[target]}/index.md"
    found = (DOCS / path.parent / target).resolve()
    if found.is_dir():
        return None
    return target if found.is_relative_to(DOCS) else os.path.relpath(found, OUTPUT / path.parent)


def page(path: pathlib.PurePath) -> str:
    """A page of docs/ with the links of the site."""

    def replaced(found: re.Match) -> str:
        to = link(found[2], path)
        return found[1] if to is None else f"[{found[1]}]({to})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)", replaced, (DOCS / path).read_text(encoding="utf-8"))


def navigation(index: str) -> list[tuple[str, list[str]]]:
    """[(heading, pages)] of docs/index.md: the first link of each item of a list."""
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", index, re.MULTILINE)
    return [(heading, re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)) for heading, text in sections]


def headers() -> list[pathlib.PurePath]:
    return sorted((path.relative_to(HEADERS) for path in HEADERS.rglob("*.hpp")), key=lambda path: (len(path.parts), path))


def header_pages() -> dict[str, str]:
    """{page: its text}, with an index by layer. Breathe finds a header by its name without folders, which is unique."""
    pages, layers = {}, {}
    for header in headers():
        name = f"cpp/{header.relative_to('qlorapp').with_suffix('')}"
        pages[f"{name}.md"] = f"# {header.name}\n\n```{{doxygenfile}} {header.name}\n:sections: {SECTIONS}\n```\n"
        layers.setdefault(header.parent.name, []).append(f"/{name}")
    index = "".join(f"\n## {layer}\n{toctree(names, options=':maxdepth: 1')}" for layer, names in layers.items())
    pages["cpp/index.md"] = (
        f"# C++ API\n\nThe public headers by layer ([architecture](../architecture.md)). `nn/keep.hpp` is included as `<qlorapp/nn/keep.hpp>`.\n{index}"
    )
    return pages


def docstring(item, parameters=()) -> str:
    """Markdown of a docstring: `name: text` of a parameter becomes an item of a list, a header a link to its page."""
    text, in_item = "", False
    for line in (item.docstring.value if item.docstring else "").replace("@raises ", "Raises ").splitlines():
        found = re.fullmatch(r"(\w+(?:, \w+)*): (.+)", line)
        if found and all(name in parameters for name in found[1].split(", ")):
            text += ("" if in_item else "\n") + f"- `{found[1]}`: {found[2]}\n"
            in_item = True
        elif in_item and line and not re.match(r"Raises |Returns |[A-Z]\w+: ", line):
            text += f"  {line}\n"
        else:
            text += ("\n" if in_item else "") + f"{line}\n"
            in_item = False
    return re.sub(r"include/qlorapp/([\w/]+)\.hpp", r"[`qlorapp/\1.hpp`](/cpp/\1.md)", text).strip()


def entry(item, name: str, fence: str = "::::::") -> str:
    """A directive of Sphinx's Python domain for a class, a function or an attribute. Inner directives have shorter fences."""
    parameters = [parameter.name for parameter in getattr(item, "parameters", [])]
    signature, options, body = name, "", docstring(item, parameters)
    if item.is_class:
        kind, signature = "class", item.signature(name=name) or name
        if "__init__" in item.members:
            body += "\n\n" + docstring(item.members["__init__"], parameters)
        body += "".join(f"\n\n{entry(member, member.name, fence[1:])}" for member in public(item))
    elif item.is_function:
        kind, signature = "method" if item.parent.is_class else "function", item.signature(name=name)
        options = "".join(f":{label}:\n" for label in ("staticmethod", "classmethod") if label in item.labels)
    elif "property" in item.labels:
        kind, options = "property", f":type: {item.annotation}\n"
    else:
        kind, body = "attribute", body or docstring(item.module)
    signature = signature.replace('"', "").replace("_C.", "")  # quoted annotations; names of the compiled module are exported
    return f"{fence}{{py:{kind}}} {signature}\n{options}\n{body}\n{fence}\n"


def public(item) -> list:
    """Members to show: no private ones, no imports, and only attributes with a docstring."""
    members = [member for name, member in item.members.items() if not name.startswith("_") and not member.is_alias]
    return [member for member in members if not member.is_attribute or "property" in member.labels or member.docstring]


def python_pages() -> dict[str, str]:
    import griffe

    package = griffe.load("qlorapp", search_paths=[ROOT / "python"])
    pages, names = {}, sorted((str(name) for name in package.exports), key=str.lower)
    for name in names:
        item = package[name]
        try:
            item = item.final_target if item.is_alias else item
        except griffe.AliasResolutionError as error:
            text = f":::{{py:data}} qlorapp.{name}\n\n`{error.alias.target_path}`.\n:::\n"
        else:
            if item.is_module:
                text = docstring(item) + "\n\n" + "\n".join(entry(m, f"qlorapp.{name}.{m.name}") for m in public(item))
            else:
                text = entry(item, f"qlorapp.{name}")
        pages[f"python/{name}.md"] = f"# `{name}`\n\n{text}"
    pages["python/index.md"] = f"# Python API\n\n{docstring(package)}\n{toctree(names, options=':maxdepth: 1')}"
    return pages


def sources() -> dict[str, str]:
    """{path in build/docs/source: text}"""
    pages = {str(path): page(path) for path in sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))}
    for title, target in re.findall(
        r"^- \[([^\]]+)\]\((\w+/)\)", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        pages[f"{target}index.md"] = f"# {title}\n{toctree(['*'], options=f':glob:{chr(10)}:maxdepth: 1')}"
    pages["index.md"] += "".join(toctree(names, caption, ":hidden:") for caption, names in navigation(pages["index.md"]))
    return pages | header_pages() | python_pages()


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for name, text in sources().items():
        (OUTPUT / name).parent.mkdir(parents=True, exist_ok=True)
        (OUTPUT / name).write_text(text, encoding="utf-8")
    for picture in DOCS.glob("*.svg"):
        shutil.copy(picture, OUTPUT)


if __name__ == "__main__":
    main()
