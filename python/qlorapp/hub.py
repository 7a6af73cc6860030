# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a folder: a folder itself, the local Hugging Face cache, or a download through huggingface_hub.

Where the cache is follows huggingface_hub: HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else
~/.cache/huggingface/hub; a repository lies in models--org--name, with refs/<revision> naming a commit and snapshots/<commit> its files.
"""

import json
import os
import pathlib
from typing import Any

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TRUE = {"1", "ON", "YES", "TRUE"}


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    if cache_dir is not None:
        return pathlib.Path(cache_dir).expanduser()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return pathlib.Path(os.environ[name]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(os.environ.get("HF_HOME") or pathlib.Path(cache) / "huggingface").expanduser() / "hub"


def is_offline() -> bool:
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _snapshot(repository: pathlib.Path, revision: str | None) -> pathlib.Path | None:
    revision = revision or "main"
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def missing_files(folder: pathlib.Path, weights: bool) -> list[str]:
    """What a model's folder, or with weights=False a tokenizer's, lacks."""
    if not weights:
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        return [] if any((folder / name).is_file() for name in names) else [names[0]]
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / _WEIGHTS[0]).is_file():
        return missing
    index = folder / _WEIGHTS[1]
    if not index.is_file():
        return [*missing, _WEIGHTS[0]]
    with open(index, encoding="utf-8") as file:
        shards = sorted(set(json.load(file).get("weight_map", {}).values()))
    return missing + [shard for shard in shards if not (folder / shard).is_file()]


def _download(name: str, revision: str | None, token: Any, cache_dir: Any, weights: bool) -> pathlib.Path | str:
    """The folder, or why there is none."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        return "huggingface_hub, which could download it, is not installed"
    patterns = ["*.json", "*.txt", "*.jinja", "tokenizer.model", *(["*.safetensors"] if weights else [])]
    try:
        return pathlib.Path(
            snapshot_download(name, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns, max_workers=4)
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        return f"the hub answers: {str(error).strip().splitlines()[0]}"
    except Exception as error:  # requests', httpx's, OSError: without a connection each version raises another
        return f"the hub cannot be reached ({type(error).__name__})"


def folder_of(
    name: str,
    *,
    revision: str | None = None,
    token: Any = None,
    local_files_only: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    weights: bool = True,
) -> pathlib.Path:
    """@raises FileNotFoundError that says which files were looked for, and where."""
    path = pathlib.Path(name).expanduser()
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return path
    repository = cache_folder(cache_dir) / f"models--{name.replace('/', '--')}"
    cached = _snapshot(repository, revision)
    if cached is not None and not missing_files(cached, weights) and (local_files_only or is_offline()):
        return cached
    if local_files_only or is_offline():
        why = "local_files_only is set" if local_files_only else "HF_HUB_OFFLINE is set"
    else:
        found = _download(name, revision, token, cache_dir, weights)
        if isinstance(found, pathlib.Path) and not missing_files(found, weights):
            return found
        if cached is not None and not missing_files(cached, weights):
            return cached
        # Without a connection huggingface_hub hands out a snapshot that is there in part.
        why = found if isinstance(found, str) else "the hub cannot be reached, or has no such files"
        cached = cached if isinstance(found, str) else found
    lacks = missing_files(cached, weights) if cached is not None else missing_files(repository, weights)
    where = cached if cached is not None else repository / "snapshots" / (revision or "<commit of main>")
    hint = ""
    if cached is not None and any(cached.glob("*.bin")):
        hint = " Its .bin files are pickles, which are never read."
    raise FileNotFoundError(
        2,
        f"[from_pretrained] {name!r} is no folder here, and in the Hugging Face cache {', '.join(lacks)} is not in {where}; "
        f"{why}.{hint} Download it where there is a network (hf download {name}), or give a folder",
        name,
    )


def adapter_folder(
    model_id: str | os.PathLike[str],
    subfolder: str | None = None,
    revision: str | None = None,
    token: Any = None,
    local_files_only: bool = False,
    **ignored: Any,
) -> pathlib.Path:
    """The folder, or the files of a hub repository."""
    folder = folder_of(os.fspath(model_id), revision=revision, local_files_only=local_files_only, token=token)
    return folder / subfolder if subfolder else folder
