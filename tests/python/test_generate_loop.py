# SPDX-License-Identifier: Apache-2.0
"""transformers' generate on a native model: C++'s loop where it gives the same, transformers' loop over C++'s passes elsewhere."""

import copy
import os
import pickle
import signal
import threading

import peer
import pytest
import qlorapp
import torch
import transformers
from families import FAMILIES
from generate_checks import LONG, by_their_loop, folder, ours, prompts, ran, theirs  # noqa: F401  (most are fixtures)
from qlorapp import _C
from qlorapp.hf import decoding
from qlorapp.hf.forward import engine_of
from tiny_trainer import TINY
from transformers.generation import logits_process

# --- greedy


@pytest.mark.parametrize("case", ["Llama", "Qwen3 with windows", "Gemma 3", "Phi-3, longrope, partial", "Granite"])
def test_rows_with_left_padding_are_transformers(case, tmp_path, ran, by_their_loop):
    config = dict(FAMILIES[case])
    peer.write_llama(tmp_path, **config)
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    options = {**prompts(), "max_new_tokens": 14, "do_sample": False, "eos_token_id": list(range(40, 52)), "pad_token_id": 0}
    found = ours.generate(**options)
    assert (ran.loops, ran.passes, ran.forwards) == (1, 0, 0)
    assert torch.equal(found, by_their_loop(ours, **options)) and ran.passes > 0
    if "longrope" not in case:  # transformers turns the keys of padded rows by their padded length
        assert torch.equal(found, theirs.generate(**options))


OPTIONS = {
    "until the length": {"eos_token_id": None},
    "ends at several tokens": {"eos_token_id": list(range(30, 50)), "max_new_tokens": 40},
    "at least so many": {"eos_token_id": list(range(30, 80)), "min_new_tokens": 5},
    "at least this length": {"eos_token_id": list(range(30, 80)), "min_length": 15},
    "both": {"eos_token_id": list(range(30, 80)), "min_length": 15, "min_new_tokens": 8},
    "a penalty": {"repetition_penalty": 1.8, "eos_token_id": None, "attention_mask": torch.ones(3, 9)},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "a static cache": {"cache_implementation": "static"},
    "a config": {"generation_config": transformers.GenerationConfig(max_new_tokens=7, eos_token_id=2, pad_token_id=5)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_options(name, ours, theirs, ran, by_their_loop):
    options = {**prompts(), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 1, **OPTIONS[name]}
    if name == "a config":
        options = {**prompts(), **OPTIONS[name]}
    found = ours.generate(**options)
    assert (ran.loops, ran.forwards) == (1, 0)
    assert found.dtype == torch.long and torch.equal(found, by_their_loop(ours, **options))
    assert torch.equal(found, theirs.generate(**options))


def test_a_penalty_does_not_count_padding_where_transformers_does_not(ours, theirs, ran):
    """transformers 5.22 counts it, so its loop runs there."""
    options = {**prompts(), "max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = ours.generate(**options, repetition_penalty=1.8)
    assert torch.equal(found, theirs.generate(**options, repetition_penalty=1.8))
    assert ran.loops == (transformers.__version__ >= "5.23")


def test_adapters_and_more_rows_than_are_computed_at_once(folder, ran, by_their_loop):
    model = peer.add_adapters(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    options = {**prompts(150), "max_new_tokens": 6, "do_sample": False, "eos_token_id": list(range(30, 50)), "pad_token_id": 0}
    found = model.generate(**options)
    with model.disable_adapter():
        base = model.generate(**options)
        assert torch.equal(base, by_their_loop(model, **options))
    assert (ran.loops, engine_of(model.get_base_model())._told) == (2, set())
    assert torch.equal(found, by_their_loop(model, **options)) and not torch.equal(found, base)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes_and_training_mode(mode, folder, ran, by_their_loop):
    model = peer.add_adapters(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora_dropout=0.5)
    options = {**prompts(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with mode():
        found = model.train().generate(**options)
    assert ran.loops == 1 and torch.equal(found, by_their_loop(model.eval(), **options))


# --- one row, heard token by token


class Heard:
    def __init__(self, error=None):
        self.put_in, self.error = [], error

    def put(self, value):
        self.put_in.append(value)
        if self.error and len(self.put_in) == 4:
            raise self.error

    def end(self):
        self.put_in.append("end")


def test_a_streamer_hears_what_transformers_tells_it(ours, ran, by_their_loop):
    ids, options = prompts(1)["input_ids"], {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    heard, expected = Heard(), Heard()
    found = ours.generate(ids, streamer=heard, **options)
    assert ran.loops == 1 and torch.equal(found, by_their_loop(ours, ids, streamer=expected, **options))
    assert heard.put_in.pop() == expected.put_in.pop() == "end" and len(heard.put_in) == 10
    for one, other in zip(heard.put_in, expected.put_in, strict=True):
        assert torch.equal(one, other) and one.shape == other.shape


def test_what_a_streamer_raises_ends_the_call(ours, ran):
    with pytest.raises(ValueError, match="full"):
        ours.generate(prompts(1)["input_ids"], streamer=Heard(ValueError("full")), max_new_tokens=9, do_sample=False)
    assert (ran.loops, ran.passes) == (1, 0)


def test_stop_strings_and_max_time(ran, by_their_loop):
    text = transformers.AutoTokenizer.from_pretrained(TINY)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    given = text("Mia has", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(**given, **options)
    written = text.decode(whole[0, given["input_ids"].shape[1] :])
    for begin in range(2, 12, 3):
        options["stop_strings"], options["tokenizer"] = [written[begin : begin + 3]], text
        found, loops = model.generate(**given, **options), ran.loops
        assert torch.equal(found, by_their_loop(model, **given, **options)) and found.shape[1] < whole.shape[1]
        assert ran.loops == loops
    del options["stop_strings"]
    assert ran.loops == 5
    late = model.generate(**given, **options, max_time=1e-9)
    assert late.shape[1] == given["input_ids"].shape[1] + 1 and ran.loops == 6
    assert torch.equal(model.generate(**given, **options, max_time=600), whole) and ran.loops == 7


def test_ctrl_c_ends_the_loop(ours, ran):
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ours.generate(prompts(1)["input_ids"], max_new_tokens=LONG - 64, do_sample=False, eos_token_id=None)
    timer.join()
    assert (ran.loops, ran.passes) == (1, 0)


class Asks:
    """A streamer that asks the base between tokens."""

    def __init__(self, model, ids):
        self.model, self.ids = model, ids

    def put(self, _):
        with self.model.disable_adapter():
            self.model(self.ids)

    def end(self):
        pass


def test_a_streamer_may_use_the_model(folder, ran):
    model = peer.add_adapters(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    ids, options = prompts(1)["input_ids"], {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = model.generate(input_ids=ids, **options)
    assert torch.equal(model.generate(input_ids=ids, streamer=Asks(model, ids), **options), expected) and ran.loops == 2


def test_threads_with_adapters(folder):
    """One thread runs C++'s loop, the others transformers'; a switch of the adapter waits for it."""
    model = peer.add_adapters(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    given = [prompts(rows) for rows in (1, 2, 3, 4)]
    expected = [model.generate(**one, **options) for one in given]
    found = {}

    def run(row):
        for turn in range(5):
            found[row, turn] = model.generate(**given[row], **options)

    threads = [threading.Thread(target=run, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(torch.equal(tokens, expected[row]) for (row, _), tokens in found.items())


def test_a_switch_of_the_adapter_waits_for_the_loop(folder, ran):
    model = peer.add_adapters(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    ids, options = prompts(1)["input_ids"], {"max_new_tokens": 100, "do_sample": False, "eos_token_id": None}
    expected, found, began = model.generate(input_ids=ids, **options), [], threading.Event()

    class Begins(Heard):
        def put(self, value):
            if value.numel() == 1:
                began.set()

    thread = threading.Thread(target=lambda: found.append(model.generate(input_ids=ids, streamer=Begins(), **options)))
    thread.start()
    began.wait(60)
    engine_of(model.get_base_model()).show("", None)  # as a pass of the base does
    thread.join()
    assert torch.equal(found[0], expected) and ran.loops == 2


# --- beyond C++'s loop


class Bans(transformers.LogitsProcessor):
    """The even tokens."""

    def __call__(self, ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 0, -float("inf"))


class Stops(transformers.StoppingCriteria):
    def __call__(self, ids, scores, **_):
        return torch.full((ids.shape[0],), ids.shape[1] >= 13)


class Temperature(logits_process.TemperatureLogitsWarper):
    def __call__(self, ids, scores):
        return -scores


BEYOND = {
    "a processor of the user's": {"logits_processor": [Bans()]},
    "a subclass": {"logits_processor": [Temperature(0.5)]},
    "n-grams": {"no_repeat_ngram_size": 2},
    "suppressed tokens": {"suppress_tokens": list(range(40, 60))},
    "bad words": {"bad_words_ids": [[token] for token in range(40, 60)]},
    "a criterion of the user's": {"stopping_criteria": [Stops()]},
    "another penalty": {"logits_processor": [logits_process.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)]},
    "other ends": {"eos_token_id": [2], "logits_processor": [logits_process.MinLengthLogitsProcessor(30, list(range(20, 60)))]},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "max_time of rows": {"max_time": 600.0},
    "positions": {"position_ids": torch.arange(9).expand(3, 9) * 2, "attention_mask": torch.ones(3, 9)},
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_cpp_s_loop_does_not_know_runs_in_transformers(name, ours, theirs, ran):
    options = {**prompts(), "max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **BEYOND[name]}
    found = ours.generate(**options)
    assert ran.loops == 0 and torch.equal(found, theirs.generate(**options))
    if name == "a processor of the user's":
        assert (found[:, 9:] % 2 == 1).all()
    if name == "a criterion of the user's":
        assert found.shape[1] == 13


def test_outputs_and_streamers_of_rows_run_in_transformers(ours, theirs, ran):
    options = {**prompts(), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = ours.generate(**options, return_dict_in_generate=True, output_scores=True)
    assert len(found.scores) == 5 and torch.equal(found.sequences, theirs.generate(**options))
    heard = Heard()
    ours.generate(**options, streamer=heard)
    assert [len(one) for one in heard.put_in[:-1]] == [3] * 6 and ran.loops == 0 and ran.passes == 10


def test_a_replaced_forward_and_hooks_are_called_for_each_token(folder, ran):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {**prompts(), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected, seen = model.generate(**options), []
    assert ran.loops == 1
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model.generate(**options), expected) and len(seen) == 5
    handle.remove()
    plain = model.forward

    def forward(*args, **kwargs):
        seen.append(2)
        return plain(*args, **kwargs)

    model.forward = forward
    assert torch.equal(model.generate(**options), expected) and len(seen) == 10
    model.forward = plain
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**options)
    model.forward.engine.enabled = False
    assert torch.equal(model.generate(**options), expected)
    assert ran.loops == 1


def test_another_loop_of_the_class_runs(ours, monkeypatch, ran):
    plain, seen = transformers.GenerationMixin._sample, []

    def loop(self, *args, **kwargs):
        seen.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GenerationMixin, "_sample", loop)
    ours.generate(**prompts(), max_new_tokens=2, do_sample=False)
    assert seen == [ours] and ran.loops == 0


def test_rows_that_memory_may_not_hold_run_in_transformers(ours, theirs, monkeypatch):
    def refuses(*_, **__):
        raise ValueError("[generate] a row of 9 positions ...")

    monkeypatch.setattr(_C, "generate", refuses)
    options = {**prompts(), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(**options), theirs.generate(**options))


def test_copies_generate_by_themselves(ours, theirs, ran):
    options = {**prompts(), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(**options)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(made.generate(**options), expected) and ran.loops == 0
        with torch.no_grad():
            made.lm_head.weight.zero_()
        assert (made.generate(**options)[:, 9:] == 0).all()
    assert torch.equal(ours.generate(**options), expected) and ran.loops == 1


def test_generate_looks_as_transformers_does(ours):
    import inspect

    kind = transformers.LlamaForCausalLM
    assert type(ours) is kind and kind._sample is transformers.GenerationMixin._sample
    _, *others = inspect.signature(kind.generate).parameters
    assert list(inspect.signature(ours.generate).parameters) == others and ours.generate.__doc__ == kind.generate.__doc__
    with pytest.raises(ValueError, match="not used by the model"):
        ours.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, made_up=3)


def test_every_known_processor_is_translated_as_transformers_orders_it(ours, monkeypatch):
    """One call has them all, in the order in which transformers makes them."""
    seen = []
    plain = decoding.generated

    def generated(*args):
        seen.append([type(one) for one in args[3]])
        return plain(*args)

    monkeypatch.setattr(decoding, "generated", generated)
    ours.generate(
        **prompts(), do_sample=True, max_new_tokens=4, min_new_tokens=2, eos_token_id=2, pad_token_id=0, repetition_penalty=1.1,
        temperature=0.9, top_k=5, top_p=0.9, min_p=0.01,
    )  # fmt: skip
    assert seen == [list(decoding._KNOWN)]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_row_without_tokens_is_transformers(empty, ours, theirs):
    given = prompts()
    given["attention_mask"][empty] = 0
    options = {**given, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(**options), theirs.generate(**options))


def test_positions_of_another_length_are_transformers(ours, theirs):
    ids = prompts(1)["input_ids"][:, :6]
    options = {
        "attention_mask": torch.ones(1, 9, dtype=torch.long),
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
    }
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_a_streamer_has_the_caller_s_autocast(ours):
    class Asks(Heard):
        def put(self, value):
            self.put_in.append(torch.is_autocast_enabled("cpu"))

    for enabled in (True, False):
        heard = Asks()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours.generate(prompts(1)["input_ids"], streamer=heard, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert heard.put_in == [enabled] * 4 + ["end"]
