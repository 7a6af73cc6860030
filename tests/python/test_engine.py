# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own classes over the C++ engine: the engine's pass and transformers' forward give the same numbers."""

import copy
import gc
import logging
import threading
import weakref

import peft
import pytest
import qlorapp
import torch
import transformers
from engine_checks import (  # noqa: F401  (folder is a fixture)
    assert_same_pass,
    base,
    folder,
    load,
    losses_and_gradients,
    reasons,
    transformers_alone,
    with_lora,
)
from qlorapp import _C
from qlorapp.hf import passes as passes_of_the_engine
from qlorapp.hf.cache import CACHE, EngineCache
from tiny_llama import ragged_batch

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request):
    """As on a GPU, which computes while the modules are looked at; or not."""

    def switch(model):
        base(model).forward.engine.runs_ahead = request.param

    return switch


class TestModel:
    def test_it_is_transformers_own_class_over_linear4bit(self, folder):
        model = load(folder)
        assert type(model) is transformers.LlamaForCausalLM and isinstance(model, transformers.PreTrainedModel)
        linears = [m for m in model.modules() if isinstance(m, qlorapp.nn.Linear4bit)]
        assert len(linears) == 7 * model.config.num_hidden_layers
        assert all(p.device.type != "meta" for p in [*model.parameters(), *model.buffers()])
        assert not any(p.requires_grad for p in model.parameters()) and not model.training
        assert model.is_quantized and model.is_loaded_in_4bit

    def test_its_weights_are_those_of_the_engine(self, folder, model=None):
        model = model or load(folder)
        core = base(model).forward.engine.core
        for path, weight in core.named_weights():
            shown = model.get_parameter(path)
            theirs = weight if isinstance(weight, torch.Tensor) else weight.packed
            assert shown.data_ptr() == theirs.data_ptr(), path

    def test_layers_that_moved_to_the_host_are_followed(self, folder):
        model = load(folder)
        engine, before = base(model).forward.engine, {name: value.clone() for name, value in model.state_dict().items()}
        for to_host in (True, False, True):
            engine.core.move_blocks(to_host)
            engine.follow()
            self.test_its_weights_are_those_of_the_engine(folder, model)
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert_same_pass(with_lora(model), ragged_batch())

    def test_without_quantization_it_is_the_checkpoint(self, folder):
        model, theirs = load(folder, four_bit=False), transformers.AutoModelForCausalLM.from_pretrained(folder)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
        assert model.num_parameters() == theirs.num_parameters()

    def test_num_parameters_counts_elements(self, folder):
        assert load(folder).num_parameters() == load(folder, four_bit=False).num_parameters()

    def test_a_deleted_model_is_gone_without_a_collection(self, folder):
        gc.collect()
        gc.disable()
        try:
            model = load(folder, four_bit=False)
            gone = weakref.ref(base(model).forward.engine.core)
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7]]))
            del model
            assert gone() is None
        finally:
            gc.enable()

    def test_a_copy_has_weights_of_its_own(self, folder):
        model = with_lora(load(folder))
        copied = copy.deepcopy(model)
        batch = ragged_batch()
        torch.testing.assert_close(copied(**batch).loss, model(**batch).loss, rtol=1e-6, atol=1e-6)
        weight = copied.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        assert weight.weight.data_ptr() != model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data_ptr()


class TestPasses:
    @pytest.mark.parametrize("four_bit", [True, False])
    def test_ragged_rows(self, folder, four_bit):
        model = load(folder, four_bit)
        model.requires_grad_(False)
        assert_same_pass(with_lora(model), ragged_batch())

    def test_some_layers_with_other_ranks(self, folder):
        lora = {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 7},
                "alpha_pattern": {"down_proj": 3}, "use_rslora": True}  # fmt: skip
        assert_same_pass(with_lora(load(folder), **lora), ragged_batch())

    def test_num_items_in_batch_is_the_denominator(self, folder):
        assert_same_pass(with_lora(load(folder)), ragged_batch(), num_items_in_batch=torch.tensor(100))

    def test_packed_rows_by_position_ids(self, folder):
        batch = ragged_batch()
        ids, labels = batch["input_ids"][:1], batch["input_ids"][:1].clone()
        positions = torch.cat([torch.arange(5), torch.arange(12)])[None]
        labels[0, 5] = -100
        packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
        model = with_lora(load(folder))
        assert_same_pass(model, packed, use_cache=False)
        apart = model(**packed, use_cache=False).loss
        together = model(**packed).loss  # with a cache transformers does not look for packed rows
        assert len(reasons(model)) == 1 and abs(float(apart) - float(together)) > 1e-3

    def test_logits_to_keep(self, folder):
        model, batch = load(folder), ragged_batch()
        ids = batch["input_ids"]
        for keep in (1, 5, torch.tensor([0, 3, 16])):
            with torch.no_grad():
                mine = model(ids, logits_to_keep=keep).logits
                with transformers_alone(model):
                    torch.testing.assert_close(mine, model(ids, logits_to_keep=keep).logits, rtol=1e-4, atol=1e-4)

    def test_gradient_checkpointing(self, folder):
        model = with_lora(load(folder)).train()
        kept = losses_and_gradients(model, ragged_batch())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        again = losses_and_gradients(model, ragged_batch())
        assert base(model).forward.engine.core.segments[0][2] == "input_only" and not reasons(model)
        assert torch.equal(kept[0], again[0])
        for name in kept[2]:
            torch.testing.assert_close(kept[2][name], again[2][name], rtol=1e-6, atol=1e-7)

    def test_dropout_follows_torchs_seed(self, folder):
        model = with_lora(load(folder), lora_dropout=0.3).train()
        losses, batch = [], ragged_batch()
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            losses.append(float(model(**batch).loss))
        assert losses[0] == losses[1] != losses[2] and not reasons(model)

    def test_no_target_is_no_number_as_in_transformers(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        batch["labels"] = torch.full_like(batch["labels"], -100)
        assert torch.isnan(model(**batch).loss)

    def test_logits_are_made_when_they_are_read(self, folder):
        output = with_lora(load(folder))(**ragged_batch())
        assert isinstance(output, transformers.modeling_outputs.CausalLMOutputWithPast)
        assert output["loss"] is output.loss and output[0] is output.loss and "logits" in output
        assert output.__dict__["_make_logits"] is not None
        assert list(output) == ["loss", "logits"] and output[1] is output.logits
        again = with_lora(load(folder))(**ragged_batch(), return_dict=False)
        assert isinstance(again, tuple) and len(again) == 2


CHANGES = {
    "hook": lambda m: base(m).model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5),
    "hook under an adapter": lambda m: base(m).model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: a[2] * 2),
    "module": lambda m: setattr(base(m).model, "norm", torch.nn.LayerNorm(64)),
    "forward": lambda m: setattr(base(m).model.layers[0].mlp, "forward", lambda x: x * 0.5),
    "memory": lambda m: setattr(base(m).model.norm.weight, "data", base(m).model.norm.weight.data * 2),
    "trainable base": lambda m: base(m).model.norm.weight.requires_grad_(True),
}  # fmt: skip


class TestSwitch:
    """What the engine does not compute is computed by transformers, and the reason logged once."""

    @pytest.mark.parametrize("case", CHANGES)
    def test_a_change_is_seen(self, folder, case, caplog, ahead):
        model, batch = with_lora(load(folder)), ragged_batch()
        ahead(model)
        before = float(model(**batch).loss)
        assert not reasons(model)
        with caplog.at_level(logging.INFO, logger="qlorapp"):
            CHANGES[case](model)
            after = model(**batch).loss
            model(**batch)
        assert len(reasons(model)) == 1 and caplog.text.count("transformers' forward computes this model") == 1
        with transformers_alone(model):
            torch.testing.assert_close(after, model(**batch).loss, rtol=0, atol=0)
        assert case in ("trainable base",) or float(after) != before

    def test_edited_values_are_the_engines(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        before = float(model(**batch).loss)
        with torch.no_grad():
            base(model).model.norm.weight.mul_(2)
        assert float(model(**batch).loss) != before
        assert_same_pass(model, batch)

    def test_output_hidden_states_and_back(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        output = model(**batch, output_hidden_states=True)
        assert len(output.hidden_states) == 4 and len(reasons(model)) == 1
        assert_same_pass(model, batch)  # transformers' recording hooks stay, and stop nothing

    def test_inputs_embeds_and_prompt_tuning(self, folder):
        model, batch = load(folder), ragged_batch()
        embeds = model.get_input_embeddings()(batch["input_ids"])
        output = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], labels=batch["labels"])
        torch.testing.assert_close(output.loss, model(**batch).loss, rtol=1e-5, atol=1e-5)
        prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        tuned = peft.get_peft_model(load(folder), prompt)
        tuned(**batch).loss.backward()
        assert tuned.prompt_encoder["default"].embedding.weight.grad.abs().sum() > 0

    @pytest.mark.parametrize("lora", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True}], ids=str)
    def test_other_adapters_train(self, folder, lora):
        model, batch = with_lora(load(folder), **lora), ragged_batch()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        losses = []
        for _ in range(4):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[-1] < losses[0] - 0.05

    def test_adapters_in_16_bits_become_float32(self, folder, caplog):
        """TRL rounds the adapters of four-bit models. Gradients that exist stay."""
        caplog.set_level("INFO", "qlorapp")
        model, batch = with_lora(load(folder)), ragged_batch()
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.bfloat16()
            parameter.grad = torch.ones_like(parameter)
        rounded = [p.detach().float() for p in trained]
        model(**batch).loss.backward()
        assert not reasons(model) and caplog.text.count("the adapter is in float32 from now on") == 1
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in trained)
        assert all(torch.equal(p, value) for p, value in zip(trained, rounded, strict=True))
        grown = [p.grad - 1 for p in trained]
        assert_same_pass(model, batch)
        model.zero_grad()
        model(**batch).loss.backward()
        for value, parameter in zip(grown, trained, strict=True):
            torch.testing.assert_close(value, parameter.grad, rtol=0, atol=1e-6)

    def test_autocast_to_another_dtype(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        assert len(reasons(model)) == 1
        torch.testing.assert_close(loss.float(), model(**batch).loss, rtol=3e-2, atol=3e-2)

    def test_torch_compile(self, folder):
        model, batch = load(folder), ragged_batch()
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss, rtol=1e-5, atol=1e-5)

    def test_a_reference_pass_without_adapters_is_computed_once(self, folder, monkeypatch):
        model, batch, computed = with_lora(load(folder)), ragged_batch(), []
        plain = passes_of_the_engine.whole
        monkeypatch.setattr(passes_of_the_engine, "whole", lambda *args: computed.append(plain(*args)) or computed[-1])
        engine = base(model).forward.engine
        engine.runs_ahead = True
        for _ in range(3):
            model(**batch)
            with torch.no_grad(), model.disable_adapter():
                model(**batch)
        assert len(computed) == 6 and not reasons(model)


@pytest.fixture
def passes(monkeypatch):
    """Counts the cached passes that C++ computes."""
    counts = {"cached": 0}
    plain = EngineCache.forward

    def counted(self, *args):
        counts["cached"] += 1
        return plain(self, *args)

    loop = _C.generate

    def generate(*args, **kwargs):
        rows = loop(*args, **kwargs)
        counts["cached"] += max(map(len, rows))
        return rows

    monkeypatch.setattr(EngineCache, "forward", counted)
    monkeypatch.setattr(_C, "generate", generate)  # a pass per token of its longest row
    return counts


GENERATE = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "returned": {"do_sample": True, "num_return_sequences": 2},
    "processor": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "scores": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
}  # fmt: skip


class TestGenerate:
    def prompts(self):
        batch = ragged_batch()
        ids, mask = batch["input_ids"][:2, :9].clone(), torch.ones(2, 9, dtype=torch.long)
        mask[1, :3], ids[1, :3] = 0, 0
        return {"input_ids": ids, "attention_mask": mask}

    @pytest.mark.parametrize("case", GENERATE)
    def test_the_engine_generates_what_transformers_does(self, folder, case, passes):
        model = with_lora(load(folder)).eval()
        results = []
        for alone in (False, True):
            torch.manual_seed(7)
            options = dict(**self.prompts(), max_new_tokens=12, pad_token_id=0, eos_token_id=None, **GENERATE[case])
            if alone:
                with transformers_alone(model):
                    results.append(model.generate(**options))
            else:
                results.append(model.generate(**options))
        assert passes["cached"] == 12
        mine, theirs = (getattr(r, "sequences", r) for r in results)
        assert torch.equal(mine, theirs)
        if case == "scores":
            for a, b in zip(results[0].scores, results[1].scores, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    def test_assisted(self, folder):
        model = with_lora(load(folder)).eval()
        ids = self.prompts()["input_ids"][:1]
        plain = model.generate(ids, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
        assert torch.equal(
            model.generate(ids, max_new_tokens=10, eos_token_id=None, pad_token_id=0, prompt_lookup_num_tokens=3), plain
        )
        helper = load(folder)  # drafts with a cache of its own
        assert torch.equal(
            model.generate(ids, max_new_tokens=10, eos_token_id=None, pad_token_id=0, assistant_model=helper), plain
        )

    def test_a_cache_of_generate_goes_on(self, folder, passes):
        """In the output under transformers' name of it, and back as an argument."""
        model, ids = load(folder), self.prompts()["input_ids"][:1]
        options = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        whole = model.generate(ids, max_new_tokens=8, **options)
        half = model.generate(ids, max_new_tokens=4, **options)
        more = model.generate(half.sequences, max_new_tokens=4, **{CACHE: getattr(half, CACHE)}, **options)
        assert torch.equal(more.sequences, whole.sequences) and passes["cached"] == 16 and not reasons(model)

    def test_a_copied_or_rebuilt_output_keeps_the_cache(self, folder):
        model, ids = load(folder), self.prompts()["input_ids"][:1]
        with torch.no_grad():
            output = model(ids, use_cache=True)
        values, how = torch.utils._pytree.tree_flatten(output)
        for again in (copy.copy(output), torch.utils._pytree.tree_unflatten(values, how), type(output)(dict(output))):
            assert getattr(again, CACHE) is getattr(output, CACHE) and torch.equal(again.logits, output.logits)
            assert list(again.keys()) == list(output.keys()) == ["logits", CACHE]

    def test_a_streamer_and_criteria(self, folder):
        model, ids = load(folder), self.prompts()["input_ids"][:1]

        class Heard:
            def __init__(self):
                self.tokens = []

            def put(self, value):
                self.tokens += value.flatten().tolist()

            def end(self):
                self.tokens.append("end")

        heard = Heard()
        out = model.generate(ids, max_new_tokens=5, eos_token_id=None, pad_token_id=0, streamer=heard)
        assert heard.tokens == [*out[0].tolist(), "end"]

    def test_a_loop_by_hand_over_the_cache(self, folder, passes):
        model, ids = load(folder), self.prompts()["input_ids"][:1]
        expected = model.generate(ids, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
        tokens, past, new = ids, None, ids
        with torch.no_grad():
            for _ in range(6):
                output = model(new, past_key_values=past, use_cache=True)
                past, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, new], 1)
        assert torch.equal(tokens, expected) and passes["cached"] == 12

    def test_a_change_in_the_middle_goes_on_by_transformers(self, folder, ahead):
        model, prompts = load(folder), self.prompts()
        ahead(model)
        whole = model.generate(**prompts, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            output = model(**prompts, use_cache=True)
            model.model.layers[0].register_forward_hook(lambda *a: None)
            new = output.logits[:, -1:].argmax(-1)
            mask = torch.cat([prompts["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            positions = (mask.cumsum(-1) - 1)[:, -1:]
            after = model(new, attention_mask=mask, position_ids=positions, past_key_values=output.past_key_values)
        assert torch.equal(after.logits[:, -1].argmax(-1), whole[:, 10])

    def test_another_adapter_in_the_middle(self, folder, ahead):
        model, ids = with_lora(load(folder)), self.prompts()["input_ids"][:1]
        ahead(model)
        with torch.no_grad():
            past = model(ids, use_cache=True).past_key_values
            with model.disable_adapter():
                base_alone = model(ids[:, :1], past_key_values=past).logits
            past.crop(-1)
            adapted = model(ids[:, :1], past_key_values=past).logits
            assert past.get_seq_length() == ids.shape[1] + 1 and not reasons(model)
            with transformers_alone(model):
                past = model(ids, use_cache=True).past_key_values
                torch.testing.assert_close(adapted, model(ids[:, :1], past_key_values=past).logits)
        assert not torch.equal(adapted, base_alone)

    def test_modules_are_checked_once_per_call(self, folder):
        model = with_lora(load(folder))
        engine = base(model).forward.engine
        for options, expected in (({}, 2), ({"return_dict_in_generate": True}, 7)):  # a returned cache outlives the call
            before = engine.checks
            model.generate(**self.prompts(), max_new_tokens=6, eos_token_id=None, pad_token_id=0, **options)
            assert engine.checks - before == expected and not reasons(model)

    @pytest.mark.parametrize("change", ["off", "another pass"])
    def test_a_change_between_tokens_of_a_call(self, folder, ahead, change):
        model = with_lora(load(folder))
        ahead(model)
        prompts = self.prompts()

        class Changes(transformers.LogitsProcessor):
            def __call__(self, ids, scores):
                if ids.shape[1] == prompts["input_ids"].shape[1] + 2:
                    if change == "off":
                        model.disable_adapter_layers()
                    else:
                        with model.disable_adapter():
                            model(ids)
                return scores

        def generated():
            found = model.generate(**prompts, max_new_tokens=8, eos_token_id=None, pad_token_id=0, logits_processor=[Changes()])
            model.enable_adapter_layers()
            return found

        found = generated()
        assert not reasons(model)
        with transformers_alone(model):
            assert torch.equal(found, generated())

    def test_threads(self, folder):
        """Two texts at once do not mix: each has its own cache."""
        model, ids = load(folder), self.prompts()["input_ids"][:1]
        alone = [model.generate(ids + k, max_new_tokens=6, eos_token_id=None, pad_token_id=0) for k in range(2)]
        found = [None, None]

        def run(k):
            found[k] = model.generate(ids + k, max_new_tokens=6, eos_token_id=None, pad_token_id=0)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
