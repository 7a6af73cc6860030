# SPDX-License-Identifier: Apache-2.0
"""What families other than Llama ask of the layer operators, against transformers' modules and plain torch, on each device."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from test_layer_ops import DTYPES, cross_entropy_case, randn, rope_tables, ulps
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3

ops = torch.ops.qlorapp
NORMS = {"Llama": (0, LlamaRMSNorm), "OLMo 2": (1, Olmo2RMSNorm), "Gemma 3": (2, Gemma3RMSNorm)}
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

pytestmark = [pytest.mark.usefixtures("device")]


def norm_of(kind, width, dtype):
    rule, module = NORMS[kind]
    norm = module(width, eps=1e-5).to(dtype)
    norm.weight.data = randn(width, dtype=dtype, seed=5).to(dtype)
    return rule, norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    ("apply", "part"),
    [(llama, 1), (phi3, 0.75), (phi3, 0.5), (glm4, 1), (glm4, 0.5)],
)  # fmt: skip
def test_rope_is_transformers_bit_for_bit(dtype, head_dim, apply, part):
    tokens, heads, kv_heads = 37, 4, 2
    interleaved = apply is glm4
    width = int(head_dim * part) // 2 * 2
    cos, sin = rope_tables(64, width)
    positions = torch.cat([torch.arange(20), torch.arange(17)])
    packed = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    view = packed.view(tokens, -1, head_dim)
    q, k = view[:, :heads].clone().requires_grad_(), view[:, heads : heads + kv_heads].clone().requires_grad_()
    c, s = (torch.cat([t, t], -1)[positions].to(dtype)[None] for t in (cos, sin))
    want_q, want_k = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], c, s)
    want = torch.cat([want_q[0].transpose(0, 1), want_k[0].transpose(0, 1)], 1)
    got = ops.rope(view[:, : heads + kv_heads], cos, sin, positions, False, interleaved)
    assert torch.equal(got, want)
    # In place on the packed projection; v stays.
    v = view[:, heads + kv_heads :].clone()
    ops.rope_(view[:, : heads + kv_heads], cos, sin, positions, False, interleaved)
    assert torch.equal(view[:, : heads + kv_heads], want) and torch.equal(view[:, heads + kv_heads :], v)
    # Backward is the inverse turn.
    dy = randn(tokens, heads, head_dim, dtype=dtype, seed=8)
    want_q[0].transpose(0, 1).backward(dy)
    assert torch.equal(ops.rope(dy, cos, sin, positions, True, interleaved), q.grad)
    # and gathers three gradients into the packed one
    dk, dv, packed = randn(tokens, kv_heads, head_dim, dtype=dtype, seed=9), v, torch.empty_like(packed)
    ops.rope_backward_qkv_(packed, dy, dk, dv, cos, sin, positions, interleaved)
    turned = ops.rope(torch.cat([dy, dk], 1), cos, sin, positions, True, interleaved)
    assert torch.equal(packed.view_as(view), torch.cat([turned, dv], 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 640, 4096])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_transformers(kind, width, dtype):
    rule, norm = norm_of(kind, width, dtype)
    weight = norm.weight.detach()
    x, residual, dy = (randn(9, width, dtype=dtype, seed=seed) for seed in range(3))
    theirs = x.clone().requires_grad_()
    want = norm(theirs)
    want.backward(dy)
    y, rstd = ops.rms_norm(x, weight, 1e-5, rule)
    assert ulps(y, want) <= (8 if dtype == torch.float32 else 2)
    assert (y != want).double().mean() <= 0.02 or dtype == torch.float32
    dx = ops.rms_norm_backward(dy, x, weight, rstd, rule)
    assert (dx.double() - theirs.grad.double()).abs().max() <= 2 * UNIT[dtype] * theirs.grad.double().abs().max()
    # The other faces are the same arithmetic.
    total, y_of_sum, rstd_of_sum = ops.add_rms_norm(x, residual, weight, 1e-5, rule)
    assert torch.equal(y_of_sum, ops.rms_norm(total, weight, 1e-5, rule)[0])
    dres, dn = residual.clone(), dy.clone()
    ops.rms_norm_backward_(dres, dn, total, weight, rstd_of_sum, rule)
    assert torch.equal(dn, y_of_sum)
    expected = residual.double() + ops.rms_norm_backward(dy, total, weight, rstd_of_sum, rule).double()
    assert (dres.double() - expected).abs().max() <= 2 * UNIT[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("kind", NORMS)
def test_normed_heads_turn_as_in_transformers(kind, head_dim, dtype):
    tokens, heads, kv_heads, spare = 13, 5, 2, 3
    rule, q_norm = norm_of(kind, head_dim, dtype)
    _, k_norm = norm_of(kind, head_dim, dtype)
    k_norm.weight.data = k_norm.weight.data * 1.5
    cos, sin = rope_tables(20, head_dim)
    positions = torch.arange(tokens) % 7
    packed = randn(tokens, (heads + 2 * kv_heads) * head_dim + spare, dtype=dtype)
    x = packed[:, : (heads + 2 * kv_heads) * head_dim].unflatten(1, (-1, head_dim))
    q, k = (t.detach().clone().requires_grad_() for t in (x[:, :heads], x[:, heads : heads + kv_heads]))
    full = [torch.cat([t, t], -1)[positions][None].to(dtype) for t in (cos, sin)]
    turned = llama(q_norm(q).transpose(0, 1)[None], k_norm(k).transpose(0, 1)[None], *full)
    want = torch.cat([t[0].transpose(0, 1) for t in turned], 1)
    weights = q_norm.weight.detach(), k_norm.weight.detach()
    y = ops.rms_norm_rope(x[:, : heads + kv_heads], *weights, heads, 1e-5, cos, sin, positions, rule)
    assert y.is_contiguous()
    assert (y.double() - want.double()).norm() <= UNIT[dtype] * want.double().norm()
    dq, dk, dv = (randn(tokens, n, head_dim, dtype=dtype, seed=n) for n in (heads, kv_heads, 4))
    dv = dv[:, :kv_heads]
    want.backward(torch.cat([dq, dk], 1))
    wide = torch.full((tokens, (heads + 2 * kv_heads) * head_dim + 64), math.nan, dtype=dtype)
    dqkv = wide[:, : (heads + 2 * kv_heads) * head_dim]
    arguments = x[:, : heads + kv_heads], *weights, 1e-5, cos, sin, positions, rule
    ops.rms_norm_rope_backward_qkv_(dqkv, dq, dk, dv, *arguments)
    parts = dqkv.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    for got, expected in zip(parts, (q.grad, k.grad, dv), strict=True):
        assert (got.double() - expected.double()).norm() <= 2 * UNIT[dtype] * expected.double().norm() + 1e-30
    assert torch.equal(parts[2], dv) and wide[:, dqkv.shape[1] :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_gates_as_in_transformers(dtype):
    gate, up = (3 * randn(33, 130, seed=1)).to(dtype), randn(33, 130, dtype=dtype, seed=2)
    gate[0, :4] = torch.tensor([-200.0, -6.0, 0.0, 200.0])
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    want = ACT2FN["gelu_pytorch_tanh"](g) * u
    stacked = torch.cat([gate, up], -1).requires_grad_()
    h = ops.gated_activation(stacked, 1)
    assert (h.double() - want.double()).abs().max() <= UNIT[dtype] * want.double().abs().max()
    # Below, torch's 1 + tanh(u) is a small difference of larger numbers, and ours is not.
    assert (h != want)[gate > -2].double().mean() < 0.02 or dtype == torch.float32
    dh = randn(33, 130, dtype=dtype, seed=3)
    h.backward(dh)
    want.backward(dh)
    expected = torch.cat([g.grad, u.grad], -1).double()
    assert (stacked.grad.double() - expected).abs().max() <= 2 * UNIT[dtype] * expected.abs().max()
    both, d = torch.cat([gate, up], -1), dh.clone()
    ops.gated_activation_backward_(d, both, 1)
    assert torch.equal(both, stacked.grad) and torch.equal(d, h)


def window_mask(row_starts, window):
    rows = torch.cat([torch.full((e - s,), i) for i, (s, e) in enumerate(itertools.pairwise(row_starts))])
    distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))[None]
    return (rows[:, None] == rows[None]) & (distance >= 0) & (distance < window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("row_starts", [(0, 1300), (0, 150, 300), (0, 1, 70, 71, 290)])
@pytest.mark.parametrize("window", [1, 2, 40, 149, 150, 4096])
def test_a_query_sees_the_window_and_no_more(dtype, kv_heads, row_starts, window):
    heads, head_dim, tokens = 4, 64, row_starts[-1]
    q, k, v = (
        randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        .view(tokens, -1, head_dim)
        .split([heads, kv_heads, kv_heads], 1)
    )
    dout = randn(tokens, heads, head_dim, dtype=dtype, seed=2)
    scale = 0.11
    out, lse = ops.attention(q, k, v, list(row_starts), scale, False, window)
    reference = [t.double().clone().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in reference), attn_mask=window_mask(row_starts, window), scale=scale, enable_gqa=True
    )[0].transpose(0, 1)
    limit = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (out.double() - want).norm() <= limit * want.norm()
    grads = ops.attention_backward(dout, q, k, v, out, lse, list(row_starts), scale, False, window)
    wanted = torch.autograd.grad(want, reference, dout.double())
    largest = max(g.norm() for g in wanted)
    assert all((got.double() - g).norm() <= limit * largest for got, g in zip(grads, wanted, strict=True))
    if window >= max(end - begin for begin, end in itertools.pairwise(row_starts)):  # then it is none
        assert torch.equal(out, ops.attention(q, k, v, list(row_starts), scale)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 100])
@pytest.mark.parametrize("window", [1, 20, 130])
def test_the_cache_has_the_window_of_the_whole_row(dtype, queries, window):
    starts = [0, 150, 150 + queries]
    q, k, v = (randn(starts[-1], heads, 64, dtype=dtype, seed=heads) for heads in (4, 2, 3))
    v = v[:, :2]
    full, _ = ops.attention(q, k, v, starts, 0.125, False, window)
    tail = torch.cat([torch.arange(end - queries, end) for end in starts[1:]])
    out = ops.attention_with_cache(q[tail], k, v, [0, queries, 2 * queries], starts[:2], [150, queries], 0.125, window)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(out, full[tail], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1003, 40000])
@pytest.mark.parametrize("factor, cap", [(0.125, 0.0), (1.0, 3.0), (2.0, 30.0)])
def test_logits_have_a_factor_and_a_cap(dtype, vocabulary, factor, cap):
    hidden, head, targets = cross_entropy_case(dtype, vocabulary=vocabulary)
    products = (hidden @ head.T).double().requires_grad_()
    logits = products * factor
    want = F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, targets, reduction="sum", ignore_index=-100)
    want.backward()
    loss, gradient = ops.linear_cross_entropy(hidden, head, targets, torch.tensor(8.0), True, 16, -1, factor, cap)
    assert abs(loss.item() - want.item()) <= (1e-6 if dtype == torch.float32 else 1e-4) * want.item()
    expected = (8 * products.grad).to(dtype).double() @ head.double()
    error = (gradient.double() - expected).norm() / expected.norm()
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]


def test_what_no_rule_names_is_refused():
    x, w = randn(2, 8), randn(8)
    for call, words in (
        (lambda: ops.rms_norm(x, w, 1e-5, 3), "rule must be 0, 1 or 2; got 3"),
        (lambda: ops.gated_activation(x, 2), r"act must be 0 \(silu\) or 1"),
        (lambda: ops.linear_cross_entropy(x, x, torch.tensor([0, 1]), None, True, 2, -1, 0.0), "logit_factor must be above 0"),
        (lambda: ops.linear_cross_entropy(x, x, torch.tensor([0, 1]), None, True, 2, -1, 1.0, -1.0), "logit_cap at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
