# SPDX-License-Identifier: Apache-2.0
"""An adapter's files are replaced together."""

import contextlib
import functools
import inspect
import os
import shutil
import types
from collections.abc import Iterator
from typing import Any

import peft

from .. import _C

#: Beginnings of the names of folders whose files take their places later, together.
_UNDER_CONSTRUCTION = (".tmp-checkpoint-", ".qlorapp-update-")


@contextlib.contextmanager
def replaced_together(folder: str | os.PathLike[str], *copied: str) -> Iterator[str]:
    """A folder for new files, which take their places in `folder` together at the end. After a crash the old ones or the new ones are there.

    adapter_config.json is missing while they are a mixture, so that readers refuse it. copied: names of old files that are in the new folder
    from the beginning, to be changed.
    """
    update = _C.FolderUpdate(os.fspath(folder), "adapter_config.json")
    try:
        for name in copied:
            if os.path.isfile(old := os.path.join(folder, name)):
                shutil.copy(old, update.staging)
        yield update.staging
        update.commit()
    finally:
        update.discard()


def saves_together(model: Any) -> Any:
    """Makes save_pretrained of a PEFT model replace the files of an older adapter together. @returns the model."""
    if isinstance(model, peft.PeftModel) and "save_pretrained" not in vars(model):
        model.save_pretrained = types.MethodType(_save_pretrained, model)  # type: ignore[method-assign]
    return model


@functools.wraps(peft.PeftModel.save_pretrained)
def _save_pretrained(self: Any, *args: Any, **options: Any) -> None:
    theirs = type(self).save_pretrained
    given = inspect.signature(theirs).bind(self, *args, **options)
    folder = given.arguments["save_directory"]
    is_part = os.path.basename(os.path.normpath(folder)).startswith(_UNDER_CONSTRUCTION)
    if is_part or not given.arguments.get("is_main_process", True) or os.path.isfile(folder):
        theirs(*given.args, **given.kwargs)
        return
    with replaced_together(folder, "README.md") as given.arguments["save_directory"]:  # PEFT adds to it
        theirs(*given.args, **given.kwargs)
