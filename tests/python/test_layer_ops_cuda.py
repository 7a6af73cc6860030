# SPDX-License-Identifier: Apache-2.0
"""The layer operators on a GPU against the CPU's: bit-equal where that is promised, within a stated distance elsewhere."""

import itertools
import math

import pytest
import torch

ops = torch.ops.qlorapp
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Widths: 16-byte packs in one, two and four registers a thread, wider than that, odd, and not a multiple of a pack.
WIDTHS = [1, 7, 64, 1000, 2048, 4096, 8192, 14336, 40000]

pytestmark = pytest.mark.usefixtures("cuda")


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def strided(x, spare):
    """The same values on the GPU, rows apart."""
    wide = torch.full((x.shape[0], x.shape[1] + spare), math.nan, dtype=x.dtype, device="cuda")
    view = wide[:, : x.shape[1]]
    view.copy_(x)
    return view


def ulps(a, b):
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    smallest = torch.iinfo(integer).min

    def ordered(t):
        bits = t.detach().cpu().contiguous().view(integer).long()
        return torch.where(bits < 0, smallest - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def close(got, want, share, most=2):
    """16 bits: at most `share` of the elements differ, by at most `most` ulp. float32: norm of the difference."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.cpu().isnan(), want.isnan())
    if got.dtype == torch.float32:
        assert (got.cpu() - want).norm() <= 1e-6 * want.norm() + 1e-30
        return
    distance = ulps(got, want)
    assert distance.max() <= most and (distance > 0).double().mean() <= share, (distance.max(), (distance > 0).double().mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare", [0, 16, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_and_its_backward(dtype, width, spare):
    rows = 37
    x, residual, dy, before = (randn(rows, width, dtype=dtype, seed=i) for i in range(4))
    w = (1 + 0.1 * randn(width, seed=9)).to(dtype)
    gx, gr, gd, gb = (strided(t, spare) for t in (x, residual, dy, before))
    y, rstd = ops.rms_norm(gx, w.cuda(), 1e-5)
    want_y, want_rstd = ops.rms_norm(x, w, 1e-5)
    assert ulps(rstd, want_rstd).max() <= 4
    close(y, want_y, 0.01)
    total, y, rstd = ops.add_rms_norm(gx, gr, w.cuda(), 1e-5)
    want_total, want_y, want_rstd = ops.add_rms_norm(x, residual, w, 1e-5)
    assert torch.equal(total.cpu(), want_total)
    assert ulps(rstd, want_rstd).max() <= 4
    close(y, want_y, 0.01)
    # From the CPU's rstd. A dx near 0 is a difference of larger terms, so that ulp say little: error against the size of a row.
    got = ops.rms_norm_backward(gd, gx, w.cuda(), want_rstd.cuda()).cpu().double()
    want = ops.rms_norm_backward(dy, x, w, want_rstd).double()
    unit = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (got - want).abs().max() <= unit * want.abs().max()
    assert (got != want).double().mean() <= 0.02 or dtype == torch.float32
    again = ops.rms_norm(gx, w.cuda(), 1e-5)
    expected = before.double() + ops.rms_norm_backward(gd, gx, w.cuda(), again[1]).cpu().double()
    ops.rms_norm_backward_(gb, gd, gx, w.cuda(), again[1])
    assert torch.equal(gd, again[0])  # dy has become y, with the bits of the forward pass
    assert (gb.cpu().double() - expected).abs().max() <= 4 * unit * expected.abs().max()
    gb, gd = strided(before, spare), strided(dy, spare)
    ops.rms_norm_backward_(gb, gd, gx, w.cuda(), want_rstd.cuda())
    ops.rms_norm_backward_(before, dy, x, w, want_rstd)
    assert torch.equal(gd.cpu(), dy)  # from one rstd the same roundings
    assert (gb.cpu().double() - before.double()).abs().max() <= 2 * unit * before.double().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row_starts", [(0, 2048), (0, 1024, 2048), (0, 300, 1900, 2048)])
def test_deterministic_attention_has_the_same_bits_in_every_run(dtype, head_dim, row_starts):
    q, k, v, dout = (randn(2048, heads, head_dim, dtype=dtype, seed=i).cuda() for i, heads in enumerate((8, 2, 2, 8)))
    runs = []
    for _ in range(4):
        out, lse = ops.attention(q, k, v, list(row_starts), head_dim**-0.5, True)
        runs.append((out, lse, *ops.attention_backward(dout, q, k, v, out, lse, list(row_starts), head_dim**-0.5, True)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    fast = ops.attention(q, k, v, list(row_starts), head_dim**-0.5)
    fastest = ops.attention_backward(dout, q, k, v, *fast, list(row_starts), head_dim**-0.5)
    assert not torch.are_deterministic_algorithms_enabled()
    for got, want in zip(runs[0][2:], fastest, strict=True):
        assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("head_dim, heads", [(2, 3), (6, 5), (8, 1), (64, 40), (80, 7), (96, 6), (128, 48), (256, 9)])
def test_rope_is_bit_equal(dtype, head_dim, heads, inverse):
    tokens = 41
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(64)[:, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(64, (tokens,), generator=torch.Generator().manual_seed(0))
    x = randn(tokens, heads, head_dim, dtype=dtype)
    want = ops.rope(x, cos, sin, positions, inverse)
    tables = cos.cuda(), sin.cuda(), positions.cuda()
    assert torch.equal(ops.rope(x.cuda(), *tables, inverse).cpu(), want)
    for spare in (0, 2, 5):  # in place, on some heads of a packed row
        packed = torch.zeros(tokens, heads + spare, head_dim, dtype=dtype, device="cuda")
        packed[:, :heads] = x.cuda()
        ops.rope_(packed[:, :heads], *tables, inverse)
        assert torch.equal(packed[:, :heads].cpu(), want) and packed[:, heads:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare", [0, 16, 1])
@pytest.mark.parametrize("width", [1, 7, 8, 1000, 8192, 14336])
def test_gated_activation_and_its_backward(dtype, width, spare):
    rows = 19
    gate_up, dh = 3 * randn(rows, 2 * width), randn(rows, width, dtype=dtype, seed=1)
    gate_up = gate_up.to(dtype)
    g, d = strided(gate_up, spare), strided(dh, spare)
    h, want = ops.gated_activation(g), ops.gated_activation(gate_up)
    if dtype == torch.float32:
        assert torch.equal(h.cpu(), want)
    else:
        close(h, want, 0.005)
    got, want = ops.gated_activation_backward(d, g), ops.gated_activation_backward(dh, gate_up)
    if dtype == torch.float32:
        assert torch.equal(got.cpu(), want)
    else:  # beside the zero of silu' the result is a small difference
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert ((got.cpu().double() - want.double()).abs() <= 4 * unit * want.double().abs() + 1e-6).all()
        assert (got.cpu() != want).double().mean() <= 0.005
    ops.gated_activation_backward_(d, g)
    assert torch.equal(g, got) and torch.equal(d, h)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 8, 1021, 65536])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5])
def test_dropout_is_bit_equal(dtype, n, p):
    x = randn(n + 1, dtype=dtype)
    for view, other in ((x[:n], x.cuda()[:n]), (x[1:], x.cuda()[1:])):  # aligned to 16 bytes, and not
        for key in ((0, 0, 0), (2**63 - 5, 2**32 - 1, 77), (-3, 12, 2**32 - 1)):
            assert torch.equal(ops.seeded_dropout(other, p, *key).cpu(), ops.seeded_dropout(view, p, *key))


def cross_entropy_reference(hidden, head, targets):
    """Softmax and loss in double, from logits that the same GEMM rounded."""
    logits = (hidden.cuda() @ head.cuda().T).double()
    keep = targets.cuda() >= 0
    losses = torch.nn.functional.cross_entropy(logits[keep], targets.cuda()[keep], reduction="sum")
    probabilities = logits.softmax(1)
    probabilities[torch.arange(len(targets)), targets.cuda().clamp(min=0)] -= 1
    return losses, probabilities * keep[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 1003, 32000, 128256, 151936, 262208])
@pytest.mark.parametrize("chunk_rows", [16, 512])
def test_linear_cross_entropy_against_double(dtype, vocabulary, chunk_rows):
    rows, width = 70, 128
    hidden, head = randn(rows, width, dtype=dtype), (0.3 * randn(vocabulary, width, seed=1)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.4] = -100
    want, d_logits = cross_entropy_reference(hidden, head, targets)
    scale = torch.tensor(64.0, device="cuda")
    count = int((targets >= 0).sum())
    for target_count in (-1, count):
        arguments = (hidden.cuda(), head.cuda(), targets.cuda())
        loss, gradient = ops.linear_cross_entropy(*arguments, scale, True, chunk_rows, target_count)
        assert loss.dtype == torch.float32 and abs(loss.item() - want.item()) <= 2e-6 * want.item()
        want_gradient = (64 * d_logits).to(dtype).double() @ head.cuda().double()
        error = (gradient.double() - want_gradient).norm() / want_gradient.norm()
        assert error <= {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
        assert gradient[targets.cuda() < 0].count_nonzero() == 0
        again = ops.linear_cross_entropy(*arguments, scale, True, chunk_rows, target_count)
        assert torch.equal(again[0], loss) and torch.equal(again[1], gradient)
        only_loss, empty = ops.linear_cross_entropy(*arguments, None, False, chunk_rows, target_count)
        assert torch.equal(only_loss, loss) and empty.numel() == 0
        statistics = torch.full((2,), 3.0, device="cuda")  # added to
        counted = ops.linear_cross_entropy(*arguments, scale, True, chunk_rows, target_count, 1.0, 0.0, statistics)
        assert torch.equal(counted[0], loss) and torch.equal(counted[1], gradient)
        logits = (hidden.cuda() @ head.cuda().T).double()[targets.cuda() >= 0]
        entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
        correct = (logits.argmax(1) == targets[targets >= 0].cuda()).sum()
        assert abs(statistics[0] - 3 - entropy) <= 1e-5 * entropy and statistics[1] - 3 == correct
    # The CPU's loss comes from its own GEMM.
    cpu_loss, cpu_gradient = ops.linear_cross_entropy(hidden, head, targets, torch.tensor(64.0), True, chunk_rows)
    assert abs(loss.item() - cpu_loss.item()) <= 2e-4 * abs(cpu_loss.item())
    error = (gradient.cpu().double() - cpu_gradient.double()).norm() / cpu_gradient.double().norm()
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 1003, 32000])
def test_the_first_of_equal_logits_is_the_most_probable_token(dtype, vocabulary):
    rows = 64
    logits = (randn(rows, vocabulary) * 4).round() / 2  # many rows have their highest logit twice
    first, last = logits.argmax(1), vocabulary - 1 - logits.flip(1).argmax(1)
    targets = torch.where(torch.arange(rows) % 2 == 0, first, last)
    # The head of a vocabulary that fits is the identity, and otherwise a few columns of one.
    width = min(vocabulary, 1003)
    head = torch.eye(vocabulary, width, dtype=dtype)
    logits = logits[:, :width] @ head.float().T
    statistics = torch.zeros(2, device="cuda")
    ops.linear_cross_entropy(
        logits[:, :width].to(dtype).cuda(), head.cuda(), targets.cuda(), None, False, 16, -1, 1.0, 0.0, statistics
    )
    assert statistics[1] == (logits.argmax(1) == targets).sum()


def test_linear_cross_entropy_says_nan_for_a_wrong_count_or_target():
    hidden, head = randn(10, 16).cuda(), randn(50, 16).cuda()
    targets = torch.arange(10, device="cuda")
    targets[3] = -100
    assert ops.linear_cross_entropy(hidden, head, targets, None, True, 4, 8)[0].isnan()
    assert not ops.linear_cross_entropy(hidden, head, targets, None, True, 4, 9)[0].isnan()
    whole = ops.linear_cross_entropy(hidden, head, targets, None, True, 4)
    targets[5] = 50
    loss, gradient = ops.linear_cross_entropy(hidden, head, targets, None, True, 4)
    assert loss.isnan() and gradient[5].count_nonzero() == 0 and torch.equal(gradient[:5], whole[1][:5])
    nothing = ops.linear_cross_entropy(hidden, head, torch.full_like(targets, -1), None, True, 4, 0)
    assert nothing[0] == 0 and nothing[1].count_nonzero() == 0


def test_extreme_logits_do_not_overflow():
    head = torch.eye(8, device="cuda", dtype=torch.float16)
    hidden = torch.tensor([[6e4, -6e4, 0, 0, 0, 0, 0, 0], [-6e4] * 8], device="cuda", dtype=torch.float16)
    loss, _ = ops.linear_cross_entropy(hidden, head, torch.tensor([0, 1], device="cuda"))
    assert abs(loss.item() - math.log(8)) < 1e-5


def test_float64_is_refused_by_name():
    x = torch.randn(3, 8, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match=r"\[rms_norm\] on a GPU the dtype must be .* got Double"):
        ops.rms_norm(x, x[0], 1e-5)
    with pytest.raises(TypeError, match=r"\[gated_activation\] on a GPU"):
        ops.gated_activation(x)


# --- attention at training shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 64), (32, 8, 128), (8, 8, 128), (12, 2, 128), (8, 4, 256)])
@pytest.mark.parametrize("row_starts", [(0, 1024), (0, 512, 1024), (0, 300, 301, 301, 900, 1024), (0, 17, 34)])
def test_attention_forward_and_backward(dtype, heads, kv_heads, head_dim, row_starts):
    tokens = row_starts[-1]
    packed = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype).cuda().view(tokens, -1, head_dim)
    q, k, v = packed.split([heads, kv_heads, kv_heads], 1)
    dout = randn(tokens, heads, head_dim, dtype=dtype, seed=2).cuda()
    scale = head_dim**-0.5
    out, lse = ops.attention(q, k, v, list(row_starts), scale)
    assert out.is_contiguous() and lse.shape == (heads, tokens) and lse.dtype == torch.float32
    grads = ops.attention_backward(dout, q, k, v, out, lse, list(row_starts), scale)
    group = heads // kv_heads
    limit = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]
    wanted = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)]
    for begin, end in itertools.pairwise(row_starts):
        if begin == end:
            continue
        a, b, c = (t[begin:end].double().transpose(0, 1).requires_grad_() for t in (q, k, v))
        scores = scale * a @ b.repeat_interleave(group, 0).transpose(1, 2)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        want = scores.softmax(-1) @ c.repeat_interleave(group, 0)
        assert (out[begin:end].transpose(0, 1).double() - want).norm() <= limit * want.norm()
        assert (lse[:, begin:end].double() - scores.logsumexp(-1)).abs().max() <= (1e-4 if dtype == torch.float32 else 1e-2)
        for total, part in zip(
            wanted, torch.autograd.grad(want, (a, b, c), dout[begin:end].double().transpose(0, 1)), strict=True
        ):
            total[begin:end] = part.transpose(0, 1)
    largest = max(w.norm() for w in wanted)
    for got, want in zip(grads, wanted, strict=True):
        assert (got.double() - want).norm() <= limit * largest
