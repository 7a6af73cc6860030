# SPDX-License-Identifier: Apache-2.0
"""Finds models and rows for the qlorapp program: python hub_service.py WHAT NAME REVISION|FOLDER.

Answers {"ok": […]} or {"error": "one line"} on standard input, which is a socket. It does not load the library.

    model, config   of a revision ("": the newest) the folder in huggingface_hub's cache, with its weights or its config.json alone
    train, eval     files of rows of a split of a dataset's repository; parquet as rows does
    rows            a parquet file's rows as a new .jsonl file in FOLDER, which is the caller's
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules would hide others of the same name

import json
import math
import os
import pathlib
import re
import socket
import tempfile
from typing import Any

#: Files of a model that are read. Pickles are not.
MODEL = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.safetensors"]
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".json.gz", ".csv.gz", ".parquet")
BATCH = 1024
#: What files of a split are called, the first that there is, as datasets finds them.
SPLITS = {"train": ["train|training"], "eval": ["validation|valid|val|dev", "eval|evaluation", "test|testing"]}


def needs(package: str, wanted: str) -> Any:
    try:
        return __import__(package, fromlist=["_"])
    except ImportError:
        raise ValueError(f"{wanted} needs the package {package.split('.')[0]}: pip install {package.split('.')[0]}") from None


def as_jsonl(path: str, into: str) -> str:
    """The rows of a parquet file, a JSON object a line. Holds one batch of rows."""
    parquet = needs("pyarrow.parquet", "a parquet file")
    number, name = tempfile.mkstemp(prefix=pathlib.Path(path).stem + "-", suffix=".jsonl", dir=into)
    with os.fdopen(number, "w", encoding="utf-8") as out, parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH):
            for row in batch.to_pylist():
                out.write(json.dumps(without_nan(row), ensure_ascii=False, default=str) + "\n")
    return name


def without_nan(cell: Any) -> Any:
    """What JSON has no word for is null, as a cell without value."""
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else None
    if isinstance(cell, dict):
        return {key: without_nan(value) for key, value in cell.items()}
    return [without_nan(value) for value in cell] if isinstance(cell, list) else cell


def snapshot(name: str, revision: str | None, kind: str, patterns: list[str]) -> pathlib.Path:
    hub = needs("huggingface_hub", f"{name!r} of the Hugging Face Hub")
    return pathlib.Path(hub.snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))


def rows_of(folder: pathlib.Path, split: str, into: str) -> list[str]:
    """The files of the split; for training all files, where no name says a split."""
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(ROWS) and path.name != "dataset_infos.json")
    if not files:
        raise ValueError(f"{folder} holds no rows: no file that ends in {', '.join(ROWS)}")
    chosen: dict[str, list[pathlib.Path]] = {}
    for name, words in SPLITS.items():
        found = [[path for path in files if is_of(str(path.relative_to(folder)), word)] for word in words]
        chosen[name] = next(filter(None, found), [])
    if not any(chosen.values()):
        chosen["train"] = files
    if not chosen[split]:
        names = ", ".join(str(path.relative_to(folder)) for path in files[:5])
        raise ValueError(f"no file is named for {split} ({', '.join(SPLITS[split])}); there is {names}. Give one of {folder}")
    return [as_jsonl(str(path), into) if path.suffix == ".parquet" else str(path) for path in chosen[split]]


def is_of(path: str, words: str) -> bool:
    """Whether one of the words stands by itself in the path."""
    return re.search(rf"(?:^|[-._ 0-9/])(?:{words})(?:[-._ 0-9/]|$)", path.lower()) is not None


def find(what: str, name: str, where: str) -> list[str]:
    if what == "rows":
        return [as_jsonl(name, where)]
    if what in SPLITS:
        return rows_of(snapshot(name, None, "dataset", [f"*{end}" for end in ROWS]), what, where)
    folder = snapshot(name, where or None, "model", ["config.json"] if what == "config" else MODEL)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"{folder} has no config.json")
    return [str(folder)]


def main() -> None:
    try:
        reply: dict[str, Any] = {"ok": find(*sys.argv[1:])}
    except Exception as error:  # huggingface_hub's, pyarrow's, OSError: the type depends on the version
        lines = str(error).strip().splitlines() or ["no message"]
        reply = {"error": f"{type(error).__name__}: {lines[0]}"}
    with socket.socket(fileno=os.dup(0)) as channel:
        channel.sendall(json.dumps(reply).encode())


if __name__ == "__main__":
    main()
