# SPDX-License-Identifier: Apache-2.0
"""What scripts for transformers pass to a model's call and to generate()."""

import pathlib

import pytest
import qlorapp
import torch
import transformers

MODEL = pathlib.Path(__file__).parents[2] / "examples" / "data" / "tiny-llama"
IDS = torch.arange(3, 8)[None]


@pytest.fixture(scope="module")
def model():
    return qlorapp.get_peft_model(qlorapp.AutoModelForCausalLM.from_pretrained(MODEL), qlorapp.LoraConfig(r=4)).eval()


def test_positions_that_are_taken_anyway_are_accepted(model):
    expected = model(IDS).logits
    for positions in (torch.arange(5)[None], torch.arange(5), [list(range(5))]):
        assert torch.equal(model(IDS, position_ids=positions).logits, expected)
    assert model(IDS[:, :1], position_ids=[[0]]).logits.shape[:2] == (1, 1)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert model(IDS, mask, position_ids=torch.tensor([[1, 1, 0, 1, 2]])).logits.shape[:2] == (1, 5)


@pytest.mark.parametrize("positions", [torch.arange(5)[None] + 1, torch.arange(4), torch.tensor([[0, 1, 2, 0, 1]])])
def test_other_positions_are_refused(model, positions):
    with pytest.raises(ValueError, match=r"\[forward\] position_ids must be those that are taken anyway"):
        model(IDS, position_ids=positions)
    with pytest.raises(ValueError, match="position_ids must be"):
        model(IDS[:, :1], position_ids=[[7]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(inputs_embeds=torch.ones(1, 5, 8)), r"\[forward\] inputs_embeds is not supported.*Give input_ids"),
        (lambda m: m(IDS, past_key_values=[torch.ones(2)]), r"\[forward\] past_key_values is not supported"),
        (lambda m: m(), r"\[forward\] input_ids must be a tensor of shape \(B, T\); got NoneType"),
        (lambda m: m({"input_ids": IDS}), r"got dict.*model\(\*\*inputs\)"),
        (lambda m: m.generate(inputs_embeds=torch.ones(1, 5, 8)), r"\[generate\] inputs_embeds is not supported"),
        (lambda m: m.generate({"ids": IDS}), r"inputs must have input_ids; got \['ids'\]"),
        (lambda m: m.generate({"input_ids": IDS}, input_ids=IDS), "are in inputs already. Give them once"),
        (lambda m: m.generate([3, 4]), r"input_ids must be \(B, T\)"),
        (
            lambda m: m.generate(IDS, logits_processor=[lambda ids, scores: scores]),
            "calls no function on the logits.*loop of your own",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_options_may_be_tensors(model):
    assert torch.equal(
        model(IDS, cache_position=torch.arange(5), token_type_ids=torch.zeros_like(IDS)).logits, model(IDS).logits
    )


def test_an_output_has_the_names_that_transformers_outputs_have(model):
    out = model(IDS, use_cache=True)
    assert out.past_key_values is None and out.hidden_states is None and out.attentions is None
    assert list(out) == ["logits"]


def test_generate_takes_what_the_tokenizer_returns(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(["hi", "a longer prompt"], return_tensors="pt", padding=True)
    assert inputs["attention_mask"].min() == 0
    options = {"max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(model.generate(inputs, **options), model.generate(**inputs, **options))
