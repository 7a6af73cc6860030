# SPDX-License-Identifier: Apache-2.0
"""Finds the build under test: QLORAPP_BUILD_DIR, or build/dev of this checkout."""

import os
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))

sys.path.insert(0, str(BUILD / "python"))
torch.ops.load_library(str(BUILD / "libqlorapp.so"))


@pytest.fixture
def build_dir() -> pathlib.Path:
    return BUILD


def has_cuda():
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key("qlorapp::rms_norm", "CUDA")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Every device that an operator exists for; tensors made in the test are made there. Skipped aloud without a GPU."""
    if request.param == "cuda" and not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def cuda():
    if not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    return torch.device("cuda")
