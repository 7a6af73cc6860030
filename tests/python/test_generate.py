# SPDX-License-Identifier: Apache-2.0
"""model.generate: greedy tokens are transformers', sampled ones follow the distribution that transformers' warpers leave."""

import json

import pytest
import qlorapp
import torch
import transformers
from qlorapp import _C
from tiny_llama import SIZES, write_checkpoint
from transformers.generation import logits_process as of_hf

IDS = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 9, 10, 11], [0, 3, 4, 3, 4]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, num_key_value_heads=2)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


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
        {"temperature": 0.2, "top_k": 3, "top_p": 0.1},  # nothing to a greedy choice
    ],
)
def test_greedy_tokens_of_a_left_padded_batch_are_transformers(ours, theirs, options):
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    # transformers counts padding as seen: rows without any then.
    rows = slice(1, 2) if "repetition_penalty" in options else slice(None)
    expected = theirs.generate(input_ids=IDS[rows], attention_mask=MASK[rows], **settings)
    assert ours.generate(input_ids=IDS[rows], attention_mask=MASK[rows], **settings).tolist() == expected.tolist()


def test_a_row_s_text_does_not_depend_on_the_rows_beside_it(ours):
    together = ours.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=16, eos_token_id=[], repetition_penalty=1.3)
    for i in range(3):
        alone = ours.generate(IDS[i : i + 1, MASK[i] != 0], max_new_tokens=16, eos_token_id=[], repetition_penalty=1.3)
        assert together[i, -16:].tolist() == alone[0, -16:].tolist()


def test_padding_is_found_by_the_pad_token_where_there_is_no_mask(ours, theirs):
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    expected = theirs.generate(input_ids=IDS, attention_mask=MASK, **settings)
    assert ours.generate(input_ids=IDS, **settings).tolist() == expected.tolist()


def test_max_length_counts_the_prompt_and_the_default_is_twenty_new_tokens(ours):
    assert ours.generate(IDS[1:2], max_length=9, eos_token_id=[]).shape == (1, 9)
    assert ours.generate(IDS[1:2], eos_token_id=[]).shape == (1, 25)
    assert ours.generate(IDS[1:2], max_length=9, max_new_tokens=3, eos_token_id=[]).shape == (1, 8)


# --- what is returned


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7, "min_new_tokens": 6},
        {"eos_token_id": [2, 30, 31, 32, 33], "max_new_tokens": 30},
        {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"do_sample": True, "num_return_sequences": 2},
    ],
)
def test_scores_and_logits_are_those_of_transformers(ours, theirs, options):
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, **options, "return_dict_in_generate": True}
    rows = slice(1, 2) if "repetition_penalty" in options else slice(None)  # transformers counts padding as seen
    given = {"input_ids": IDS[rows], "attention_mask": MASK[rows]}
    torch.manual_seed(1)
    found = ours.generate(**given, **settings, output_scores=True, output_logits=True)
    kind = transformers.generation.GenerateDecoderOnlyOutput
    assert type(found).__name__ == kind.__name__ and list(found) == ["sequences", "scores", "logits"]
    assert found[0] is found.sequences is found["sequences"] and found.attentions is found.hidden_states is None
    copies, new = options.get("num_return_sequences", 1), found.sequences[:, IDS.shape[1] :]
    assert len(found.scores) == len(found.logits) == new.shape[1]
    if "do_sample" not in options:
        expected = theirs.generate(**given, **settings, output_scores=True, output_logits=True)
        assert torch.equal(found.sequences, expected.sequences)
        scores, logits = expected.scores, expected.logits
    else:  # its processors on its logits of the tokens that were drawn here
        mask = torch.cat([MASK.repeat_interleave(copies, 0), torch.ones_like(new)], dim=1)
        whole = theirs(found.sequences, mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits.detach()
        logits = whole[:, IDS.shape[1] - 1 : -1].unbind(1)
        warpers = [
            of_hf.TemperatureLogitsWarper(options.get("temperature", 1.0)),
            of_hf.TopKLogitsWarper(options.get("top_k", 50)),
        ]
        warpers += [of_hf.TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
        scores = [transformers.LogitsProcessorList(warpers)(None, one) for one in logits]
    for mine, other in zip((*found.scores, *found.logits), (*scores, *logits), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(torch.isinf(mine), torch.isinf(other))
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    for normalize in (False, True):
        mine, other = (
            one.compute_transition_scores(found.sequences, found.scores, normalize_logits=normalize) for one in (ours, theirs)
        )
        torch.testing.assert_close(mine, other)


def test_only_what_is_asked_for_is_returned(ours):
    settings = {"max_new_tokens": 3, "return_dict_in_generate": True}
    plain = ours.generate(IDS[1:2], max_new_tokens=3, output_scores=True)  # without effect, as there
    found = ours.generate(IDS[1:2], **settings)
    assert (
        torch.equal(found.sequences, plain) and found.scores is None and found.logits is None and list(found) == ["sequences"]
    )
    config = qlorapp.GenerationConfig(**settings, output_scores=True)
    assert list(ours.generate(IDS[1:2], config)) == ["sequences", "scores"]


def test_a_text_without_a_prompt_begins_with_bos(ours, theirs):
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert ours.generate(**settings).tolist() == theirs.generate(**settings).tolist()
    assert ours.generate(bos_token_id=7, **settings).tolist() == theirs.generate(bos_token_id=7, **settings).tolist()


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
    found = _C.warped_logits(logits, [row.unique() for row in seen], [], options)
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
    warped = _C.warped_logits(logits, [], [], options)
    counts = torch.zeros(24, dtype=torch.double)
    for position in range(100):
        drawn = torch.tensor(_C.choose_tokens(warped, list(range(400)), position, options))
        counts += torch.bincount(drawn, minlength=24)
    statistic, freedom = chi_square(counts, warped[0].double().softmax(0))
    assert freedom >= 10
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_first_tokens_of_generate_follow_the_model_s_distribution(ours, theirs):
    with torch.no_grad():
        logits = theirs(IDS[1:2]).logits[0, -1]
    torch.manual_seed(3)
    drawn = ours.generate(IDS[1:2], do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=4000, eos_token_id=[])
    counts = torch.bincount(drawn[:, -1], minlength=SIZES["vocab_size"]).double()
    probabilities = logits.double().softmax(0)
    rare = probabilities * 4000 < 5  # together, as the test asks
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    probabilities = torch.cat([probabilities[~rare], probabilities[rare].sum()[None]])
    statistic, freedom = chi_square(counts, probabilities)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_sampling_follows_torch_manual_seed(ours):
    def draw(seed):
        torch.manual_seed(seed)
        return ours.generate(IDS, attention_mask=MASK, do_sample=True, max_new_tokens=12, eos_token_id=[]).tolist()

    assert draw(1) == draw(1) != draw(2)


# --- configs


def test_options_go_before_a_config_and_a_config_before_the_model_s_own(tmp_path, caplog):
    write_checkpoint(tmp_path, num_key_value_heads=2)
    values = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**values, "max_new_tokens": 3, "eos_token_id": [], "num_beams": 4})
    )
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert "generation_config.json asks for num_beams=4, which is passed over: there is no beam search" in caplog.text
    assert model.generation_config.max_new_tokens == 3
    assert model.generate(IDS).shape == (3, 8)
    assert model.generate(IDS, qlorapp.GenerationConfig(max_new_tokens=5)).shape == (3, 10)
    assert model.generate(IDS, transformers.GenerationConfig(max_new_tokens=6)).shape == (3, 11)
    assert model.generate(IDS, qlorapp.GenerationConfig(max_new_tokens=5), max_new_tokens=2).shape == (3, 7)
    model.generation_config.max_new_tokens = 4
    assert model.generate(IDS).shape == (3, 9)


def test_a_config_is_written_and_read_as_transformers_does(tmp_path):
    ours = qlorapp.GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.7, eos_token_id=[1, 2])
    ours.save_pretrained(tmp_path)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.max_new_tokens, theirs.temperature, theirs.eos_token_id) == (9, 0.7, [1, 2])
    assert qlorapp.GenerationConfig.from_pretrained(tmp_path) == ours
    theirs.save_pretrained(tmp_path / "theirs")
    assert qlorapp.GenerationConfig.from_pretrained(tmp_path / "theirs") == ours


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_beams": 4}, ValueError, "num_beams=4 is not supported: there is no beam search"),
        ({"temprature": 0.5}, TypeError, "unknown option 'temprature'. Did you mean 'temperature'"),
        ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature must be > 0; got 0"),
        ({"do_sample": True, "top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\]; got 1.5"),
        ({"do_sample": True, "top_k": -1}, ValueError, "top_k must be an integer >= 0"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be > 0"),
        ({"num_return_sequences": 2}, ValueError, "equal texts"),
        ({"max_length": 5}, ValueError, "max_length is 5 and the prompt has 5 tokens"),
        ({"attention_mask": MASK[:, 1:]}, ValueError, "attention_mask must have the shape"),
    ],
)
def test_what_is_not_there_is_refused_by_name(ours, options, error, message):
    with pytest.raises(error, match=message):
        ours.generate(IDS, **options)


# --- streaming


def test_a_streamer_gets_the_prompt_and_each_token(ours):
    class Collector:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.ended = True

    streamer = Collector()
    out = ours.generate(IDS[1:2], max_new_tokens=5, eos_token_id=[], streamer=streamer)
    assert streamer.got == [IDS[1:2].tolist()] + [[token] for token in out[0, 5:].tolist()]
    assert streamer.ended
    with pytest.raises(ValueError, match="a streamer shows one text; got 3"):
        ours.generate(IDS, streamer=streamer)


def test_what_a_streamer_raises_ends_the_generation(ours):
    class Stop:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 3:
                raise KeyboardInterrupt

        def end(self):
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        ours.generate(IDS[1:2], max_new_tokens=50, eos_token_id=[], streamer=Stop())
