# SPDX-License-Identifier: Apache-2.0
"""The optimizer on a GPU: bit-equal to the CPU's, and a step that asks the device for nothing."""

import pytest
import torch

OPS = torch.ops.qlorapp
BLOCK = 256
OPTIONS = [
    (1e-3, 0.9, 0.999, 1e-8, 0.0),
    (2e-4, 0.9, 0.95, 1e-6, 0.1),
    (5e-5, 0.3, 0.99, 1e-10, 0.01),
    (1.0, 0.0, 0.0, 1e-3, 0.5),
]

pytestmark = pytest.mark.usefixtures("cuda")


def fresh_8bit(n):
    blocks = -(-n // BLOCK)
    return [
        torch.full((n,), 127, dtype=torch.uint8),
        torch.zeros(n, dtype=torch.uint8),
        torch.zeros(blocks),
        torch.zeros(blocks),
    ]


def on_gpu(tensors):
    return [t.cuda() for t in tensors]


def same(a, b):
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


@pytest.fixture
def one_thread():
    """torch's CPU code treats the tail of a thread's share in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("n", [32, 4096, 100_032])  # whole vectors, for the same reason
@pytest.mark.parametrize("options", OPTIONS)
def test_adamw_has_the_roundings_of_the_cpu(n, options):
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("the promise is for CPUs with FMA")
    generator = torch.Generator().manual_seed(n)
    p = torch.randn(n, generator=generator)
    ours = [p, torch.zeros(n), torch.zeros(n)]
    for step in range(1, 13):
        theirs = on_gpu(ours)
        gradient = torch.randn(n, generator=generator) * 10.0 ** (step % 5 - 3)
        OPS.adamw_(ours[0], gradient, *ours[1:], step, *options)
        OPS.adamw_(theirs[0], gradient.cuda(), *theirs[1:], step, *options)
        assert same(ours[1:], theirs[1:]), step
        other = theirs[0].cpu()
        differ = other != ours[0]  # MKL's square root is not always the nearest
        assert differ.double().mean() <= 1e-3
        torch.testing.assert_close(other, ours[0], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("n", [1, 3, 1021])
def test_adamw_takes_any_length(n):
    p, g = torch.randn(n), torch.randn(n)
    ours = [p.clone(), torch.zeros(n), torch.zeros(n)]
    theirs = on_gpu(ours)
    OPS.adamw_(ours[0], g, *ours[1:], 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    OPS.adamw_(theirs[0], g.cuda(), *theirs[1:], 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, 4096, 100_003])
@pytest.mark.parametrize("options", OPTIONS)
def test_adamw_8bit_is_bit_equal_to_the_cpu(n, options):
    generator = torch.Generator().manual_seed(n)
    ours = [torch.randn(n, generator=generator), *fresh_8bit(n)]
    theirs = on_gpu(ours)
    for step in range(1, 21):
        # Gradients over many decades, some exactly zero, so that every part of the maps is met.
        gradient = torch.randn(n, generator=generator) * 10.0 ** (4 * torch.randn(n, generator=generator) - 3).clamp(-20, 8)
        gradient[torch.rand(n, generator=generator) < 0.1] = 0
        if step == 5:
            gradient[:BLOCK] = 0
        OPS.adamw_8bit_(ours[0], gradient, *ours[1:], step, *options)
        OPS.adamw_8bit_(theirs[0], gradient.cuda(), *theirs[1:], step, *options)
        assert same(ours, theirs), step


@pytest.mark.parametrize("absmax", [1.0, 0.3, 1e-31, 3e-6, 7e15])
def test_adamw_8bit_decides_ties_as_the_cpu(absmax):
    """Moments on the midpoints of the maps and one float to either side, where only exact products decide."""
    for signed in (True, False):
        table = OPS.dequantize_blockwise(torch.arange(256, dtype=torch.uint8), torch.ones(1), 256, signed)
        middle = ((table[1:].double() + table[:-1].double()) / 2 * absmax).float()
        values = torch.stack([middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)])
        values = torch.cat([values, torch.full((3, 1), absmax)], 1).flatten()
        gradient = values if signed else values.clamp(min=0).sqrt()
        ours = [torch.zeros(len(values)), *fresh_8bit(len(values))]
        theirs = on_gpu(ours)
        OPS.adamw_8bit_(ours[0], gradient, *ours[1:], 1, 1e-3, 0.0, 0.0, 1e-8, 0.0)
        OPS.adamw_8bit_(theirs[0], gradient.cuda(), *theirs[1:], 1, 1e-3, 0.0, 0.0, 1e-8, 0.0)
        assert same(ours, theirs)


def test_adamw_8bit_at_any_alignment():
    n = 1000
    gradient = torch.randn(n)
    want = [torch.randn(n), *fresh_8bit(n)]
    shifted = [torch.cat([t[:1], t]).cuda()[1:] for t in want]
    OPS.adamw_8bit_(want[0], gradient, *want[1:], 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    OPS.adamw_8bit_(shifted[0], torch.cat([gradient[:1], gradient]).cuda()[1:], *shifted[1:], 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    assert same(want, shifted)


def test_adamw_8bit_leaves_a_block_that_is_not_finite_alone():
    n = 3 * BLOCK
    state = on_gpu([torch.randn(n), *fresh_8bit(n)])
    before = [t.clone() for t in state]
    gradient = torch.randn(n, device="cuda")
    gradient[BLOCK + 3] = float("nan")
    OPS.adamw_8bit_(state[0], gradient, *state[1:], 1, 1e-3, 0.9, 0.999, 1e-8, 0.0)
    for now, then in zip(state, before, strict=True):
        width = len(now) // 3
        assert torch.equal(now[width : 2 * width], then[width : 2 * width])
        assert not torch.equal(now[:width], then[:width]) and not torch.equal(now[2 * width :], then[2 * width :])


@pytest.mark.parametrize("n", [1, 3, 1000, 262_144, 5_000_001])
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9])
def test_gradient_norm(n, max_norm):
    gradient = 1000 * torch.randn(n)
    inverse = torch.tensor(1 / 1024)
    want = (gradient.double() / 1024).norm().item()
    got = OPS.gradient_norm(gradient.cuda(), inverse.cuda(), max_norm)
    cpu = OPS.gradient_norm(gradient, inverse, max_norm)
    for norm, found_inf, multiplier in (got, cpu):
        assert abs(norm.item() - want) <= 1e-6 * want and found_inf.item() == 0
        expected = inverse.item() * (min(1.0, max_norm / (want + 1e-6)) if max_norm else 1.0)
        assert abs(multiplier.item() - expected) <= 2e-6 * expected
    assert all(
        torch.equal(a, b) for a, b in zip(OPS.gradient_norm(gradient.cuda(), inverse.cuda(), max_norm), got, strict=True)
    )
    for bad in (float("inf"), float("-inf"), float("nan")):
        for place in {0, n // 2, n - 1}:
            broken = gradient.clone()
            broken[place] = bad
            assert OPS.gradient_norm(broken.cuda(), inverse.cuda(), max_norm)[1].item() == 1
            assert OPS.gradient_norm(broken, inverse, max_norm)[1].item() == 1


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_step_by_device_numbers_is_the_step_on_a_scaled_gradient(eight_bit):
    n = 8192
    gradient = 4096 * torch.randn(n, device="cuda")
    state = on_gpu(fresh_8bit(n) if eight_bit else [torch.zeros(n), torch.zeros(n)])
    op = OPS.adamw_8bit_ if eight_bit else OPS.adamw_
    rest = (1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    start = torch.randn(n, device="cuda")
    _, found_inf, multiplier = OPS.gradient_norm(gradient, torch.tensor(1 / 4096, device="cuda"), 0.5)
    want, want_state = start.clone(), [t.clone() for t in state]
    op(want, gradient * multiplier, *want_state, *rest)
    got, got_state = start.clone(), [t.clone() for t in state]
    op(got, gradient, *got_state, *rest, multiplier, found_inf)
    assert torch.equal(got, want) and same(got_state, want_state)
    # The same on the CPU, and nothing at all where an overflow was found. The CPU's root is torch's, hence MKL's, which is an ulp
    # off in some places on some processors; the eight-bit step takes its own.
    cpu, cpu_state = start.cpu(), [t.cpu() for t in state]
    op(cpu, gradient.cpu(), *cpu_state, *rest, multiplier.cpu(), found_inf.cpu())
    ulps = {"rtol": 0, "atol": 0} if eight_bit else {"rtol": 2.4e-7, "atol": 1e-9}
    torch.testing.assert_close(cpu, want.cpu(), **ulps)
    assert same(cpu_state, want_state)
    for device in ("cuda", "cpu"):
        skipped, skipped_state = start.to(device, copy=True), [t.to(device, copy=True) for t in state]
        op(skipped, gradient.to(device), *skipped_state, *rest, multiplier.to(device), torch.ones((), device=device))
        assert torch.equal(skipped.cpu(), start.cpu()) and same(skipped_state, state)


def test_nothing_waits_for_the_device():
    """Every call of a step, and of a layer, while synchronizing is an error."""
    n = 4096
    p, g = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    state = on_gpu(fresh_8bit(n))
    inverse = torch.ones((), device="cuda")
    hidden = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(64, device="cuda")
    q = torch.randn(64, 4, 64, device="cuda", dtype=torch.bfloat16)

    def everything():
        _, found_inf, multiplier = OPS.gradient_norm(g, inverse, 1.0)
        OPS.adamw_8bit_(p, g, *state, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, multiplier, found_inf)
        OPS.linear_cross_entropy(hidden, hidden, targets, inverse, True, 16, 64)
        OPS.linear_cross_entropy(hidden, hidden, targets, inverse, True, 16, 60)
        for rows in ([0, 64], [0, 32, 64], [0, 10, 64]):
            out, lse = OPS.attention(q, q, q, rows, 0.125)
            OPS.attention_backward(out, q, q, q, out, lse, rows, 0.125)
        OPS.embedding(hidden, targets)
        OPS.seeded_dropout(hidden, 0.1, 1, 2, 3)

    everything()  # tables and plans are made at the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["PagedAdamW32bit", "PagedAdamW8bit"])
def test_paged_moments_of_a_torch_optimizer_give_the_same_bits_on_the_host(name):
    from qlorapp import optim

    class Unpaged(getattr(optim, name)):
        _paged = False

    def parameters():
        generator = torch.Generator().manual_seed(3)
        return [
            torch.nn.Parameter(torch.randn(shape, generator=generator).cuda())
            for shape in ((3000, 3072), (300, 20), (512, 512))
        ]

    paged, plain, later = parameters(), parameters(), parameters()
    one, other = getattr(optim, name)(paged, lr=1e-2), Unpaged(plain, lr=1e-2)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(paged, plain, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator).cuda()
        one.step()
        other.step()
        if step in (1, 3):
            assert all(page.move_to_host() and page.on_host for page in one._pages.values())
    assert len(one._pages) == 2 and not other._pages and same(paged, plain)
    loaded = getattr(optim, name)(later, lr=1e-2)
    loaded.load_state_dict(one.state_dict())
    assert len(loaded._pages) == 2
    for index, state in other.state_dict()["state"].items():
        for again in (one, loaded):
            held = again.state_dict()["state"][index]
            assert held["step"] == state["step"]
            key = "__bnb_optimizer_quant_state__"
            assert held[key].keys() == state[key].keys()
            assert all(torch.equal(held[key][n].cpu(), value.cpu()) for n, value in state[key].items())
