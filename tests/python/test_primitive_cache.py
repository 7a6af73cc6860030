# SPDX-License-Identifier: Apache-2.0
"""oneDNN's cache of compiled products is bounded by the library, and by the user's variable where that is set."""

import os
import subprocess
import sys

import conftest
import pytest
import torch

#: More shapes than the library lets oneDNN keep, and less than it keeps by itself; the first one comes again at the end.
PROGRAM = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
packed, absmax = torch.ops.qlorapp.quantize_4bit(torch.randn(64, 64))
torch.ops.qlorapp.linear_4bit(torch.randn(3, 64), packed, absmax, None, None, [64, 64], 64, 256, "nf4")
convolution = torch.nn.Conv2d(4, 4, 3)
with torch.no_grad():
    for size in [*range(8, 80), 8]:
        convolution(torch.randn(4, 4, size, 8))
"""
VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(("capacity", "last"), [(None, "cache_miss"), ("1024", "cache_hit")])
def test_the_cache_of_products_is_bounded_unless_the_user_sets_it(capacity, last):
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "DNNL_PRIMITIVE_CACHE_CAPACITY")}
    environment |= {"ONEDNN_VERBOSE": "profile_create", **({VARIABLE: capacity} if capacity else {})}
    command = [sys.executable, "-c", PROGRAM, str(conftest.BUILD / "libqlorapp.so")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    made = [line.split(",")[3] for line in result.stdout.splitlines() if "create:" in line and ",convolution," in line]
    if not made:
        pytest.skip("this torch computes convolutions without oneDNN")
    assert made[0] == "create:cache_miss" and made[-1] == f"create:{last}"
