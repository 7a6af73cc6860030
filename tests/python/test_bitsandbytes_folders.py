# SPDX-License-Identifier: Apache-2.0
"""Folders that transformers saved of a model quantized by bitsandbytes: loaded, trained on, and written back; folders written here
load there; damaged ones are named."""

import json

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import qlorapp
import transformers
from qlorapp.hf.forward import engine_of
from safetensors.torch import load_file, save_file

KINDS = {
    "nested": {},
    "plain": {"bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "two modules skipped": {"llm_int8_skip_modules": ["lm_head", "down_proj", "model.layers.1.self_attn.q_proj"]},
    **{f"stored as {name}": {"bnb_4bit_quant_storage": name} for name in ("int8", "bfloat16", "float64")},
}
IDS = torch.arange(3, 51).view(2, 24)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_alike(ours, theirs):
    expected = logits(theirs)
    assert (logits(ours) - expected).abs().max() <= 1e-5 * expected.abs().max()


def tensors(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same_bytes(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype in (value.dtype, torch.uint8), name  # codes are written as bytes, whatever they were stored as
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


CASES = [*((kind, False) for kind in KINDS), ("nested", True)]


@pytest.mark.parametrize(("kind", "tied"), CASES, ids=[f"{kind}{', tied' * tied}" for kind, tied in CASES])
def test_a_folder_that_transformers_saved_loads_trains_and_is_written_back_with_every_byte(tmp_path, kind, tied):
    peer.write_llama(tmp_path / "float", tie_word_embeddings=tied)
    theirs = peer.load_4bit(tmp_path / "float", **KINDS[kind])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB" if kind == "nested" else "5GB")
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert engine_of(ours) is not None
    assert_alike(ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    assert_same_bytes(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    assert_alike(peer.load_4bit(tmp_path / "ours"), theirs)

    config = qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = qlorapp.get_peft_model(ours, config).train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = trained(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0] and not engine_of(ours)._told
    trained.unload().save_pretrained(tmp_path / "after")  # adapters have changed nothing of it
    assert_same_bytes(tensors(tmp_path / "after"), tensors(tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["nested", "plain", "fp4", "two modules skipped"])
def test_what_we_quantize_and_save_is_what_transformers_saves_and_loads_there(tmp_path, kind):
    peer.write_llama(tmp_path / "float")
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}  # fmt: skip
    options = qlorapp.BitsAndBytesConfig(**{**wanted, **KINDS[kind]})
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=options, dtype=torch.float32)
    ours.save_pretrained(tmp_path / "ours")
    peer.load_4bit(tmp_path / "float", **KINDS[kind]).save_pretrained(tmp_path / "theirs")
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert configs[0] == configs[1]
    mine, other = (tensors(tmp_path / side) for side in ("ours", "theirs"))
    assert mine.keys() == other.keys()
    assert all(
        torch.equal(mine[name], value)
        for name, value in other.items()
        if value.dtype == torch.uint8 and name.endswith("weight")
    )
    assert_alike(ours, peer.load_4bit(tmp_path / "ours"))
    assert_alike(qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32), ours)


@pytest.mark.parametrize("damage", ["absmax", "quant_state.bitsandbytes__nf4", "weight", "norm"])
def test_a_damaged_folder_names_the_file_or_folder_and_the_tensor(tmp_path, damage):
    peer.write_llama(tmp_path / "float")
    peer.load_4bit(tmp_path / "float").save_pretrained(tmp_path / "codes")
    path = tmp_path / "codes" / "model.safetensors"
    held = load_file(path)
    name = next(name for name in held if name.endswith({"norm": "norm.weight", "weight": "up_proj.weight"}.get(damage, damage)))
    if damage == "norm":
        del held[name]
    else:
        held[name] = held[name][:-1].clone()
    save_file(held, path, {"format": "pt"})
    with pytest.raises(qlorapp.FormatError) as told:
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    assert str(tmp_path / "codes") in str(told.value) and name in str(told.value)


def test_a_model_of_another_dtype_says_so_in_its_config(tmp_path):
    peer.write_llama(tmp_path / "float")
    for side, kind in (("ours", qlorapp.AutoModelForCausalLM), ("theirs", transformers.LlamaForCausalLM)):
        kind.from_pretrained(tmp_path / "float", dtype=torch.bfloat16).save_pretrained(tmp_path / side)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert_same_bytes(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
