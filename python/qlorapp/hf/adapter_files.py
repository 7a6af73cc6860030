# SPDX-License-Identifier: Apache-2.0
"""An adapter's files are replaced together."""

import contextlib
import inspect
import os
import shutil
import weakref
from collections.abc import Iterator
from typing import Any

import peft

from .. import _C
from .forward import engine_of


@contextlib.contextmanager
def replaced_together(folder: str | os.PathLike[str], *copied: str) -> Iterator[str]:
    """A folder for new files, which take their places in `folder` together at the end. After a crash the old ones or the new ones are there.

    adapter_config.json is missing while they are a mixture, so that readers refuse it. copied: names of old files that are in the new folder
    from the beginning, to be changed.
    """
    existed = os.path.isdir(folder)
    update = _C.FolderUpdate(os.fspath(folder), "adapter_config.json")
    try:
        for name in copied:
            if os.path.isfile(old := os.path.join(folder, name)):
                shutil.copy(old, update.staging)
        yield update.staging
        update.commit()
    finally:
        update.discard()
        if not existed:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # empty: the save has failed


class _Save:
    """PEFT's save_pretrained of one model. Holds no reference to it, so that a deleted model is freed at once."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.__doc__ = type(model).save_pretrained.__doc__

    def __reduce__(self) -> tuple[Any, ...]:
        return _Save, (self._model(),)  # that of a copied model saves the copy

    def __call__(self, *args: Any, **options: Any) -> None:
        model: Any = self._model()
        theirs = type(model).save_pretrained
        given = inspect.signature(theirs).bind(model, *args, **options)
        folder = given.arguments["save_directory"]
        if _C.is_staging(os.fspath(folder)) or not given.arguments.get("is_main_process", True) or os.path.isfile(folder):
            theirs(*given.args, **given.kwargs)
            return
        names = given.arguments.get("selected_adapters") or list(model.peft_config)
        for name in names:
            if os.path.isabs(name):  # torch allows no dot in it
                raise ValueError(
                    f"[save_pretrained] the name of an adapter is a folder in {folder}; got {name!r}. Rename the adapter."
                )
        with replaced_together(folder, "README.md") as given.arguments["save_directory"]:  # PEFT adds to it
            theirs(*given.args, **given.kwargs)
            engine = engine_of(model.get_base_model())
            text = engine.core.adapter_base_text() if engine is not None else ""
            for name in names if text else ():
                place = os.path.join(given.arguments["save_directory"], "" if name == "default" else name)
                with contextlib.suppress(FileNotFoundError), open(os.path.join(place, "qlorapp_base.json"), "w") as file:
                    file.write(text)
        if not text:  # of an earlier adapter
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "qlorapp_base.json"))


def saves_together(model: Any) -> Any:
    """Makes save_pretrained of a PEFT model replace the files of an older adapter together. @returns the model."""
    if isinstance(model, peft.PeftModel) and "save_pretrained" not in vars(model):
        model.save_pretrained = _Save(model)  # type: ignore[method-assign]
    return model
