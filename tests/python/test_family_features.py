# SPDX-License-Identifier: Apache-2.0
"""Features of the library over one model of each family: each beside an oracle or the same run without it. docs/families.md lists them."""

import json

import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT
from engine_checks import base, losses_and_gradients, reasons, with_lora
from families import FAMILIES, FIRST, batch, relative
from family_runs import RANK_STEPS, engine, options_json, rows, same_bits, train
from qlorapp import _C
from qlorapp.hf.training_arguments import for_cpp
from safetensors.torch import load_file
from test_data_parallel import forked


@pytest.fixture(scope="module", params=FIRST)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    peer.write_llama(path, **FAMILIES[request.param])
    return path


@pytest.fixture
def data(tmp_path):
    return rows(tmp_path)


@pytest.mark.feature("plan")
def test_a_plan_from_the_config_is_that_of_the_loaded_model_and_of_a_step(folder):
    args = qlorapp.TrainingArguments(use_cpu=True, per_device_train_batch_size=4, report_to="none")
    lora = qlorapp.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    given = {"args": args, "max_seq_length": 24}
    by_config = qlorapp.plan(folder, lora_config=lora, gpu="cpu", dtype="float32", **given)
    by_model = qlorapp.plan(engine(folder), measure=True, **given)
    assert str(by_model) == str(by_config)
    planned = max(phase["allocated"] for name, phase in by_model.phases.items() if name not in ("load", "merge"))
    assert by_model.measured == pytest.approx(planned, rel=0.02)


@pytest.mark.feature("memory_budget")
def test_a_run_in_less_memory_stays_within_it_and_has_the_same_bits(folder, data, tmp_path):
    plain = train(folder, data, tmp_path)
    phases = _C.plan_model(engine(folder), options_json(tmp_path, max_length=24)).phases
    peak = max(phase["reserved"] for name, phase in phases.items() if name not in ("load", "merge"))
    budget = int(0.9 * peak)
    tight = train(folder, data, tmp_path, memory_budget=str(budget))
    assert same_bits(tight, plain)
    chosen = tight[0].args
    assert chosen.checkpoint_keep != plain[0].args.checkpoint_keep
    model = base(tight[0].model).forward.engine.core
    plan = _C.plan_model(model, json.dumps({**json.loads(for_cpp(chosen)), "memory_budget": "", "max_length": 24}))
    plan.measure(model)
    assert plan.measured <= budget


@pytest.mark.feature("find_max_batch_size")
def test_the_largest_batch_fits_and_one_more_row_does_not(folder, capsys):
    model = engine(folder)
    budget = qlorapp.plan(model, batch=5, max_seq_length=24).peak_reserved
    assert qlorapp.find_max_batch_size(model, max_seq_length=24, budget=budget) == 5
    assert "Batch size 5: OK\n" in capsys.readouterr().out  # a step took no more


@pytest.mark.feature("resume")
def test_a_run_that_continues_ends_in_the_same_bits(folder, data, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(folder, data, tmp_path / "whole", dropout=0.1, **options)
    resumed = {"resume_from": str(tmp_path / "whole/checkpoint-2"), **options}
    again = train(folder, data, tmp_path / "again", dropout=0.1, seed=2, **resumed)
    assert all(torch.equal(again[2][name], tensor) for name, tensor in whole[2].items())
    ours, theirs = (torch.load(tmp_path / run / "checkpoint-4/optimizer.pt")["state"] for run in ("again", "whole"))
    assert all(torch.equal(ours[i][name], moment) for i, state in theirs.items() for name, moment in state.items())


@pytest.mark.feature("full_determinism")
def test_a_run_with_dropout_repeats_its_bits(folder, data, tmp_path):
    first, again = (train(folder, data, tmp_path, dropout=0.1, full_determinism=True) for _ in range(2))
    assert same_bits(first, again)
    assert same_bits(first, train(folder, data, tmp_path, dropout=0.1))
    assert not same_bits(first, train(folder, data, tmp_path, dropout=0.2, full_determinism=True))


# --- eight bits

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: Weights that are multiplied as one: they share a scale.
STACKS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


def rounded(x, largest):
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (x / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale


def rounds_rows(_, inputs):
    """A hook. The gradient passes as it is."""
    (x,) = inputs
    return x + (rounded(x, x.abs().amax(-1, keepdim=True)) - x).detach()


def in_eight_bits(model):
    """Rounds the operands of the frozen products of a float model, as torch rounds."""
    for parent in model.modules():
        linears = {name: child.base_layer for name, child in parent.named_children() if hasattr(child, "base_layer")}
        stacks = [stack for stack in STACKS if linears.keys() >= set(stack)]
        for stack in stacks + [[name] for name in linears if not any(name in stack for stack in stacks)]:
            largest = torch.stack([linears[name].weight.abs().max() for name in stack]).max()
            for name in stack:
                linears[name].weight.data = rounded(linears[name].weight.data, largest)
                linears[name].register_forward_pre_hook(rounds_rows)
    return model


@pytest.fixture
def wide(request, tmp_path):
    """A folder whose weights' sizes are multiples of 64."""
    peer.write_llama(tmp_path / "wide", **{**FAMILIES[request.node.callspec.params["folder"]], "num_key_value_heads": 4})
    return tmp_path / "wide"


@pytest.mark.feature("fp8")
@pytest.mark.usefixtures("folder")
def test_products_in_eight_bits_are_those_of_operands_that_torch_rounded(wide, tmp_path):
    model = engine(wide)
    model.save(str(wide), str(tmp_path / "codes"))
    model.save_adapter(str(tmp_path / "adapter"), "base")
    given = {name: tensor.repeat(2, 1) for name, tensor in batch().items()}  # fewer tokens are multiplied in full
    rows = model.unpad(given["input_ids"], given["attention_mask"], given["labels"])

    def states_and_gradient():
        model.zero_grad()
        _, count = model.forward_backward(rows, torch.ones(()))
        gradient = {name: model.gradient(i) / count for i, name in enumerate(model.adapter_names())}
        return model.hidden_states(rows, training=True).detach(), gradient

    plain, _ = states_and_gradient()
    _C.StepRunner(model, options_json(tmp_path, fp8=True))  # sets the model up
    ours, gradient = states_and_gradient()
    theirs = peft.PeftModel.from_pretrained(
        peer.load_4bit(tmp_path / "codes").dequantize(), tmp_path / "adapter", is_trainable=True
    )
    output = in_eight_bits(theirs)(**given, output_hidden_states=True)
    output.loss.backward()
    expected = output.hidden_states[-1][given["attention_mask"] == 1].detach()
    assert relative(ours, expected) <= 0.25 * relative(ours, plain)  # last bits may be rounded to the other side
    named = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    flat, reference = (torch.cat([one[name].flatten() for name in gradient]) for one in (gradient, named))
    assert relative(flat, reference) <= 0.1  # C++ rounds gradients of outputs, too


# --- two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes trained, for all families: family_runs.as_rank."""
    root = tmp_path_factory.mktemp("ranks")
    for i, case in enumerate(FIRST):
        peer.write_llama(root / str(i), **FAMILIES[case])
        (root / str(i) / "rows.json").write_text(json.dumps(rows(root / str(i), 16)))
    forked(2, ROOT / "tests/python/family_runs.py", root)
    losses = json.loads((root / "losses.json").read_text())

    def of(case, kind):
        name = str(FIRST.index(case))
        return root / name, losses[f"{name} {kind}"], load_file(root / name / f"{kind}.safetensors")

    return of


@pytest.mark.feature("ranks")
@pytest.mark.parametrize("case", FIRST)
def test_two_processes_train_what_one_trains_with_twice_the_accumulation(ranks, case, tmp_path):
    folder, loss, found = ranks(case, "whole")
    data = json.loads((folder / "rows.json").read_text())
    _, expected, reference = train(folder, data, tmp_path, gradient_accumulation_steps=2, **RANK_STEPS)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, tensor in reference.items():
        assert relative(found[name], tensor) <= 1e-4, name


@pytest.mark.feature("base_sharding")
@pytest.mark.parametrize("case", FIRST)
def test_a_base_that_is_divided_trains_the_bits_of_a_whole_one(ranks, case):
    assert same_bits(ranks(case, "divided"), ranks(case, "whole"))


# --- the modules


@pytest.mark.feature("inject")
def test_transformers_own_code_over_the_same_layers_has_the_engines_loss_and_gradients(folder):
    options = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = with_lora(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=options))
    loss, _, gradients = losses_and_gradients(model, batch())
    assert not reasons(model), "the engine did not compute"
    base(model).model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    loss_2, _, gradients_2 = losses_and_gradients(model, batch())
    assert reasons(model), "the engine has computed a model with a hook"
    torch.testing.assert_close(loss, loss_2, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == gradients_2.keys() != set()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, gradients_2[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert isinstance(base(model), getattr(transformers, type(base(model)).__name__))
