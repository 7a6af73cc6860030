# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT in the engine's arena, and the backbone that other heads and losses call."""

import contextlib

import peft
import pytest
import qlorapp
import torch
import transformers
from engine_checks import (
    assert_same_pass_value,
    base,
    folder,  # noqa: F401  (a fixture)
    graph_of,
    load,
    losses_and_gradients,
    reasons,
    transformers_alone,
    with_lora,
)
from tiny_llama import ragged_batch

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


class TestBackbone:
    def test_hidden_states_and_gradients_are_transformers(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        del batch["labels"]
        weight = torch.randn(3, 17, 64)
        found = []
        for off in (False, True):
            base(model).forward.engine.enabled = not off
            model.zero_grad()
            hidden = base(model).model(**batch, use_cache=False).last_hidden_state * batch["attention_mask"][..., None]
            (hidden * weight).sum().backward()
            found.append([hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert not reasons(model) and len(found[0]) > 8
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=4e-5)  # sums of 51 products of about 1, in another order

    def test_a_changed_head_leaves_the_backbone_to_the_engine(self, folder):
        """transformers' forward calls it; so do losses of others over the head."""
        model, batch, calls = with_lora(load(folder)), ragged_batch(), []
        plain = model(**batch).loss
        base(model).lm_head.register_forward_hook(lambda *given: calls.append(1))
        hooked = model(**batch).loss
        assert calls and reasons(model) == {"lm_head has hooks"} and "SegmentFunction" in graph_of(hooked)
        torch.testing.assert_close(hooked, plain)
        with transformers_alone(model):
            alone = model(**batch).loss
        assert "SegmentFunction" not in graph_of(alone)
        torch.testing.assert_close(hooked, alone)


class TestAdapters:
    def test_gradients_of_passes_before_the_engines_first_stay(self, folder):
        found = []
        for first_by_engine in (False, True):
            model, batch = with_lora(load(folder)), ragged_batch()
            with contextlib.nullcontext() if first_by_engine else transformers_alone(model):
                model(**batch).loss.backward()
            model(**batch).loss.backward()
            found.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)

    def test_parameters_live_in_the_arena_and_optimizers_keep_them(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.5)  # before the engine has seen the adapter
        values = [p.detach().clone() for p in parameters]
        first = model(**batch).loss
        assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(model(**batch).loss) < float(first)
        core = base(model).forward.engine.core
        held = {p.data_ptr() for p in core.parameters(core.active_adapter)}
        assert {p.data_ptr() for p in parameters} == held and not reasons(model)

    def test_disabled_adapters_are_the_base(self, folder):
        plain, batch = load(folder)(**ragged_batch()).loss, ragged_batch()
        model = with_lora(load(folder))
        other = model(**batch).loss
        with model.disable_adapter():
            assert torch.equal(model(**batch).loss, plain)
        assert torch.equal(model(**batch).loss, other) and not reasons(model)

    def test_several_adapters_take_turns(self, folder):
        model, batch = with_lora(load(folder)), ragged_batch()
        first = model(**batch).loss
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        model.set_adapter("other")
        assert_same_pass_value(model, batch)
        model.set_adapter("default")
        assert torch.equal(model(**batch).loss, first) and not reasons(model)
        model.base_model.set_adapter(["default", "other"])
        model(**batch)
        assert reasons(model) == {"several adapters are active"}
        model.delete_adapter("other")
        model.set_adapter("default")
        assert torch.equal(model(**batch).loss, first)

    def test_backward_computes_with_the_adapters_of_its_forward(self, folder):
        """A reference model's pass comes between them in preference training: the base's, or another adapter's."""
        model, batch = with_lora(load(folder)), ragged_batch()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        _, _, alone = losses_and_gradients(model, batch)
        for between in ("base", "other"):
            model.zero_grad()
            loss = model(**batch).loss
            with torch.no_grad():
                if between == "base":
                    with model.disable_adapter():
                        model(**batch)
                else:
                    model.set_adapter("other")
                    model(**batch)
                    model.set_adapter("default")
            loss.backward()
            for name, parameter in model.named_parameters():
                if name in alone:
                    assert torch.equal(parameter.grad, alone[name])
                else:
                    assert parameter.grad is None or not parameter.grad.any()
        assert not reasons(model)

    def test_loaded_values_are_computed(self, folder, tmp_path):
        model, batch = with_lora(load(folder)), ragged_batch()
        loss = model(**batch).loss
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(load(folder), tmp_path, is_trainable=True)
        torch.testing.assert_close(again(**batch).loss, loss, rtol=0, atol=0)
        assert not reasons(again)

    @pytest.mark.parametrize("four_bit", [True, False])
    def test_merge_and_take_back(self, folder, four_bit):
        model, batch = load(folder, four_bit), ragged_batch()
        model.requires_grad_(False)
        model = qlorapp.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        loss = model(**batch).loss.detach()
        before = {n: t.clone() for n, t in model.state_dict().items()}
        model.merge_adapter(safe_merge=True)
        merged = model(**batch).loss.detach()
        assert abs(float(merged) - float(loss)) < (0.5 if four_bit else 1e-4)
        model.unmerge_adapter()
        if four_bit:
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, before[name]), name
        torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-5, atol=1e-5)
        plain = model.merge_and_unload()
        assert type(plain) is transformers.LlamaForCausalLM
        torch.testing.assert_close(plain(**batch).loss, merged, rtol=1e-5, atol=1e-5)
