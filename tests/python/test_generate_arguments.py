# SPDX-License-Identifier: Apache-2.0
"""What qlorapp.generate says of arguments that it does not take."""

import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT

TINY = ROOT / "examples" / "data" / "tiny-llama"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def test_python_names_the_option(model, tokenizer):
    with pytest.raises(ValueError, match="stop string must have a character"):
        qlorapp.generate(model, "x", tokenizer, stop_strings=["a", ""])
    with pytest.raises(ValueError, match="system needs"):
        qlorapp.generate(model, "x", tokenizer, raw=True, system="s")
    with pytest.raises(ValueError, match="top_p must be in"):
        qlorapp.generate(model, "x", tokenizer, top_p=2.0)
    for memory in (10, "10 B"):
        with pytest.raises(ValueError, match="of keys and values"):
            qlorapp.generate(model, "x", tokenizer, cache_memory=memory)
    with pytest.raises(ValueError, match="min_new_tokens must be at least 0; got -1"):
        qlorapp.generate(model, "x", tokenizer, min_new_tokens=-1)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=r"seed must be in \[0, 2\^64\)"):
            qlorapp.generate(model, "x", tokenizer, seed=seed)
    for name in ("max_new_tokens", "min_new_tokens", "max_rows", "seed", "top_k"):
        for value in (3.5, "3", True):
            with pytest.raises(TypeError, match=f"{name} must be an integer"):
                qlorapp.generate(model, "x", tokenizer, **{name: value})
    for name in ("max_new_tokens", "min_new_tokens", "max_rows", "top_k"):
        with pytest.raises(ValueError, match=rf"{name} must be below 2\^63; got 1000"):
            qlorapp.generate(model, "x", tokenizer, **{name: 10**30})
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        for value in ("1", True, [1.0]):
            with pytest.raises(TypeError, match=f"{name} must be a number"):
                qlorapp.generate(model, "x", tokenizer, **{name: value})
    for value in ([1], ("a", None), [b"a"]):
        with pytest.raises(TypeError, match="stop_strings must be a string or a list of them"):
            qlorapp.generate(model, "x", tokenizer, stop_strings=value)
    for value in ("x", None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="model must be a model of transformers or PEFT that generates; got"):
            qlorapp.generate(value, "x", tokenizer)


def test_options_of_sampling_may_be_none(model, tokenizer):
    unset = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    for options in ({}, {"do_sample": True, "seed": 5}):
        found, plain = (
            qlorapp.generate(model, "Hello!", tokenizer, max_new_tokens=8, **options, **more)[0] for more in (unset, {})
        )
        assert found == plain


def test_python_names_the_forms_of_a_prompt(model, tokenizer):
    message = {"role": "user", "content": "x"}
    for prompts in (None, (text for text in "xy"), message, [None], [[3.5]], [[message, "x"]], [{"prompt": "x"}]):
        with pytest.raises(TypeError, match="A prompt is a string, a list of messages"):
            qlorapp.generate(model, prompts, tokenizer)
