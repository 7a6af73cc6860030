# SPDX-License-Identifier: Apache-2.0
"""Each family that C++ computes, beside transformers and PEFT: checkpoints that transformers wrote, with random but lively weights."""

import re

import peer
import pytest
import torch
import transformers

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from engine_checks import assert_same_pass, base, losses_and_gradients, with_lora
from families import FAMILIES, FIRST, architecture, batch, relative
from qlorapp import _C


def test_every_native_family_is_here():
    assert {architecture(case) for case in FIRST} == set(_C.native_architectures())
    assert len(FIRST) == len(_C.native_architectures())


@pytest.fixture(scope="module", params=FAMILIES)
def root(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    peer.write_llama(path / "float", **FAMILIES[request.param])
    return path


@pytest.mark.feature("train")
@pytest.mark.parametrize("four_bit", [False, True])
def test_loss_logits_and_gradients_are_those_of_transformers_and_peft(root, four_bit):
    options = (
        {"quantization_config": qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")} if four_bit else {}
    )
    model = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32, **options)
    assert hasattr(base(model).forward, "engine"), "C++ does not compute it"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32).eval()
    if not four_bit:
        with torch.no_grad():
            ours, expected = (m(**batch()).logits[batch()["attention_mask"] == 1] for m in (model, theirs))
        assert relative(ours, expected) <= 1e-5
    assert_same_pass(with_lora(model), batch())


@pytest.mark.feature("checkpoint_keep")
def test_every_way_to_keep_activations_gives_the_same_bits(root, monkeypatch):
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        root / "float", dtype=torch.float32, quantization_config=qlorapp.BitsAndBytesConfig(**options)
    )
    model = with_lora(model, lora_dropout=0.1).train()
    engine = base(model).forward.engine
    monkeypatch.setattr(engine, "keep", lambda keep: None)  # which transformers' flags choose otherwise

    def gradients(keep, tile_rows=0):
        engine.core.set_keep(keep)
        engine.core.set_memory(mlp_tile_rows=tile_rows)
        torch.manual_seed(3)
        return losses_and_gradients(model, batch())[2]

    everything = gradients("everything")
    for keep in ("attention_only", "input_only", "every:2", "input_only:1,everything"):
        other = gradients(keep)
        assert all(torch.equal(everything[name], tensor) for name, tensor in other.items()), keep
    for name, tensor in gradients("input_only", 16).items():  # a sum over rows, tile by tile
        torch.testing.assert_close(tensor, everything[name], rtol=2e-4, atol=1e-6)


@pytest.mark.feature("generate")
def test_a_cache_gives_the_tokens_of_transformers(root):
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32).eval()
    prompts = torch.arange(3, 19).view(2, 8)
    wanted = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(prompts, **wanted).tolist() == theirs.generate(prompts, **wanted).tolist()


# --- one case of each architecture: options of a row are in its config, which these copy


@pytest.mark.feature("quantize")
@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_a_folder_in_four_bits_goes_both_ways(root):
    qlorapp.quantize_checkpoint(str(root / "float"), str(root / "ours"), compute_dtype=torch.float32)
    peer.load_4bit(root / "float").save_pretrained(root / "theirs")
    for name in ("ours", "theirs"):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        present = batch()["attention_mask"] == 1
        with torch.no_grad():
            ours, expected = (m(**batch()).logits[present] for m in (model, peer.load_4bit(root / name)))
        assert relative(ours, expected) <= 1e-5, name


@pytest.mark.feature("merge")
@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_merging_is_pefts(root):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    theirs = peer.add_adapters(theirs)
    theirs.save_pretrained(root / "adapter")
    qlorapp.merge(root / "float", root / "adapter", root / "merged", dtype="float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32).state_dict()
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    ours = peft.PeftModel.from_pretrained(ours, root / "adapter")
    again = qlorapp.AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert relative(ours(**batch()).logits, again(**batch()).logits) <= 1e-5


STEPS, RATE = 20, 1e-3


@pytest.fixture(scope="module")
def run(root):
    """The command's run over a folder in four bits, and the losses and the model of the same run by transformers, PEFT and bitsandbytes."""
    model = peer.load_4bit(root / "float")
    model.save_pretrained(root / "codes")
    model = peer.add_adapters(model)
    model.save_pretrained(root / "first")
    rows = peer.write_rows(root / "rows.jsonl", 3 * STEPS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        loss = model(**peer.collate(rows[3 * step : 3 * step + 3])).loss
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    peer.run_cli(
        "train", "--defaults", "trainer", "--model", root / "codes", "--data", root / "rows.jsonl", "--output", root / "run",
        "--init_adapter", root / "first", "--max_steps", STEPS, "--per_device_train_batch_size", 3, "--learning_rate", RATE,
        "--weight_decay", 0, "--max_grad_norm", 0, "--lr_scheduler_type", "constant", "--train_sampling_strategy", "sequential",
        "--logging_steps", 1, "--save_strategy", "no", "--dtype", "float32",
    )  # fmt: skip
    return root / "run", expected, model


@pytest.mark.feature("train")
@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_twenty_steps_are_those_of_transformers_peft_and_bitsandbytes(run):
    folder, expected, _ = run
    assert [entry["loss"] for entry in peer.history(folder)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.feature("eval")
@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_an_evaluation_has_the_loss_of_transformers_peft_and_bitsandbytes(root, run):
    folder, _, model = run
    batch = peer.collate(peer.write_rows(root / "eval.jsonl", 8, seed=11))
    with torch.no_grad():
        expected = model(**batch).loss.item()
    said = peer.run_cli(
        "eval", "--model", root / "codes", "--adapter", folder, "--data", root / "eval.jsonl", "--dtype", "float32"
    ).stdout
    assert float(re.search(r"eval_loss ([0-9.]+)", said)[1]) == pytest.approx(expected, abs=2e-4)


@pytest.mark.feature("inspect")
@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_base_and_adapter_are_counted_and_verified_and_say_what_loads_them(root, run):
    said = " ".join(peer.run_cli("inspect", root / "codes").stdout.split())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float")
    assert f"architecture {theirs.config.model_type} " in said and f"parameters {theirs.num_parameters()} " in said
    assert "loads in: qlorapp train, eval, generate, merge and quantize --model" in said
    said = " ".join(peer.run_cli("inspect", run[0]).stdout.split())
    assert f"{run[0]}: output folder of a run, whole" in said and "adapter whole" in said
    assert "loads in: qlorapp eval, generate and merge --adapter loads in: qlorapp train --init_adapter" in said
