# SPDX-License-Identifier: Apache-2.0
"""QLoRA fine-tuning, computed in C++ over LibTorch."""

from ._build_info import TORCH_VERSION as _TORCH_VERSION
from ._build_info import VERSION as __version__


def _check_torch() -> None:
    """Before the library is loaded: a torch of another minor version would end in a wall of undefined symbols."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"qlorapp needs torch {_TORCH_VERSION}: pip install 'torch=={_TORCH_VERSION}.*'.") from None
    found = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if found != _TORCH_VERSION:
        raise ImportError(
            f"qlorapp was built for torch {_TORCH_VERSION} but torch {found} is installed: "
            f"pip install 'torch=={_TORCH_VERSION}.*', or build qlorapp again with pip install --no-build-isolation."
        )


_check_torch()

from . import _C  # noqa: E402  (torch first: it loads the libraries that _C links)

assert _C.torch_version == _TORCH_VERSION

__all__ = ["__version__"]
