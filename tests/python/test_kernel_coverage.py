# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer looks at is everything: each function of cuda/ that launches a kernel is called by tests/cuda."""

import sys

import conftest

sys.path.insert(0, str(conftest.ROOT / "scripts"))
import sanitize_cuda


def test_every_launching_function_is_called_at_edge_shapes():
    assert {"rms_norm", "dequantize_4bit", "gemm_4bit", "adamw_8bit"} <= sanitize_cuda.launch_functions()
    assert not sanitize_cuda.not_tested()
