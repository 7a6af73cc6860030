# SPDX-License-Identifier: Apache-2.0
"""C++'s loop behind transformers' generate on a GPU: the tokens of transformers' loop, and torch's draws there."""

import pytest
import qlorapp
import torch
import transformers
from conftest import has_cuda
from generate_checks import SAMPLINGS, draws_are_torch_s, folder, prompts, ran  # noqa: F401  (some are fixtures)


@pytest.fixture(scope="module")
def models(folder):
    """In float32, where no rounding decides between two tokens."""
    if not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    options = {"dtype": torch.float32, "device_map": "cuda"}
    return (
        qlorapp.AutoModelForCausalLM.from_pretrained(folder, **options).eval(),
        transformers.LlamaForCausalLM.from_pretrained(folder, **options).eval(),
    )


def on_gpu(*size):
    return {name: tensor.cuda() for name, tensor in prompts(*size).items()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_are_torch_s_draws(sampling, models, ran):
    draws_are_torch_s(*models, {**on_gpu(3, 80), **sampling})
    assert ran.loops == 2


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": list(range(30, 50)), "max_new_tokens": 40},
        {"eos_token_id": list(range(30, 80)), "min_new_tokens": 5},
        {"repetition_penalty": 1.8, "eos_token_id": None},
        {"num_return_sequences": 1, "eos_token_id": None, "max_new_tokens": 30},
    ],
)
@pytest.mark.parametrize("size", [(3, 9), (70, 80)])
def test_greedy_tokens_are_transformers(size, options, models, ran):
    ours, theirs = models
    options = {**on_gpu(*size), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
    if "repetition_penalty" in options:  # transformers 5.22 counts padding
        options["attention_mask"] = torch.ones_like(options["attention_mask"])
    assert torch.equal(ours.generate(**options), theirs.generate(**options))
    assert ran.loops == 1
