# SPDX-License-Identifier: Apache-2.0
"""For tests of generate's loop: a model here and in transformers, prompts, and who ran."""

import peer
import pytest
import qlorapp
import torch
import transformers
from qlorapp import _C
from qlorapp.hf import decoding
from qlorapp.hf.cache import EngineCache
from qlorapp.hf.forward import EngineForward

LONG = 1 << 17  # positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    peer.write_llama(path, max_position_embeddings=LONG)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Ran:
    def __init__(self):
        self.loops = self.passes = self.forwards = 0


@pytest.fixture
def ran(monkeypatch):
    """Counts C++'s loops, its passes for transformers' loop, and calls of model.forward."""
    counts = Ran()

    def count(where, name, what):
        plain = getattr(where, name)

        def counted(*args, **kwargs):
            setattr(counts, what, getattr(counts, what) + 1)
            return plain(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    count(_C, "generate", "loops")
    count(EngineCache, "forward", "passes")
    count(EngineForward, "__call__", "forwards")
    return counts


@pytest.fixture
def by_their_loop(monkeypatch):
    """Calls generate with transformers' loop over C++'s passes."""

    def call(model, *args, **options):
        def beyond(*_):
            raise decoding.Beyond("a test")

        with monkeypatch.context() as patch:
            patch.setattr(decoding, "generated", beyond)
            return model.generate(*args, **options)

    return call


def prompts(rows=3, columns=9, vocabulary=peer.VOCAB):
    torch.manual_seed(6)
    ids, mask = torch.randint(3, vocabulary, (rows, columns)), torch.ones(rows, columns, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : row % (columns - 2)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


SAMPLINGS = [
    {"num_return_sequences": 3, "eos_token_id": None},
    {"eos_token_id": list(range(3, 60)), "num_return_sequences": 2, "temperature": 1.4},  # rows end, and are drawn for
    {"top_k": 12, "top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": list(range(40, 80))},
]


def draws_are_torch_s(ours, theirs, options):
    """Two calls of each model draw the same tokens, and leave the generator of their device alike."""
    options = {"max_new_tokens": 14, "do_sample": True, "pad_token_id": 0, **options}
    results = []
    for model in (theirs, ours):
        torch.manual_seed(5)
        found = [model.generate(**options) for _ in range(2)]
        results.append([*found, torch.rand(1, device=found[0].device)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
