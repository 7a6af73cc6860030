# SPDX-License-Identifier: Apache-2.0
"""stopping_criteria, stop_strings and max_time: asked what transformers' generate asks, and the same tokens come out."""

import time

import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT
from test_generate import IDS, MASK, folder, ours, theirs  # noqa: F401  (fixtures)

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": [2, 30, 31, 32, 33]}


class Records(transformers.StoppingCriteria):
    """Says yes for a row when `rule(row's ids)` does, or what `rule` says of all; keeps what it was shown."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores))
        return self.rule(input_ids)


RULES = {
    "by length": lambda ids: torch.full((len(ids),), ids.shape[1] >= 9),
    "one row after another": lambda ids: torch.tensor([ids.shape[1] >= 6 + 2 * row for row in range(len(ids))]),
    "the last row first": lambda ids: torch.tensor([ids.shape[1] >= 11 - 2 * row for row in range(len(ids))]),
    "at once": lambda ids: torch.ones(len(ids), dtype=torch.bool),
    "a plain bool": lambda ids: ids.shape[1] >= 8,
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
}


@pytest.mark.parametrize("rule", RULES)
def test_criteria_see_the_batches_of_transformers_and_end_the_same_rows(ours, theirs, rule):
    mine, reference = Records(RULES[rule]), Records(RULES[rule])
    expected = theirs.generate(
        input_ids=IDS, attention_mask=MASK, stopping_criteria=transformers.StoppingCriteriaList([reference]), **SETTINGS
    )
    found = ours.generate(input_ids=IDS, attention_mask=MASK, stopping_criteria=[mine], **SETTINGS)
    assert found.tolist() == expected.tolist()
    assert mine.seen == reference.seen


def test_one_of_several_is_enough_and_all_are_asked(ours, theirs):
    def pair():
        return [Records(RULES["by length"]), Records(RULES["one row after another"])]

    mine, reference = pair(), pair()
    expected = theirs.generate(
        input_ids=IDS, attention_mask=MASK, stopping_criteria=transformers.StoppingCriteriaList(reference), **SETTINGS
    )
    lists = transformers.StoppingCriteriaList(mine)
    assert ours.generate(IDS, attention_mask=MASK, stopping_criteria=lists, **SETTINGS).tolist() == expected.tolist()
    assert [one.seen for one in mine] == [one.seen for one in reference]


def test_a_single_criterion_and_copies_of_a_prompt(ours):
    criterion = Records(lambda ids: torch.tensor([ids.shape[1] >= 7 + row for row in range(len(ids))]))
    torch.manual_seed(4)
    free = ours.generate(IDS[1:2], do_sample=True, num_return_sequences=3, max_new_tokens=8, eos_token_id=[])
    torch.manual_seed(4)
    stopped = ours.generate(
        IDS[1:2], do_sample=True, num_return_sequences=3, max_new_tokens=8, eos_token_id=[], stopping_criteria=criterion
    )
    assert stopped.shape == (3, 9)
    for row, length in enumerate((7, 8, 9)):
        assert stopped[row].tolist() == [*free[row, :length].tolist(), *[0] * (9 - length)]


def test_a_streamer_sees_no_token_after_the_end(ours):
    class Collector:
        got = ()

        def put(self, value):
            self.got += (value.tolist(),)

        def end(self):
            self.got += ("end",)

    streamer = Collector()
    out = ours.generate(IDS[1:2], streamer=streamer, stopping_criteria=[lambda ids, scores: ids.shape[1] >= 8], eos_token_id=[])
    assert out.shape == (1, 8)
    assert streamer.got == (IDS[1:2].tolist(), *([token] for token in out[0, 5:].tolist()), "end")


@pytest.fixture(scope="module")
def tiny():
    place = ROOT / "examples" / "data" / "tiny-llama"
    return (
        qlorapp.AutoModelForCausalLM.from_pretrained(place, dtype="float32"),
        transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval(),
        transformers.AutoTokenizer.from_pretrained(place),
    )


@pytest.mark.parametrize("by", ["option", "config", "the model's own config"])
def test_stop_strings_end_where_transformers_ends(tiny, by, monkeypatch):
    mine, reference, tokenizer = tiny
    inputs = tokenizer("The river", return_tensors="pt")
    free = reference.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(free)
    assert len(text) > 12
    strings = [text[8:12], "never said"]
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = reference.generate(**inputs, stop_strings=strings, tokenizer=tokenizer, **options)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + len(free)
    given = {
        "option": {"stop_strings": strings},
        "config": {"generation_config": qlorapp.GenerationConfig(stop_strings=strings)},
    }
    if by not in given:
        monkeypatch.setattr(mine.generation_config, "stop_strings", strings)
    found = mine.generate(**inputs, tokenizer=tokenizer, **options, **given.get(by, {}))
    assert found.tolist() == expected.tolist()


def test_max_time_ends_all_rows(ours):
    def slow(ids, scores):
        time.sleep(0.06)
        return False

    out = ours.generate(IDS, attention_mask=MASK, max_time=0.1, stopping_criteria=slow, max_new_tokens=50, eos_token_id=[])
    assert 6 <= out.shape[1] <= 8


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"stop_strings": "x"}, ValueError, "stop_strings='x' needs the tokenizer. Pass tokenizer=tokenizer"),
        ({"stopping_criteria": [3]}, TypeError, "must be callables of .*; got int. Pass StoppingCriteriaList"),
        (
            {"stopping_criteria": [lambda ids, scores: torch.zeros(2, dtype=torch.bool)]},
            ValueError,
            r"a bool for each of 3 rows; function returned shape \(2,\)",
        ),
        (
            {"generation_config": {"stopping_criteria": [3]}},
            ValueError,
            "stopping_criteria=.* is not supported: it is no part of a config. Give it to generate",
        ),
    ],
)
def test_bad_criteria_are_refused_by_name(ours, options, error, message):
    with pytest.raises(error, match=message):
        ours.generate(IDS, attention_mask=MASK, **options)


def test_what_a_criterion_raises_comes_through(ours):
    def fails(ids, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours.generate(IDS, attention_mask=MASK, stopping_criteria=[fails])
