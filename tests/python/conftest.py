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
