# SPDX-License-Identifier: Apache-2.0
"""AdamW against torch's own optimizer and bitsandbytes' maps and eight-bit rule."""

import pytest
import torch

OPS = torch.ops.qlorapp
BLOCK = 256


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors, thousands of steps: waking a second thread would cost more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fresh_8bit(n):
    blocks = -(-n // BLOCK)
    return [
        torch.full((n,), 127, dtype=torch.uint8),
        torch.zeros(n, dtype=torch.uint8),
        torch.zeros(blocks),
        torch.zeros(blocks),
    ]


@pytest.mark.parametrize("n", [1, 7, 16, 1000, 16384, 16385, 100_003])
@pytest.mark.parametrize(
    "lr, betas, eps, weight_decay",
    [
        (1e-3, (0.9, 0.999), 1e-8, 0.0),
        (2e-4, (0.9, 0.95), 1e-6, 0.1),
        (5e-5, (0.3, 0.99), 1e-10, 0.01),
        (1.0, (0.0, 0.0), 1e-3, 0.5),
    ],
)
def test_adamw_is_bit_equal_to_torch(n, lr, betas, eps, weight_decay):
    generator = torch.Generator().manual_seed(n)
    ours = torch.randn(n, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False, fused=False)
    m, v = torch.zeros(n), torch.zeros(n)
    for step in range(1, 13):
        gradient = torch.randn(n, generator=generator) * 10.0 ** (step % 5 - 3)
        theirs.grad = gradient.clone()
        optimizer.step()
        OPS.adamw_(ours, gradient, m, v, step, lr, betas[0], betas[1], eps, weight_decay)
        state = optimizer.state[theirs]
        assert torch.equal(ours, theirs.detach())
        assert torch.equal(m, state["exp_avg"])
        assert torch.equal(v, state["exp_avg_sq"])


def test_adamw_is_bit_equal_to_torch_at_every_step_number():
    # Late steps reach the bias corrections through pow(); one ulp there would move every parameter.
    ours = torch.randn(64)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01, foreach=False, fused=False)
    m, v = torch.zeros(64), torch.zeros(64)
    for step in range(1, 3001):
        gradient = torch.randn(64)
        theirs.grad = gradient.clone()
        optimizer.step()
        OPS.adamw_(ours, gradient, m, v, step, 1e-3, 0.9, 0.999, 1e-8, 0.01)
        assert torch.equal(ours, theirs.detach()), step


def test_adamw_thread_count_changes_no_bit():
    n = 200_001
    start, gradient = torch.randn(n), torch.randn(n)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        p, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
        OPS.adamw_(p, gradient, m, v, 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
        p8, state = start.clone(), fresh_8bit(n)
        OPS.adamw_8bit_(p8, gradient, *state, 1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
        results.append([p, m, v, p8, *state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_opcheck():
    n = 300
    arguments = (1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    torch.library.opcheck(OPS.adamw_, (torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n), *arguments))
    torch.library.opcheck(OPS.adamw_8bit_, (torch.randn(n), torch.randn(n), *fresh_8bit(n), *arguments))


def test_python_sees_a_value_error():
    with pytest.raises(ValueError, match="at flat index 3"):
        gradient = torch.zeros(8)
        gradient[3] = float("nan")
        OPS.adamw_8bit_(torch.zeros(8), gradient, *fresh_8bit(8), 1, 1e-3, 0.9, 0.999, 1e-8, 0.0)


def test_8bit_follows_bitsandbytes():
    """The same rule and layout: its parameters agree to the resolution of its own, not quite nearest, codes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    signed, unsigned = functional.create_dynamic_map(True), functional.create_dynamic_map(False)
    n = 8192
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(n, generator=generator)
    theirs = ours.clone()
    start = ours.clone()
    mine, peers = fresh_8bit(n), fresh_8bit(n)
    for step in range(1, 51):
        gradient = torch.randn(n, generator=generator) * 0.01
        OPS.adamw_8bit_(ours, gradient, *mine, step, 1e-3, 0.9, 0.999, 1e-8, 0.1)
        functional.optimizer_update_8bit_blockwise(
            "adam", gradient, theirs, peers[0], peers[1], 0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-3,
            signed, unsigned, peers[2], peers[3], weight_decay=0.1,
        )  # fmt: skip
        if step == 1:  # from the same state: parameters and absmax to rounding, codes but for those that are not nearest
            assert torch.allclose(ours, theirs, rtol=0, atol=3e-7)
            assert torch.allclose(mine[2], peers[2], rtol=1e-6) and torch.allclose(mine[3], peers[3], rtol=1e-6)
            assert (mine[0] != peers[0]).float().mean() < 0.02
            assert (mine[0].int() - peers[0].int()).abs().max() <= 4
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.05 * moved


def exactly_nearest(values, table):
    """(codes, absmax) by block: the entry nearest to value / absmax, decided in double precision."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    midpoints = (table[1:].double() + table[:-1].double()) / 2
    codes = torch.searchsorted(midpoints, (blocks.double() / absmax.double()[:, None]).contiguous())
    return codes.view(-1)[: len(values)].to(torch.uint8), absmax


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="torch fuses on CPUs with FMA")
@pytest.mark.parametrize("seed", range(5))
def test_100_steps_of_8bit_round_as_bitsandbytes_does_with_exactly_nearest_codes(seed):
    """4,196 elements, so that the last block is short. bitsandbytes' own step, from the same state, is the oracle for what is not a code:
    one ulp elsewhere in a moment flips a code near a midpoint sooner or later, and its parameter with it."""
    functional = pytest.importorskip("bitsandbytes.functional")
    tables = functional.create_dynamic_map(True), functional.create_dynamic_map(False)
    n, options = 4196, (1e-3, 0.9, 0.999, 1e-8, 0.01)
    lr, beta1, beta2, eps, decay = options
    generator = torch.Generator().manual_seed(seed)
    ours, state = torch.randn(n, generator=generator), fresh_8bit(n)
    running, kept = ours.clone(), fresh_8bit(n)  # the same rule in torch's operators, from its own state
    for step in range(1, 101):
        gradient = torch.randn(n, generator=generator) * 0.01
        theirs, peers = ours.clone(), [part.clone() for part in state]
        OPS.adamw_8bit_(ours, gradient, *state, step, *options)
        functional.optimizer_update_8bit_blockwise(
            "adam", gradient, theirs, peers[0], peers[1], beta1, beta2, 0.0, 0.0, eps, step, lr, *tables, peers[2], peers[3], decay,
        )  # fmt: skip
        assert torch.equal(state[2], peers[2]) and torch.equal(state[3], peers[3]), step
        assert torch.allclose(ours, theirs, rtol=3e-7, atol=1e-9), step
        m, v = (
            table[code.long()] * absmax.repeat_interleave(BLOCK)[:n]
            for table, code, absmax in zip(tables, kept[:2], kept[2:], strict=True)
        )
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
        running.mul_(1 - lr * decay).addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
        (kept[0], kept[2]), (kept[1], kept[3]) = exactly_nearest(m, tables[0]), exactly_nearest(v, tables[1])
        assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True)), step
    assert torch.allclose(ours, running, rtol=1e-5, atol=1e-6)


def test_8bit_codes_are_those_of_the_peers_map():
    """The entries that codes mean are bitsandbytes' own: absmax 1 makes the first moment the map itself."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed, index in ((True, 0), (False, 1)):
        table = functional.create_dynamic_map(signed)
        state = fresh_8bit(BLOCK)
        gradient = table if signed else table.sqrt()
        OPS.adamw_8bit_(torch.zeros(BLOCK), gradient, *state, 1, 0.0, 0.0, 0.0, 1e-8, 0.0)
        assert torch.equal(state[index], torch.arange(256, dtype=torch.uint8))


def test_2000_steps_end_within_half_a_percent_of_float32():
    """A noisy regression, long enough for errors to add up; the peer of comparison is torch's own float32 AdamW."""
    torch.manual_seed(5)
    x, truth = torch.randn(512, 64), torch.randn(64, 96)
    y = x @ truth + 2.0 * torch.randn(512, 96)
    start = 0.1 * torch.randn(64, 96)

    def loss_of(w):
        return (x @ w - y).square().mean()

    def gradient_of(w, rows):
        return 2.0 * x[rows].T @ (x[rows] @ w - y[rows]) / (len(rows) * y.shape[1])

    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.01)
    ours, state = start.clone(), fresh_8bit(start.numel())
    for step in range(1, 2001):
        rows = torch.randint(512, (64,))
        lr = 1e-2 * (1 - (step - 1) / 2000)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient_of(theirs.detach(), rows)
        optimizer.step()
        OPS.adamw_8bit_(ours.view(-1), gradient_of(ours, rows).reshape(-1), *state, step, lr, 0.9, 0.999, 1e-8, 0.01)
    expected, got = loss_of(theirs.detach()).item(), loss_of(ours).item()
    assert expected < 0.1 * loss_of(start).item()
    assert abs(got - expected) <= 0.005 * expected, (got, expected)
