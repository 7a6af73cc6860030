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
        (
            lambda m: m(IDS, output_hidden_states=True),
            r"output_hidden_states is not supported.*get_peft_model: Trainer takes it",
        ),
        (lambda m: m(IDS, output_attentions=True), r"output_attentions is not supported.*load the model by transformers"),
        (lambda m: m(inputs_embeds=torch.ones(1, 5, 8)), r"inputs_embeds is not supported.*load the model by transformers"),
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
    out = model(IDS, use_cache=False)
    assert out.past_key_values is None and out.hidden_states is None and out.attentions is None
    assert list(out) == list(model(IDS, use_cache=True)) == ["logits"]


@pytest.fixture(scope="module")
def pair():
    kinds = (qlorapp.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    return [kind.from_pretrained(MODEL, dtype=torch.float32) for kind in kinds]


@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("of_config", [False, True])
def test_there_are_past_key_values_where_transformers_has_them(pair, use_cache, of_config):
    for one in pair:
        one.config.use_cache = of_config
    try:
        ours, theirs = (one(IDS, use_cache=use_cache).past_key_values for one in pair)
    finally:
        for one in pair:
            one.config.use_cache = True
    assert (ours is None) == (theirs is None)


@torch.no_grad()
def test_a_loop_that_feeds_single_tokens_and_a_cache_is_refused(model):
    """None for a cache would have made each further token a text of its own."""
    for made in (model(IDS), type(model(IDS))(dict(model(IDS)))):  # as it is, and as accelerate makes it again
        past, following = made.past_key_values, made.logits[:, -1:].argmax(-1)
        assert past is not None and bool(past)
        with pytest.raises(
            ValueError, match=r"past_key_values is not supported. .* use generate\(\).* or pass the whole sequence"
        ):
            model(following, past_key_values=past, use_cache=True)
        for read in (lambda past=past: past[0], lambda past=past: past.get_seq_length(), lambda past=past: [*past]):
            with pytest.raises(NotImplementedError, match=r"past_key_values.*keeps no cache: use generate\(\)"):
                read()


@pytest.mark.parametrize(
    "kept",
    [
        0,
        1,
        3,
        20,
        torch.tensor([2, 4]),
        torch.tensor([[1, 4], [0, 3]]),
        torch.tensor([[True] * 5, [False, True] * 2 + [False]]),
    ],
    ids=repr,
)
def test_logits_are_those_of_the_positions_that_are_kept(pair, kept):
    ids = torch.cat([IDS, IDS + 7])
    ours, theirs = (one(ids, logits_to_keep=kept).logits for one in pair)
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_loss_is_of_all_positions_whatever_logits_are_kept(model):
    whole, part = model(IDS, labels=IDS), model(IDS, labels=IDS, logits_to_keep=2)
    assert torch.equal(whole.loss, part.loss) and torch.equal(whole.logits[:, -2:], part.logits)


def test_a_mask_of_floats_is_that_of_integers(model):
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    for kind in (torch.float32, torch.float16, torch.bool):
        assert torch.equal(model(IDS, mask.to(kind)).logits, model(IDS, mask).logits)


def test_generate_takes_what_the_tokenizer_returns(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(["hi", "a longer prompt"], return_tensors="pt", padding=True)
    assert inputs["attention_mask"].min() == 0
    options = {"max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(model.generate(inputs, **options), model.generate(**inputs, **options))
