# SPDX-License-Identifier: Apache-2.0
"""transformers.trainer_utils under this package's name: get_last_checkpoint and its like, imported when they are first asked for."""

from typing import Any


def __getattr__(name: str) -> Any:
    """This library's own where it has the name (set_seed, EvalPrediction …), else transformers'."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import qlorapp

    if name in qlorapp.__all__:
        return getattr(qlorapp, name)
    try:
        from transformers import trainer_utils
    except ModuleNotFoundError as error:
        raise ImportError(f"{__name__}.{name} is transformers' own: pip install 'qlorapp[hf]'.") from error
    return getattr(trainer_utils, name)
