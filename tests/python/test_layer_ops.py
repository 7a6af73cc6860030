# SPDX-License-Identifier: Apache-2.0
"""The layer operators against torch and transformers: values, gradients, registration, memory."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

ops = torch.ops.qlorapp
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    return values.to(torch.get_default_device()).requires_grad_(requires_grad)


def ulps(a, b):
    """Largest distance of two tensors in units in the last place, through the order-preserving integer of each value."""
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    smallest = torch.iinfo(integer).min

    def ordered(t):
        bits = t.detach().contiguous().view(integer).long()
        return torch.where(bits < 0, smallest - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max())


def rope_tables(positions, head_dim, theta=10000.0):
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return angles.cos(), angles.sin()


def block_mask(row_starts):
    rows = torch.cat([torch.full((e - s,), i) for i, (s, e) in enumerate(itertools.pairwise(row_starts))])
    order = torch.arange(len(rows))
    return (rows[:, None] == rows[None]) & (order[:, None] >= order[None])


@pytest.fixture
def one_thread():
    """For many calls on few elements, where waking a second thread is all that takes time. The C++ tests use all threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- registration --------------------------------------------------------------------------------------------------------


def attention_arguments(dtype, requires_grad=False, heads=4, kv_heads=2, head_dim=8, row_starts=(0, 3, 4, 9)):
    tokens = row_starts[-1]
    q = randn(tokens, heads, head_dim, dtype=dtype, seed=1, requires_grad=requires_grad)
    k = randn(tokens, kv_heads, head_dim, dtype=dtype, seed=2, requires_grad=requires_grad)
    v = randn(tokens, kv_heads, head_dim, dtype=dtype, seed=3, requires_grad=requires_grad)
    return q, k, v, list(row_starts), head_dim**-0.5


def op_cases(dtype, grad):
    x, w = randn(5, 24, dtype=dtype, requires_grad=grad), randn(24, dtype=dtype, seed=1)
    plain = x.detach()
    cos, sin = rope_tables(11, 8)
    positions = torch.tensor([0, 1, 2, 10, 3])
    heads = randn(5, 3, 8, dtype=dtype, requires_grad=grad)
    rstd = ops.rms_norm(plain, w, 1e-5)[1]
    q, k, v, starts, scale = attention_arguments(dtype)
    out, lse = ops.attention(q, k, v, starts, scale)
    targets = torch.tensor([3, -100, 0, 6, -1])
    head = randn(7, 24, dtype=dtype, seed=4)
    half = randn(5, 12, dtype=dtype)
    dx, dh, gate_up, turned = plain.clone(), half.clone(), plain.clone(), heads.detach().clone()
    yield ops.rms_norm.default, (x, w, 1e-5), {}
    yield ops.rms_norm.default, (heads, randn(8, dtype=dtype), 1e-5), {}
    yield ops.add_rms_norm.default, (x, randn(5, 24, dtype=dtype, seed=9, requires_grad=grad), w, 1e-5), {}
    for rule in (1, 2):
        yield ops.rms_norm.default, (x, w, 1e-5, rule), {}
        yield ops.add_rms_norm.default, (x, randn(5, 24, dtype=dtype, seed=9, requires_grad=grad), w, 1e-5, rule), {}
    yield (
        ops.rms_norm_rope.default,
        (heads, randn(8, dtype=dtype), randn(8, dtype=dtype, seed=3), 2, 1e-5, cos, sin, positions, 2),
        {},
    )
    yield ops.rope.default, (heads, cos, sin, positions), {}
    yield ops.rope.default, (heads, cos, sin, positions, True), {}
    yield ops.rope.default, (heads, cos[:, :2].clone(), sin[:, :2].clone(), positions, False, True), {}
    yield ops.gated_activation.default, (x,), {}
    yield ops.gated_activation.default, (x, 1), {}
    yield ops.attention.default, attention_arguments(dtype, grad), {}
    yield ops.attention.default, attention_arguments(dtype, grad, kv_heads=4, row_starts=(0, 4, 8)), {}
    yield ops.attention.default, (*attention_arguments(dtype, grad), False, 2), {}
    yield ops.linear_cross_entropy.default, (x, head, targets, None, True, 2, -1, 0.5, 3.0), {}
    yield ops.linear_cross_entropy.default, (x, head, targets, None, True, 2), {}
    yield ops.linear_cross_entropy.default, (x, head, targets, torch.tensor(8.0)), {}
    if grad:
        return
    qkv = torch.empty(9, 80, dtype=dtype)[:, :64]
    yield ops.embedding.default, (head, torch.tensor([3, 0, 6])), {}
    yield ops.linear_cross_entropy.default, (x.detach(), head, targets, None, True, 2, 3), {}
    yield ops.rms_norm.out, (plain, w, 1e-5), {"y": torch.empty(5, 32, dtype=dtype)[:, :24], "rstd": torch.empty(5)}
    yield (
        ops.add_rms_norm.out,
        (plain, randn(5, 24, dtype=dtype, seed=9), w, 1e-5),
        {"sum": plain.clone(), "y": plain.clone(), "rstd": torch.empty(5)},
    )
    yield ops.gated_activation.out, (plain,), {"h": torch.empty(5, 12, dtype=dtype)}
    yield ops.rope_backward_qkv_.default, (qkv, q, k, v, cos, sin, torch.arange(9)), {}
    yield ops.rope_backward_qkv_.default, (qkv, q, k, v, cos[:, :2].clone(), sin[:, :2].clone(), torch.arange(9), True), {}
    turns = randn(8, dtype=dtype), randn(8, dtype=dtype, seed=3), 1e-5, cos, sin, torch.arange(9)
    yield ops.rms_norm_rope_backward_qkv_.default, (qkv, q, k, v, randn(9, 6, 8, dtype=dtype), *turns, 2), {}
    yield ops.linear_cross_entropy.default, (x, head, targets, None, False, 2), {}
    yield ops.rms_norm_backward.default, (randn(5, 24, dtype=dtype), plain, w, rstd), {}
    yield ops.rms_norm_backward_.default, (dx, randn(5, 24, dtype=dtype), plain, w, rstd), {}
    yield ops.rope_.default, (turned, cos, sin, positions), {}
    yield ops.gated_activation_backward.default, (half, plain), {}
    yield ops.gated_activation_backward_.default, (dh, gate_up), {}
    yield ops.attention_backward.default, (torch.ones_like(q), q, k, v, out, lse, starts, scale), {}
    yield ops.attention_with_cache.default, (q[:3], k, v, [0, 2, 3], [0, 5], [4, 3], scale), {}


@pytest.mark.usefixtures("one_thread", "device")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_accepts_every_layer_operator(dtype, grad):
    for op, args, kwargs in op_cases(dtype, grad):
        torch.library.opcheck(
            op, args, kwargs, rtol=1e-2 if dtype == torch.bfloat16 else None, atol=1e-2 if dtype == torch.bfloat16 else None
        )


@pytest.mark.usefixtures("one_thread")
def test_gradcheck_in_double_precision():
    d = torch.float64
    x = randn(5, 7, dtype=d, requires_grad=True)
    residual = randn(5, 7, dtype=d, seed=1, requires_grad=True)
    w = randn(7, dtype=d, seed=2)
    assert torch.autograd.gradcheck(lambda x: ops.rms_norm(x, w, 1e-5)[0], (x,))
    assert torch.autograd.gradcheck(lambda x, r: ops.add_rms_norm(x, r, w, 1e-5)[:2], (x, residual))
    heads = randn(5, 3, 8, dtype=d, requires_grad=True)
    cos, sin = rope_tables(9, 8)
    positions = torch.tensor([0, 8, 3, 3, 1])
    for inverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, inverse=inverse: ops.rope(x, cos, sin, positions, inverse), (heads,))
    part = [table[:, :2].clone() for table in (cos, sin)]
    assert torch.autograd.gradcheck(lambda x: ops.rope(x, *part, positions, False, True), (heads,))
    for rule in (1, 2):
        assert torch.autograd.gradcheck(lambda x, rule=rule: ops.rms_norm(x, w, 1e-5, rule)[0], (x,))
    two = randn(8, dtype=d), randn(8, dtype=d, seed=3)
    assert torch.autograd.gradcheck(lambda x: ops.rms_norm_rope(x, *two, 2, 1e-5, cos, sin, positions, 2), (heads,))
    for act in (0, 1):
        assert torch.autograd.gradcheck(
            lambda x, act=act: ops.gated_activation(x, act), (randn(3, 10, dtype=d, requires_grad=True),)
        )
    for heads, kv_heads, starts in ((2, 1, (0, 5)), (2, 2, (0, 1, 3, 4)), (4, 2, (0, 0, 1, 4)), (2, 2, (0, 2, 4))):
        q, k, v, rows, scale = attention_arguments(d, True, heads, kv_heads, 4, starts)
        assert torch.autograd.gradcheck(
            lambda q, k, v, rows=rows, scale=scale: ops.attention(q, k, v, rows, scale)[0], (q, k, v)
        )
        assert torch.autograd.gradcheck(
            lambda q, k, v, rows=rows, scale=scale: ops.attention(q, k, v, rows, scale, False, 2)[0], (q, k, v)
        )
    head = randn(9, 7, dtype=d, seed=3)
    targets = torch.tensor([8, -100, 0, 3, -1])
    for scale in (None, torch.tensor(64.0)):
        assert torch.autograd.gradcheck(
            lambda h, scale=scale: ops.linear_cross_entropy(h, head, targets, scale, True, 2)[0], (x,)
        )
        for rule in ((0.5, 0.0), (1.0, 2.0), (2.0, 3.0)):
            assert torch.autograd.gradcheck(
                lambda h, scale=scale, rule=rule: ops.linear_cross_entropy(h, head, targets, scale, True, 2, -1, *rule)[0], (x,)
            )


def test_weights_that_want_a_gradient_are_refused():
    x, w = randn(3, 8), randn(8, requires_grad=True)
    with pytest.raises(ValueError, match="frozen"):
        ops.rms_norm(x, w, 1e-5)
    with pytest.raises(ValueError, match="frozen"):
        ops.add_rms_norm(x, x, w, 1e-5)
    with pytest.raises(ValueError, match="frozen"):
        ops.linear_cross_entropy(x, randn(5, 8, requires_grad=True), torch.tensor([0, 1, 2]))
    with torch.no_grad():
        ops.rms_norm(x, w, 1e-5)


def test_writing_operators_refuse_autograd_and_count_the_write():
    cos, sin = rope_tables(4, 8)
    positions = torch.arange(4)
    with pytest.raises(ValueError, match="not differentiable"):
        ops.rope_(randn(4, 2, 8, requires_grad=True), cos, sin, positions)
    x = randn(4, 2, 8)
    version = x._version
    ops.rope_(x, cos, sin, positions)
    assert x._version > version
    # A graph that saved x sees that it changed.
    leaf = randn(4, 2, 8, requires_grad=True)
    middle = leaf * 1.0
    out = middle.pow(2).sum()
    with torch.no_grad():
        ops.rope_(middle, cos, sin, positions)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_second_derivative_is_refused_by_name():
    x = randn(3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.gated_activation(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_activation_backward"):
        gradient.sum().backward()


# --- against transformers ------------------------------------------------------------------------------------------------

llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 2048, 2051])
def test_rms_norm_is_transformers(dtype, width):
    norm = llama.LlamaRMSNorm(width, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * randn(width))
    norm.weight.requires_grad_(False)
    x = (3 * randn(2, 5, width)).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = ops.rms_norm(ours, norm.weight, 1e-5)[0], norm(theirs)
    # Both lie within 3 ulp of the exact value in float32, by the last bits of the mean; in 16 bits that rarely shows.
    gpu = y.is_cuda  # where a 16-bit rounding that falls the other way may be two ulp after the product
    assert ulps(y, want) <= (4 if dtype == torch.float32 else 2 if gpu else 1)
    assert (y != want).double().mean() < ((0.8 if gpu else 0.5) if dtype == torch.float32 else 0.002)
    dy = randn(2, 5, width, seed=5).to(dtype)
    y.backward(dy)
    want.backward(dy)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_and_its_residual_gradient_are_the_composition(dtype):
    w = (1 + 0.1 * randn(96)).to(dtype)
    x, residual = (randn(7, 96, dtype=dtype, seed=s, requires_grad=True) for s in (1, 2))
    total, y, rstd = ops.add_rms_norm(x, residual, w, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, ops.rms_norm(total.detach(), w, 1e-6)[0])
    d_total, dy = randn(7, 96, dtype=dtype, seed=3), randn(7, 96, dtype=dtype, seed=4)
    torch.autograd.backward([total, y], [d_total, dy])
    want = d_total + ops.rms_norm_backward(dy, total.detach(), w, rstd)
    assert torch.equal(x.grad, want) and torch.equal(residual.grad, want)
    in_place = d_total.clone()
    ops.rms_norm_backward_(in_place, dy, total.detach(), w, rstd)
    assert torch.equal(in_place, want)
    assert torch.equal(dy, y)  # which backward reads next


def test_rope_names_a_position_outside_the_tables():
    cos, sin = rope_tables(4, 8)
    with pytest.raises(ValueError, match=r"\[0, 4\).*got 4 at token 1"):
        ops.rope(randn(2, 1, 8), cos, sin, torch.tensor([0, 4]))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation_is_transformers(dtype):
    gate, up = (4 * randn(33, 129, seed=1)).to(dtype), randn(33, 129, dtype=dtype, seed=2)
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    want = F.silu(g) * u
    stacked = torch.cat([gate, up], -1).requires_grad_()
    h = ops.gated_activation(stacked)
    limit = 4 if dtype == torch.float32 else 2 if h.is_cuda else 1
    assert ulps(h, want) <= limit
    assert (h != want).double().mean() < (0.6 if dtype == torch.float32 else 0.002)
    dh = randn(33, 129, dtype=dtype, seed=3)
    h.backward(dh)
    want.backward(dh)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(stacked.grad, torch.cat([g.grad, u.grad], -1), rtol=tolerance, atol=tolerance)
    both, d = torch.cat([gate, up], -1), dh.clone()
    ops.gated_activation_backward_(d, both)
    assert torch.equal(both, stacked.grad) and torch.equal(d, h)


@pytest.mark.usefixtures("device")
def test_gated_activation_at_the_ends_of_the_range():
    gate = torch.tensor([-math.inf, -200.0, -104.5, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38, math.nan])
    got = ops.gated_activation(torch.cat([gate, torch.ones(10)])[None])[0]
    want = F.silu(gate)
    assert torch.equal(got.isnan(), want.isnan())
    finite = ~want.isnan()
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-6, atol=1e-30)


# --- attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
@pytest.mark.parametrize("row_starts", [(0, 1), (0, 130), (0, 33, 66, 99), (0, 1, 70, 71, 90)])
def test_attention_is_sdpa_with_a_block_mask(device, dtype, kv_heads, head_dim, row_starts):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is for gradcheck, on the CPU")
    heads, tokens = 4, row_starts[-1]
    # q, k, v, dout as views of packed buffers.
    packed = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype).view(tokens, -1, head_dim)
    q, k, v = packed.split([heads, kv_heads, kv_heads], 1)
    dout = randn(tokens, 2 * heads, head_dim, dtype=dtype, seed=2)[:, heads:]
    scale = head_dim**-0.5
    out, lse = ops.attention(q, k, v, list(row_starts), scale)

    reference = [t.double().clone().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in reference), attn_mask=block_mask(row_starts), scale=scale, enable_gqa=True
    )[0].transpose(0, 1)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)

    dq, dk, dv = ops.attention_backward(dout, q, k, v, out, lse, list(row_starts), scale)
    want_grads = torch.autograd.grad(want, reference, dout.double())
    largest = max(g.norm() for g in want_grads)  # the gradients of a row of one token to q and k are 0 but for rounding
    for got, expected in zip((dq, dk, dv), want_grads, strict=True):
        error = (got.double() - expected).norm() / largest
        assert error < {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]
    asked = [ops.attention(q, k, v, list(row_starts), scale, True) for _ in range(2)]
    runs = [ops.attention_backward(dout, q, k, v, *asked[i], list(row_starts), scale, True) for i in range(2)]
    assert all(torch.equal(a, b) for a, b in zip((*asked[0], *runs[0]), (*asked[1], *runs[1]), strict=True))
    assert all((a.double() - b.double()).norm() <= 1e-2 * largest for a, b in zip(runs[0], (dq, dk, dv), strict=True))
    again = ops.attention_backward(dout, q, k, v, out, lse, list(row_starts), scale)
    # On a GPU LibTorch's kernels may add in any order, unless that is asked for.
    same = torch.equal if device == "cpu" else (lambda a, b: (a - b).norm() <= 1e-2 * largest)
    assert all(same(a, b) for a, b in zip(again, (dq, dk, dv), strict=True))


@pytest.mark.usefixtures("device")
def test_packed_rows_never_see_each_other():
    q, k, v, _, scale = attention_arguments(torch.float32, row_starts=(0, 12))
    starts = [0, 5, 12]
    out, _ = ops.attention(q, k, v, starts, scale)
    k[:5], v[:5], q[:5] = math.nan, math.nan, math.nan
    again, _ = ops.attention(q, k, v, starts, scale)
    assert torch.equal(again[5:], out[5:]) and again[:5].isnan().all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("queries", [1, 2, 100])
def test_attention_with_cache_is_the_tail_of_attention(dtype, kv_heads, queries):
    lengths = [150, queries, 131]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    q, k, v, rows, scale = attention_arguments(dtype, kv_heads=kv_heads, head_dim=16, row_starts=tuple(starts))
    full, _ = ops.attention(q, k, v, rows, scale)
    tail = torch.cat([torch.arange(end - queries, end) for end in starts[1:]])
    # The cache keeps spare room, filled with NaN, behind each row.
    capacity = 160
    caches = []
    for t in (k, v):
        cache = torch.full((3 * capacity, kv_heads, 16), math.nan, dtype=dtype)
        for r, n in enumerate(lengths):
            cache[r * capacity : r * capacity + n] = t[starts[r] : starts[r] + n]
        caches.append(cache)
    got = ops.attention_with_cache(
        q[tail], *caches, [0, queries, 2 * queries, 3 * queries], [0, capacity, 2 * capacity], lengths, scale
    )
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, full[tail], rtol=tolerance, atol=tolerance)


def test_attention_refuses_rows_that_do_not_cover_the_tokens():
    q, k, v, _, scale = attention_arguments(torch.float32)
    for rows in ([0, 8], [1, 9], [0, 5, 3, 9], []):
        with pytest.raises(ValueError, match="row_starts must rise from 0"):
            ops.attention(q, k, v, rows, scale)
    with pytest.raises(ValueError, match="multiple of H_kv"):
        ops.attention(q[:, :3], k, v, [0, 9], scale)


# --- linear cross-entropy ------------------------------------------------------------------------------------------------


def cross_entropy_case(dtype, rows=70, width=48, vocabulary=1003, ignored=0.4):
    hidden, head = randn(rows, width, dtype=dtype), (0.3 * randn(vocabulary, width, seed=1)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device="cpu")
    targets[torch.rand(rows, generator=generator, device="cpu") < ignored] = -100
    return hidden, head, targets.to(hidden.device)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("chunk_rows", [1, 16, 512])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_linear_cross_entropy_is_torch_in_float32(chunk_rows, ignored):
    hidden, head, targets = cross_entropy_case(torch.float32, ignored=ignored)
    h = hidden.clone().requires_grad_()
    want = F.cross_entropy(h @ head.T, targets, reduction="sum", ignore_index=-100)
    want.backward()
    loss, gradient = ops.linear_cross_entropy(hidden, head, targets, None, True, chunk_rows)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert abs(loss.item() - want.item()) <= 1e-6 * abs(want.item())
    assert (gradient - h.grad).norm() <= 2e-6 * h.grad.norm()
    assert gradient[targets < 0].count_nonzero() == 0
    counted = ops.linear_cross_entropy(hidden, head, targets, None, True, chunk_rows, int((targets >= 0).sum()))
    assert torch.allclose(counted[0], loss, rtol=1e-6) and (counted[1] - gradient).norm() <= 1e-6 * gradient.norm()
    only_loss, empty = ops.linear_cross_entropy(hidden, head, targets, None, False, chunk_rows)
    assert torch.equal(only_loss, loss) and empty.numel() == 0
    # Under autograd, with a gradient scale that cancels out.
    for scale in (None, torch.tensor(1024.0)):
        g = hidden.clone().requires_grad_()
        (3 * ops.linear_cross_entropy(g, head, targets, scale, True, chunk_rows)[0]).backward()
        assert (g.grad - 3 * h.grad).norm() <= 2e-6 * 3 * h.grad.norm()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_cross_entropy_rounds_logits_once_in_16_bits(dtype):
    """bfloat16 and float16 take different paths on most CPUs (own instructions, or float32 panels): both are held to this."""
    hidden, head, targets = cross_entropy_case(dtype, vocabulary=30011)
    rounded = (hidden.double() @ head.double().T).to(dtype).double().requires_grad_()
    want = F.cross_entropy(rounded, targets, reduction="sum", ignore_index=-100)
    (d_logits,) = torch.autograd.grad(want, rounded)
    want_gradient = d_logits @ head.double()
    loss, gradient = ops.linear_cross_entropy(hidden, head, targets, torch.tensor(256.0), True, 32)
    # A logit whose exact value lies beside a rounding boundary may fall on the other side.
    assert abs(loss.item() - want.item()) <= 2e-4 * want.item()
    error = (gradient.double() / 256 - want_gradient).norm() / want_gradient.norm()
    assert error <= (1e-2 if dtype == torch.bfloat16 else 1.5e-3)


def test_linear_cross_entropy_names_a_target_outside_the_vocabulary():
    hidden, head, targets = cross_entropy_case(torch.float32)
    targets[7] = 1003
    with pytest.raises(ValueError, match="vocabulary size 1003; got 1003 at index 7"):
        ops.linear_cross_entropy(hidden, head, targets)


def peak_bytes(run):
    """Highest sum of live CPU allocations while `run` runs, from the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_never_holds_the_logits_or_a_copy_of_the_head(dtype):
    rows, width, vocabulary, chunk = 512, 64, 40000, 32
    hidden, head, targets = cross_entropy_case(dtype, rows, width, vocabulary, ignored=0.1)
    size = hidden.element_size()
    peak = peak_bytes(lambda: ops.linear_cross_entropy(hidden, head, targets, None, True, chunk))
    logits, chunk_logits = rows * vocabulary * size, chunk * vocabulary * size
    panels = 0 if dtype == torch.float32 else 4 * (2**20 + 2 * chunk * 2**20 // width)
    assert chunk_logits <= peak < chunk_logits + panels + 4 * hidden.numel() * size + 2**16
    assert peak < logits / 3
    if dtype == torch.float32:  # the yardstick measures: torch's own loss does hold them
        assert peak_bytes(lambda: F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum")) >= logits
