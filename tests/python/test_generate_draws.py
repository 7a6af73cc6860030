# SPDX-License-Identifier: Apache-2.0
"""Samples of C++'s loop behind transformers' generate: torch's draws from what transformers' warpers leave."""

import peer
import pytest
import qlorapp
import torch
from generate_checks import SAMPLINGS, draws_are_torch_s, folder, ours, prompts, ran, theirs  # noqa: F401  (some are fixtures)
from qlorapp import _C
from test_generate import chi_square
from transformers.generation import logits_process


def test_samples_follow_torch_s_seed(ours, ran):
    options = {**prompts(2), "max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "eos_token_id": None}
    torch.manual_seed(1)
    first, second = ours.generate(**options), ours.generate(**options)
    torch.manual_seed(1)
    assert torch.equal(first, ours.generate(**options)) and ran.loops == 3
    assert not torch.equal(first, second) and len(first.unique(dim=0)) == 6
    assert torch.equal(first[:, :9], options["input_ids"].repeat_interleave(3, 0))
    before = torch.get_rng_state()
    ours.generate(**{**options, "do_sample": False, "num_return_sequences": 1})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_are_torch_s_draws(sampling, ours, theirs, ran):
    draws_are_torch_s(ours, theirs, {**prompts(3, 80), **sampling})
    assert ran.loops == 2


def test_no_token_is_drawn_from_logits_that_are_no_numbers(tmp_path, ran):
    peer.write_llama(tmp_path)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(
        RuntimeError, match="no token can be drawn for row 0: its logits are infinite or NaN after 0 new tokens"
    ):
        model.generate(**prompts(), max_new_tokens=4, do_sample=True, pad_token_id=0)
    with pytest.raises(RuntimeError, match="no token can be drawn"):
        _C.generate(model.forward.engine.core, [[3, 4]], max_new_tokens=4, sampling=_C.SamplingOptions(do_sample=True, seed=1))
    assert ran.loops == 2


def test_a_call_that_falls_back_has_drawn_nothing(ours, theirs, monkeypatch):
    plain = _C.generate

    def fails(*args, **kwargs):
        plain(*args, **kwargs)
        raise ValueError("no memory")

    options = {**prompts(), "max_new_tokens": 6, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(8)
    expected = theirs.generate(**options)
    monkeypatch.setattr(_C, "generate", fails)
    torch.manual_seed(8)
    assert torch.equal(ours.generate(**options), expected)


def test_samples_follow_what_the_warpers_leave(ours, theirs, ran):
    ids = prompts(1)["input_ids"]
    sampling = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    with torch.no_grad():
        scores = theirs(ids).logits[:, -1]
    for warper in (
        logits_process.RepetitionPenaltyLogitsProcessor(1.2), logits_process.TemperatureLogitsWarper(1.3),
        logits_process.TopKLogitsWarper(30), logits_process.TopPLogitsWarper(0.9), logits_process.MinPLogitsWarper(0.01),
    ):  # fmt: skip
        scores = warper(ids, scores)
    torch.manual_seed(2)
    found = ours.generate(ids, max_new_tokens=1, do_sample=True, num_return_sequences=4000, eos_token_id=None, **sampling)
    assert ran.loops == 1
    counts, probabilities = torch.bincount(found[:, -1], minlength=peer.VOCAB).double(), scores[0].double().softmax(0)
    assert counts[probabilities == 0].sum() == 0
    rare = probabilities * 4000 < 5  # together, as the test asks
    statistic, freedom = chi_square(
        torch.cat([counts[~rare], counts[rare].sum()[None]]), torch.cat([probabilities[~rare], probabilities[rare].sum()[None]])
    )
    assert freedom >= 5 and abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
