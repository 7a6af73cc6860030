# SPDX-License-Identifier: Apache-2.0
"""Folders that transformers saved of a model quantized by bitsandbytes: loaded, trained on, and written back to the byte; folders
written here load there."""

import json

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import qlorapp

KINDS = {
    "nested": {},
    "plain": {"bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "two modules skipped": {"llm_int8_skip_modules": ["lm_head", "down_proj", "model.layers.1.self_attn.q_proj"]},
    **{f"stored as {name}": {"bnb_4bit_quant_storage": name} for name in ("int8", "float16", "bfloat16", "float32", "float64")},
}
IDS = torch.arange(3, 51).view(2, 24)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_alike(ours, theirs):
    expected = logits(theirs)
    assert (logits(ours) - expected).abs().max() <= 1e-5 * expected.abs().max()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_transformers_saved_loads_trains_and_is_written_back_to_the_byte(tmp_path, kind, tied):
    peer.write_llama(tmp_path / "float", tie_word_embeddings=tied)
    theirs = peer.load_4bit(tmp_path / "float", **KINDS[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert_alike(ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")

    trained = qlorapp.get_peft_model(ours, qlorapp.LoraConfig(r=4, target_modules="all-linear"), seed=1).train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = trained(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    ours.save_pretrained(tmp_path / "after")  # adapters have changed nothing of it
    assert files(tmp_path / "after") == files(tmp_path / "theirs")


def test_shards_are_written_back_to_the_byte(tmp_path):
    peer.write_llama(tmp_path / "float", tie_word_embeddings=False)
    theirs = peer.load_4bit(tmp_path / "float")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    whole = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    whole.save_pretrained(tmp_path / "ours")  # in one file
    ours.save_pretrained(tmp_path / "ours")  # in its place
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert_alike(qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32), theirs)
    whole.save_pretrained(tmp_path / "ours")
    assert "model.safetensors.index.json" not in files(tmp_path / "ours")


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_quantize_and_save_is_what_transformers_saves_and_loads_there(tmp_path, kind):
    peer.write_llama(tmp_path / "float")
    wanted = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float32",
    }
    options = qlorapp.BitsAndBytesConfig(**{**wanted, **KINDS[kind]})
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=options, dtype=torch.float32)
    ours.save_pretrained(tmp_path / "ours")
    peer.load_4bit(tmp_path / "float", **KINDS[kind]).save_pretrained(tmp_path / "theirs")
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert_alike(ours, peer.load_4bit(tmp_path / "ours"))
    assert_alike(qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32), ours)
    assert sorted(files(tmp_path / "ours")) == sorted(files(tmp_path / "theirs"))


def test_a_model_of_another_dtype_says_so_in_its_config(tmp_path):
    import transformers

    peer.write_llama(tmp_path / "float")
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.bfloat16)
    ours.save_pretrained(tmp_path / "ours")
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_a_model_is_not_saved_over_its_source_or_by_pickle(tmp_path):
    peer.write_llama(tmp_path / "float")
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="loaded from"):
        ours.save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="safetensors"):
        ours.save_pretrained(tmp_path / "x", safe_serialization=False)
    with pytest.raises(TypeError, match="Did you mean 'max_shard_size'"):
        ours.save_pretrained(tmp_path / "x", max_shardsize=1)
