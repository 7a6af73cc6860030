# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a model: a local folder, the Hugging Face cache, or a download through huggingface_hub.

The cache's location follows huggingface_hub: HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else
~/.cache/huggingface/hub. A repository is the folder models--org--name; refs/<revision> names a commit, snapshots/<commit> holds its files.
"""

import json
import os
import pathlib
from typing import Any, Literal

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
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


#: The files to find in a repository: those of a model, a tokenizer or an adapter, or the named files only.
Wanted = Literal["model", "tokenizer", "adapter"] | tuple[str, ...]


def missing_files(folder: pathlib.Path, wanted: Wanted) -> list[str]:
    """The wanted files that a folder lacks."""
    if wanted == "tokenizer":
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        return [] if any((folder / name).is_file() for name in names) else [names[0]]
    if wanted != "model":
        return [name for name in (_ADAPTER if wanted == "adapter" else wanted) if not (folder / name).is_file()]
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / _WEIGHTS[0]).is_file():
        return missing
    index = folder / _WEIGHTS[1]
    if not index.is_file():
        return [*missing, _WEIGHTS[0]]
    with open(index, encoding="utf-8") as file:
        shards = sorted(set(json.load(file).get("weight_map", {}).values()))
    return missing + [shard for shard in shards if not (folder / shard).is_file()]


def _download(name: str, revision: str | None, token: Any, cache_dir: Any, wanted: Wanted) -> pathlib.Path | str:
    """The folder, or the reason why there is none."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        return "huggingface_hub, which could download it, is not installed"
    patterns = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
    if wanted in ("model", "adapter"):
        patterns.append("*.safetensors")
    try:
        return pathlib.Path(
            snapshot_download(name, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns, max_workers=4)
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        return f"the hub answers: {str(error).strip().splitlines()[0]}"
    except Exception as error:  # requests', httpx's, OSError: the type depends on the version
        return f"the hub cannot be reached ({type(error).__name__})"


def folder_of(
    name: str,
    *,
    revision: str | None = None,
    token: Any = None,
    local_files_only: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    wanted: Wanted = "model",
    subfolder: str | None = None,
) -> pathlib.Path:
    """The folder of a model by path or hub name. subfolder: the part of the repository with the wanted files, which is returned.

    @raises FileNotFoundError that names the missing files and the folder.
    """

    def inside(folder: pathlib.Path) -> pathlib.Path:
        return folder / subfolder if subfolder else folder

    path = pathlib.Path(name).expanduser()
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return inside(path)
    repository = cache_folder(cache_dir) / f"models--{name.replace('/', '--')}"
    cached = _snapshot(repository, revision)
    if cached is not None and not missing_files(inside(cached), wanted) and (local_files_only or is_offline()):
        return inside(cached)
    if local_files_only or is_offline():
        why = "local_files_only is set" if local_files_only else "HF_HUB_OFFLINE is set"
    else:
        found = _download(name, revision, token, cache_dir, wanted)
        if isinstance(found, pathlib.Path) and not missing_files(inside(found), wanted):
            return inside(found)
        if cached is not None and not missing_files(inside(cached), wanted):
            return inside(cached)
        # Without a connection huggingface_hub returns an incomplete snapshot.
        why = found if isinstance(found, str) else "the hub cannot be reached, or has no such files"
        cached = cached if isinstance(found, str) else found
    lacks = missing_files(inside(cached if cached is not None else repository), wanted)
    where = inside(cached if cached is not None else repository / "snapshots" / (revision or "<commit of main>"))
    hint = ""
    if cached is not None and any(inside(cached).glob("*.bin")):
        hint = " Its .bin files are pickles, which are never read."
    raise FileNotFoundError(
        2,
        f"[from_pretrained] {name!r} must be a local folder or in the Hugging Face cache; {where} has no {' and no '.join(lacks)} "
        f"({why}).{hint} Download it where there is a network (hf download {name}), or give a folder",
        name,
    )


def adapter_folder(
    model_id: str | os.PathLike[str],
    subfolder: str | None = None,
    revision: str | None = None,
    token: Any = None,
    local_files_only: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    wanted: Wanted = "adapter",
    **ignored: Any,
) -> pathlib.Path:
    """The folder of an adapter, by path or hub name. wanted: the files that it must have."""
    return folder_of(
        os.fspath(model_id), revision=revision, local_files_only=local_files_only, token=token, cache_dir=cache_dir, wanted=wanted,
        subfolder=subfolder,
    )  # fmt: skip
