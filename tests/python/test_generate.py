# SPDX-License-Identifier: Apache-2.0
"""C++'s decoding, which the command uses: greedy tokens are transformers', sampled ones follow the distribution that its warpers leave."""

import pytest
import qlorapp
import torch
import transformers
from qlorapp import _C
from tiny_llama import SIZES, folder  # noqa: F401  (a fixture)
from transformers.generation import logits_process as of_hf

PROMPTS = [[5, 9, 11], [7, 8, 9, 10, 11], [3, 4, 3, 4]]


@pytest.fixture(scope="module")
def ours(folder):
    return qlorapp.load_model(str(folder), compute_dtype=torch.float32, load_in_4bit=False)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


# --- greedy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "min_new_tokens": 9},
        {"eos_token_id": [2, 30, 31, 32, 33], "max_new_tokens": 30},
    ],
)
def test_greedy_tokens_are_transformers(ours, theirs, options):
    settings = {"max_new_tokens": 24, "eos_token_id": [2], **options}
    found = _C.generate(
        ours, PROMPTS, max_new_tokens=settings["max_new_tokens"], min_new_tokens=options.get("min_new_tokens", 0),
        eos_token_ids=settings["eos_token_id"], sampling=_C.SamplingOptions(repetition_penalty=options.get("repetition_penalty", 1.0)),
    )  # fmt: skip
    for prompt, row in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **settings)[
            0, len(prompt) :
        ].tolist()
        ends = settings["eos_token_id"]
        assert [token for token in row if token not in ends] == [token for token in expected if token not in ends]


# --- what is left of the logits


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (50, 0.3, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.05)]
)
def test_warped_logits_are_those_of_transformers_processors(temperature, top_k, top_p, min_p):
    torch.manual_seed(1)
    logits, seen = torch.randn(4, 200) * 3, torch.randint(0, 200, (4, 12))
    processors = [of_hf.RepetitionPenaltyLogitsProcessor(1.4), of_hf.TemperatureLogitsWarper(temperature)]
    if top_k:
        processors.append(of_hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(of_hf.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(of_hf.MinPLogitsWarper(min_p))
    expected = logits.clone()
    for processor in processors:
        expected = processor(seen, expected)
    options = _C.SamplingOptions(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.4
    )
    found = _C.warped_logits(logits, [row.unique() for row in seen], options)
    assert torch.equal(torch.isinf(found), torch.isinf(expected))
    torch.testing.assert_close(found, expected)


# --- draws


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a token of probability 0 was drawn"
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    return statistic, int(kept.sum()) - 1


def test_draws_follow_the_probabilities():
    """Chi-square of 40,000 draws over 24 tokens; mean = freedom, deviation = sqrt(2 · freedom), five of which are never met."""
    torch.manual_seed(2)
    logits = (torch.randn(1, 24) * 1.5).expand(400, 24).contiguous()
    options = _C.SamplingOptions(do_sample=True, temperature=0.9, top_p=0.95, seed=7)
    warped = _C.warped_logits(logits, [], options)
    counts = torch.zeros(24, dtype=torch.double)
    for position in range(100):
        drawn = torch.tensor(_C.choose_tokens(warped, list(range(400)), position, options))
        counts += torch.bincount(drawn, minlength=24)
    statistic, freedom = chi_square(counts, warped[0].double().softmax(0))
    assert freedom >= 10
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_first_tokens_follow_the_model_s_distribution(ours, theirs):
    with torch.no_grad():
        logits = theirs(torch.tensor(PROMPTS[1:2])).logits[0, -1]
    sampling = _C.SamplingOptions(do_sample=True, seed=3)
    drawn = torch.tensor(_C.generate(ours, PROMPTS[1:2] * 4000, max_new_tokens=1, sampling=sampling))
    counts = torch.bincount(drawn[:, -1], minlength=SIZES["vocab_size"]).double()
    probabilities = logits.double().softmax(0)
    rare = probabilities * 4000 < 5  # together, as the test asks
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    probabilities = torch.cat([probabilities[~rare], probabilities[rare].sum()[None]])
    statistic, freedom = chi_square(counts, probabilities)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_sampling_follows_its_seed(ours):
    def draw(seed):
        return _C.generate(ours, PROMPTS, max_new_tokens=12, sampling=_C.SamplingOptions(do_sample=True, seed=seed))

    assert draw(1) == draw(1) != draw(2)


def test_what_a_listener_raises_ends_the_generation(ours):
    heard = []

    def on_token(*token):
        heard.append(token)
        if len(heard) == 3:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        _C.generate(ours, PROMPTS[:1], max_new_tokens=50, on_token=on_token)
    assert len(heard) == 3
