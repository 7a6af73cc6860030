# SPDX-License-Identifier: Apache-2.0
"""An adapter's files are replaced together."""

import contextlib
import inspect
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import peft

from .. import _C
from .forward import engine_of

_BASE = "qlorapp_base.json"


@contextlib.contextmanager
def replaced_together(folder: str | os.PathLike[str], *copied: str, retired: Iterable[str] = ()) -> Iterator[str]:
    """A folder for new files, which take their places in `folder` together at the end. After a crash the old ones or the new ones are there.

    adapter_config.json is missing while they are a mixture, so that readers refuse it. copied: names of old files that are in the new folder
    from the beginning, to be changed. retired: names of files of an older save that go, unless the new folder has them.
    """
    existed = os.path.isdir(folder)
    update = _C.FolderUpdate(os.fspath(folder), "adapter_config.json")
    try:
        for name in copied:
            if os.path.isfile(old := os.path.join(folder, name)):
                shutil.copy(old, update.staging)
        yield update.staging
        for name in retired:
            if not os.path.exists(os.path.join(update.staging, name)):
                update.retire(name)
        update.commit()
    finally:
        update.discard()
        if not existed:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # empty: the save has failed


@contextlib.contextmanager
def replaced_adapter(folder: str | os.PathLike[str]) -> Iterator[str]:
    """replaced_together() for the files of an adapter. PEFT and TRL add to README.md."""
    with replaced_together(folder, "README.md", retired=[_BASE]) as staging:
        yield staging


def _describe_base(model: Any, folder: str, names: Iterable[str]) -> None:
    """Writes the description of the base beside each adapter (docs/formats/adapter.md)."""
    engine = engine_of(model.get_base_model())
    text = engine.core.adapter_base_text(folder) if engine is not None else ""
    for name in names if text else ():
        place = os.path.join(folder, "" if name == "default" else name)
        with contextlib.suppress(FileNotFoundError), open(os.path.join(place, _BASE), "w") as file:
            file.write(text)


class _Save:
    """PEFT's save_pretrained of one model. Holds no reference to it, so that a deleted model is freed at once."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.__doc__ = type(model).save_pretrained.__doc__

    def __reduce__(self) -> tuple[Any, ...]:
        return _Save, (self._model(),)  # that of a copied model saves the copy

    def __call__(self, *args: Any, **options: Any) -> None:
        model: Any = self._model()
        if model is None:
            raise ReferenceError(
                "[save_pretrained] the model must be there until it is saved; it is deleted. Hold it: model = get_peft_model(…); "
                "model.save_pretrained(folder)."
            )
        theirs = type(model).save_pretrained
        given = inspect.signature(theirs).bind(model, *args, **options)
        folder = given.arguments["save_directory"]
        if not given.arguments.get("is_main_process", True) or os.path.isfile(folder):
            theirs(*given.args, **given.kwargs)
            return
        names = given.arguments.get("selected_adapters") or list(model.peft_config)
        if _C.is_staging(os.fspath(folder)):
            theirs(*given.args, **given.kwargs)
            _describe_base(model, os.fspath(folder), names)
            return
        for name in names:
            if os.path.isabs(name):  # torch allows no dot in it
                raise ValueError(
                    f"[save_pretrained] the name of an adapter is a folder in {folder}; got {name!r}. Rename the adapter."
                )
        with replaced_adapter(folder) as staging:
            given.arguments["save_directory"] = staging
            theirs(*given.args, **given.kwargs)
            _describe_base(model, staging, names)


def saves_together(model: Any) -> Any:
    """Makes save_pretrained of a PEFT model replace the files of an older adapter together. @returns the model."""
    if isinstance(model, peft.PeftModel) and "save_pretrained" not in vars(model):
        model.save_pretrained = _Save(model)  # type: ignore[method-assign]
    return model
