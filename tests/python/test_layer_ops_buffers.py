# SPDX-License-Identifier: Apache-2.0
"""Operators that write into buffers of the caller, and rows of a table."""

import pytest
import torch
import torch.nn.functional as F
from test_layer_ops import DTYPES, randn, rope_tables

ops = torch.ops.qlorapp


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_may_be_the_first_columns_of_a_wider_buffer(dtype):
    """What feeds a GEMM with spare columns: the same values as without, and the spare columns stay."""
    width, spare = 64, 16
    x, residual, w = (randn(5, width, dtype=dtype, seed=i) for i in (1, 2, 3))
    w = w[0]

    def wide(columns):
        return torch.full((5, columns + spare), 7.0, dtype=dtype)

    y, rstd = wide(width), torch.empty(5)
    ops.rms_norm.out(x, w, 1e-5, y=y[:, :width], rstd=rstd)
    want, want_rstd = ops.rms_norm(x, w, 1e-5)
    assert torch.equal(y[:, :width], want) and torch.equal(rstd, want_rstd) and (y[:, width:] == 7).all()
    total, y = torch.empty_like(x), wide(width)
    ops.add_rms_norm.out(x, residual, w, 1e-5, sum=total, y=y[:, :width], rstd=rstd)
    want = ops.add_rms_norm(x, residual, w, 1e-5)
    assert torch.equal(total, want[0]) and torch.equal(y[:, :width], want[1]) and torch.equal(rstd, want[2])
    h = wide(width // 2)
    ops.gated_activation.out(x, h=h[:, : width // 2])
    assert torch.equal(h[:, : width // 2], ops.gated_activation(x)) and (h[:, width // 2 :] == 7).all()
    both, dh = wide(width), randn(5, width // 2, dtype=dtype, seed=4)
    both[:, :width] = x
    want = ops.gated_activation_backward(dh, x)
    ops.gated_activation_backward_(dh, both[:, :width])
    assert torch.equal(both[:, :width], want) and torch.equal(dh, ops.gated_activation(x)) and (both[:, width:] == 7).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 64])
def test_rope_backward_qkv_is_the_inverse_turn_and_the_concatenation(dtype, head_dim):
    tokens, heads, kv_heads = 21, 4, 2
    cos, sin = rope_tables(32, head_dim)
    positions = torch.arange(tokens).flip(0)
    dq = randn(2, heads, tokens, head_dim, dtype=dtype)[0].transpose(0, 1)  # strided as a kernel may return it
    dk, dv = randn(tokens, kv_heads, head_dim, dtype=dtype, seed=1), randn(tokens, kv_heads, head_dim, dtype=dtype, seed=2)
    width = (heads + 2 * kv_heads) * head_dim
    wide = torch.full((tokens, width + 8), 7.0, dtype=dtype)
    ops.rope_backward_qkv_(wide[:, :width], dq, dk, dv, cos, sin, positions)
    turned = [ops.rope(d, cos, sin, positions, True) for d in (dq, dk)]
    assert torch.equal(wide[:, :width], torch.cat([d.flatten(1) for d in (*turned, dv)], 1)) and (wide[:, width:] == 7).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64])
def test_embedding_is_torchs(dtype, width):
    table = randn(100, width, dtype=dtype)
    tokens = torch.tensor([0, 99, 3, 3, 50])
    assert torch.equal(ops.embedding(table, tokens), F.embedding(tokens, table))
