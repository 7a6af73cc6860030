# SPDX-License-Identifier: Apache-2.0
"""Adapters travel both ways between C++ and PEFT, over the same four-bit codes."""

import json
import re

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """A folder with the peer's codes, which both sides load."""
    root = tmp_path_factory.mktemp("roundtrip")
    peer.write_llama(root / "float")
    peer.load_4bit(root / "float").save_pretrained(root / "codes")
    return root / "codes"


IDS = torch.arange(3, 99).view(4, 24)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def our_model(codes, adapter):
    model = qlorapp.load_model(str(codes), compute_dtype=torch.float32)
    model.load_adapter(str(adapter))
    return model


def our_logits(codes, adapter):
    model = our_model(codes, adapter)
    batch = model.unpad(IDS)
    return batch.pad(model.logits(model.hidden_states(batch, False)))


def their_logits(codes, adapter):
    # is_trainable only keeps Linear4bit in training mode, where it computes in float32; no adapter here has dropout on.
    model = peft.PeftModel.from_pretrained(peer.load_4bit(codes), adapter).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return logits(model)


def assert_same_logits(ours, theirs):
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def assert_it_matters(codes, with_adapter):
    plain = logits(peer.load_4bit(codes))
    assert (with_adapter - plain).abs().max() > 1e-2 * plain.abs().max()


OUR_OPTIONS = {
    "all linear": ["--r", 8, "--lora_alpha", 16, "--target_modules", "all-linear"],
    "default targets, dropout": ["--r", 4, "--lora_dropout", 0.1],
    "rsLoRA on a list": ["--r", 6, "--lora_alpha", 3, "--use_rslora", "true", "--target_modules", "q_proj,down_proj"],
    "a regular expression": ["--r", 2, "--target_modules", r".*\.(0|2)\.mlp\.(up|gate)_proj"],
}


@pytest.mark.parametrize("name", OUR_OPTIONS)
def test_what_we_trained_loads_in_peft_with_equal_logits(codes, tmp_path, name):
    peer.write_rows(tmp_path / "rows.jsonl", 16)
    arguments = ["--model", codes, "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "out", "--learning_rate", 2e-2]
    peer.run_cli("train", *arguments, "--max_steps", 6, "--task_type", "CAUSAL_LM", *OUR_OPTIONS[name])
    ours, theirs = our_logits(codes, tmp_path / "out"), their_logits(codes, tmp_path / "out")
    assert_it_matters(codes, ours)
    assert_same_logits(ours, theirs)


def test_adapter_config_has_every_key_that_peft_writes(codes, tmp_path):
    peer.write_rows(tmp_path / "rows.jsonl", 4)
    arguments = ["--model", codes, "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "ours"]
    peer.run_cli("train", *arguments, "--max_steps", 1, "--r", 8, "--lora_alpha", 16, "--target_modules", "q_proj,v_proj")
    peer.add_adapters(peer.load_4bit(codes), target_modules=["q_proj", "v_proj"]).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    for config in (ours, theirs):
        config["target_modules"].sort()
    # PEFT's init was its default too; nothing but what this library does not know may differ.
    assert {key for key in theirs if ours[key] != theirs[key]} == set(), (ours, theirs)


THEIR_OPTIONS = {
    "all linear": {"r": 8, "lora_alpha": 16},
    "rsLoRA": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ["k_proj", "o_proj"]},
    "ranks and alphas of their own": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"down_proj": 32, r"layers\.[02]\.self_attn\.q_proj": 1},
    },
    "a regular expression": {"r": 5, "target_modules": r".*layers\.[12]\..*(q_proj|down_proj)"},
    "some layers": {"r": 4, "target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "but not some modules": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "exclude_modules": ["k_proj"]},
    "full names": {"r": 3, "target_modules": ["model.layers.0.self_attn.q_proj", "layers.2.mlp.down_proj"]},
    "trained with dropout": {"r": 4, "lora_dropout": 0.3},
}


def theirs_saved(codes, folder, **options):
    model = peer.add_adapters(peer.load_4bit(codes), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(5)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", THEIR_OPTIONS)
def test_what_peft_saved_loads_with_equal_logits_and_goes_back_with_every_value(codes, tmp_path, name):
    theirs_saved(codes, tmp_path / "theirs", **THEIR_OPTIONS[name])
    ours, theirs = our_logits(codes, tmp_path / "theirs"), their_logits(codes, tmp_path / "theirs")
    assert_it_matters(codes, ours)
    assert_same_logits(ours, theirs)
    our_model(codes, tmp_path / "theirs").save_adapter(str(tmp_path / "ours"), "base")
    mine, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert set(mine) == set(other) and all(torch.equal(mine[key], other[key]) for key in other)
    assert torch.equal(their_logits(codes, tmp_path / "ours"), theirs)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"r": 4}, "must have shape"),
        ({"target_modules": ["q_proj"]}, "does not fit this model"),
        ({"use_dora": True}, "lacks .*lora_magnitude_vector"),
    ],
)
def test_an_adapter_that_does_not_fit_its_config_is_refused(codes, tmp_path, change, message):
    theirs_saved(codes, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(qlorapp.FormatError) as error:
        our_logits(codes, tmp_path)
    assert re.search(message, str(error.value))


def test_training_goes_on_from_pefts_adapter(codes, tmp_path):
    peer.write_rows(tmp_path / "rows.jsonl", 8)
    theirs_saved(codes, tmp_path / "theirs", r=4, use_rslora=True, rank_pattern={"q_proj": 2})
    arguments = [
        "--model",
        codes,
        "--data",
        tmp_path / "rows.jsonl",
        "--init_adapter",
        tmp_path / "theirs",
        "--max_steps",
        1,
        "--defaults",
        "trainer",
    ]
    peer.run_cli("train", *arguments, "--output", tmp_path / "still", "--learning_rate", 0)
    still, theirs = (their_logits(codes, tmp_path / side) for side in ("still", "theirs"))
    assert torch.equal(still, theirs)
    peer.run_cli("train", *arguments, "--output", tmp_path / "moved", "--learning_rate", 1e-2)
    assert not torch.allclose(their_logits(codes, tmp_path / "moved"), theirs, rtol=1e-4)
