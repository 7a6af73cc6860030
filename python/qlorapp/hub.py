# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a model or an adapter: a local folder, or huggingface_hub's cache, into which it downloads."""

import json
import os
import pathlib
from typing import Any

from . import _C

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def missing_files(folder: pathlib.Path, wanted: str) -> list[str]:
    """The files of a "model" or an "adapter" that a folder lacks."""
    names: tuple[str, ...] = _ADAPTER
    if wanted == "model":
        names, index = ("config.json", _WEIGHTS[0]), folder / _WEIGHTS[1]
        if index.is_file() and not (folder / _WEIGHTS[0]).is_file():
            with open(index, encoding="utf-8") as file:
                names = ("config.json", *sorted(set(json.load(file).get("weight_map", {}).values())))
    return [name for name in names if not (folder / name).is_file()]


def _is_local(name: str) -> bool:
    path = pathlib.Path(name).expanduser()
    return path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def gguf_in(name: str | os.PathLike[str], file: str, **options: Any) -> pathlib.Path:
    """A GGUF file of a folder or of a repository of the hub. options: hf_hub_download's (revision, token, cache_dir, local_files_only).

    @raises FileNotFoundError that names what is missing and why.
    """
    name = os.fspath(name)
    if _is_local(name):
        path = pathlib.Path(name).expanduser() / file
        if path.is_file():
            return path
        raise FileNotFoundError(2, f"[from_pretrained] gguf_file must be a file of the folder; {path} is none", str(path))
    try:
        from huggingface_hub import hf_hub_download

        return pathlib.Path(hf_hub_download(name, file, **options))
    except Exception as error:  # as below
        why = _in_one_line(error)
    raise FileNotFoundError(
        2,
        f"[from_pretrained] gguf_file {file!r} must be in a local folder or in the repository {name!r} ({why.rstrip('.')}). Download it "
        f"where there is a network (hf download {name} {file}), or give its path",
        name,
    )


def folder_of(
    name: str | os.PathLike[str], *, wanted: str = "model", subfolder: str | None = None, **options: Any
) -> pathlib.Path:
    """The folder of a model or an adapter, by path or hub name; of a GGUF file the folder that stands for it in this process.

    subfolder: the part of the repository with the wanted files, which is returned. options: snapshot_download's (revision, token,
    cache_dir, local_files_only).

    @raises FileNotFoundError that names what is missing and why.
    """
    name = os.fspath(name)
    path = pathlib.Path(name).expanduser()
    if _C.is_gguf_file(str(path)):
        return pathlib.Path(_C.model_folder(str(path)))
    if _is_local(name):
        return path / (subfolder or "")
    kinds = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.safetensors"]
    try:
        from huggingface_hub import snapshot_download

        found = pathlib.Path(snapshot_download(name, allow_patterns=kinds, max_workers=4, **options)) / (subfolder or "")
        if not (lacks := missing_files(found, wanted)):
            return found
        why = f"{found} has no {' and no '.join(lacks)}"
        if any(found.glob("*.bin")):
            why += ". Its .bin files are pickles, which are never read"
    except Exception as error:  # huggingface_hub's, httpx's, OSError: the type depends on the version
        why = _in_one_line(error)
    raise FileNotFoundError(
        2,
        f"[from_pretrained] {name!r} must be a local folder or in the Hugging Face cache ({why.rstrip('.')}). Download it where there is a "
        f"network (hf download {name}), or give a folder",
        name,
    )
