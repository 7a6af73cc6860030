# SPDX-License-Identifier: Apache-2.0
"""The next token's choice on a GPU beside sorting in double precision, and beside a CPU."""

import pytest
import torch
from qlorapp import _C

pytestmark = pytest.mark.usefixtures("cuda")
NEVER = -torch.inf
CLOSE = 1e-6  # of the probability: what a float's exponential and weights of 40 bits leave open


def kept(scores, top_k, top_p, min_p):
    """(R, V): who stays; and how far each is from being decided otherwise by top_p."""
    scores = scores.double().cpu()
    if 0 < top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(top_k)[0][:, -1:], NEVER)
    stays, far = scores > NEVER, torch.full_like(scores, torch.inf)
    if top_p < 1:
        order = scores.argsort(dim=-1, stable=True)
        sums = scores.gather(1, order).softmax(-1).cumsum(-1)
        leaves = sums <= 1 - top_p
        leaves[:, -1] = False
        stays &= ~torch.empty_like(leaves).scatter_(1, order, leaves)
        far = torch.empty_like(sums).scatter_(1, order, (sums - (1 - top_p)).abs())
    ratios = (scores - scores.amax(-1, keepdim=True)).exp()
    return stays & (ratios >= min_p), torch.minimum(far, (ratios - min_p).abs() if min_p else far)


def rows_of(vocabulary, spread, step, rows=3):
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(rows, vocabulary, generator=generator) * spread - 1
    if step:
        scores = (scores / step).round() * step
    if vocabulary > 100:
        scores[:, 3:43] = NEVER
    scores[0] = scores[0].sort()[0]
    return scores.float()


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 300, 1024, 5000, 128256, 262144])
@pytest.mark.parametrize(
    "spread, step", [(0.0, 0), (1e-6, 0), (0.01, 0), (1.0, 0), (2.0, 2**-4), (12.0, 0), (12.0, 0.25), (1e-30, 0)]
)
@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(0, p, 0) for p in (0.0, 0.03, 0.5, 0.9, 0.97, 0.9999)]
    + [(k, 1.0, 0) for k in (1, 2, 50, 1500)]
    + [(0, 1.0, 0.1), (0, 1.0, 1.0), (50, 0.9, 0.05), (2000, 0.99, 0)],
)
def test_tokens_stay_that_sorting_keeps(vocabulary, spread, step, top_k, top_p, min_p):
    scores = rows_of(vocabulary, spread, step)
    expected, far = kept(scores, top_k, top_p, min_p)
    found = scores.cuda()
    torch.ops.qlorapp.keep_likely_tokens_(found, top_k, top_p, min_p)
    again = scores.cuda()
    torch.ops.qlorapp.keep_likely_tokens_(again, top_k, top_p, min_p)
    assert torch.equal(found, again)
    found = found.cpu()
    stays = found > NEVER
    assert torch.equal(found[stays], scores[stays])
    assert stays.any(-1).all()
    assert far[stays != expected].le(CLOSE).all(), (int(stays.sum()), int(expected.sum()))


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 300, 5000, 128256, 262144])
@pytest.mark.parametrize("spread", [0.0, 1.0, 12.0])
def test_tokens_are_drawn_at_their_share(vocabulary, spread):
    scores = rows_of(vocabulary, spread, 0, rows=64)
    draws = torch.rand(64, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    draws[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    found = torch.ops.qlorapp.draw_tokens(scores.cuda(), draws.cuda()).cpu()
    sums = scores.double().softmax(-1).cumsum(-1)
    sums /= sums[:, -1:]
    through = sums.gather(1, found[:, None])[:, 0]
    before = torch.where(found > 0, sums.gather(1, (found - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    assert ((before <= draws + CLOSE) & (draws <= through + CLOSE)).all()
    assert (scores.gather(1, found[:, None]) > NEVER).all()


def test_of_equal_scores_the_last_stay_and_a_broken_row_is_left():
    scores = torch.tensor([[1.0, 1, 1, 1], [0.0, -0.0, 0.0, -0.0], [3.0, torch.nan, 1, 0], [NEVER] * 4, [torch.inf, 1, 2, 3]])
    found = scores.cuda()
    torch.ops.qlorapp.keep_likely_tokens_(found, 0, 0.5, 0)
    assert found[:2].tolist() == [[NEVER, NEVER, 1, 1], [NEVER, NEVER, 0, 0]]
    torch.testing.assert_close(found[2:].cpu(), scores[2:], equal_nan=True, rtol=0, atol=0)
    assert torch.ops.qlorapp.draw_tokens(found, torch.full((5,), 0.99, dtype=torch.double).cuda()).tolist() == [3, 3, 0, 0, 0]


def test_a_gpu_draws_what_a_cpu_draws():
    logits = rows_of(32000, 2.0, 2**-4, rows=200)
    options = _C.SamplingOptions(do_sample=True, temperature=0.8, top_p=0.9, seed=5)
    found = {
        device: _C.choose_tokens(_C.warped_logits(logits.to(device), [], options), list(range(200)), 3, options)
        for device in ("cpu", "cuda")
    }
    assert sum(a != b for a, b in zip(found["cpu"], found["cuda"], strict=True)) <= 1  # a draw at a token's very edge


@pytest.mark.parametrize(
    "scores, draws, message",
    [
        (torch.zeros(2, 3, dtype=torch.half), torch.zeros(2, dtype=torch.double), "scores must be"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.double), "scores must be"),
        (torch.zeros(2, 3), torch.zeros(2), "draws must be float64"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.double), "draws must be float64"),
    ],
)
def test_other_shapes_are_refused(scores, draws, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.qlorapp.draw_tokens(scores.cuda(), draws.cuda())
    with pytest.raises(ValueError, match="top_p"):
        torch.ops.qlorapp.keep_likely_tokens_(torch.zeros(2, 3).cuda(), 0, 1.5, 0)
