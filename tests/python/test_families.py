# SPDX-License-Identifier: Apache-2.0
"""Each family that C++ computes, beside transformers and PEFT: checkpoints that transformers wrote, with random but lively weights."""

import peer
import pytest
import torch
import transformers

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from engine_checks import assert_same_pass, base, losses_and_gradients, with_lora
from qlorapp import _C

SLIDING, FULL = "sliding_attention", "full_attention"
BY_TYPE = {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2, "logits_scaling": 8.0}
GRANITE4 = {"layer_types": [FULL] * 3, "num_local_experts": 0, "shared_intermediate_size": 192}

#: Rows are longer than the windows, and than the positions that rope types scale from.
FAMILIES = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "Llama, dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 48},
    "Llama, yarn": {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}},
    "Qwen3": {"family": "Qwen3", "head_dim": 32},
    "Qwen3, tied, with biases": {"family": "Qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "Qwen3 with windows": {
        "family": "Qwen3", "head_dim": 32, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    },
    "Qwen3 with windows by layer_types": {"family": "Qwen3", "head_dim": 32, "use_sliding_window": True, **BY_TYPE},
    "Qwen2": {"family": "Qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Mistral": {"family": "Mistral", "sliding_window": 6},
    "Mistral without windows": {"family": "Mistral", "sliding_window": None, "head_dim": 32},
    "Ministral": {"family": "Ministral", "head_dim": 16, **BY_TYPE},
    "Ministral 3": {
        "family": "Ministral3", "head_dim": 16,
        "rope_parameters": YARN | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "Gemma": {"family": "Gemma", "head_dim": 32},
    "Gemma 3": {
        "family": "Gemma3", "head_dim": 32, "query_pre_attn_scalar": 24, **BY_TYPE,
        "rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "Gemma 3 with capped logits": {"family": "Gemma3", "head_dim": 16, "final_logit_softcapping": 5.0, **BY_TYPE},
    "Phi-3": {"family": "Phi3", "sliding_window": 6},
    "Phi-3, longrope, partial": {
        "family": "Phi3", "original_max_position_embeddings": 12,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 3.0, 5.0],
        },
    },
    "Granite": {"family": "Granite", **GRANITE},
    "Granite 4": {"family": "GraniteMoeHybrid", "position_embedding_type": "rope", "attention_bias": True, **GRANITE, **GRANITE4},
    "Granite 4 without positions": {"family": "GraniteMoeHybrid", **GRANITE4},
    "SmolLM3": {"family": "SmolLM3", "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    "OLMo 2": {"family": "Olmo2", "attention_bias": True},
    "OLMo 3": {
        "family": "Olmo3", **BY_TYPE, "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "GLM-4": {"family": "Glm4", "head_dim": 16},
    "EXAONE 4": {"family": "Exaone4", **BY_TYPE},
    "EXAONE 4 without windows": {"family": "Exaone4", "sliding_window": None, "layer_types": [FULL] * 3},
    "ERNIE 4.5": {"family": "Ernie4_5", "head_dim": 16, "use_bias": True},
    "Seed-OSS": {"family": "SeedOss", "head_dim": 32, "attention_out_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Hunyuan": {
        "family": "HunYuanDenseV1", "head_dim": 16, "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    },
    "Helium": {"family": "Helium", "head_dim": 16, "attention_bias": True},
}  # fmt: skip


def test_every_native_family_is_here():
    assert {f"{case.get('family', 'Llama')}ForCausalLM" for case in FAMILIES.values()} == set(_C.native_architectures())


@pytest.fixture(scope="module", params=FAMILIES)
def root(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    peer.write_llama(path / "float", **FAMILIES[request.param])
    return path


def batch():
    """Two rows, one of them padded."""
    ids = torch.arange(3, 51).view(2, 24)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def relative(ours, theirs):
    return (torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())).item()


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


def test_a_cache_gives_the_tokens_of_transformers(root):
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32).eval()
    prompts = torch.arange(3, 19).view(2, 8)
    wanted = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(prompts, **wanted).tolist() == theirs.generate(prompts, **wanted).tolist()


def test_a_folder_in_four_bits_goes_both_ways(root):
    peer.run_cli("quantize", "--model", root / "float", "--output", root / "ours")
    peer.load_4bit(root / "float").save_pretrained(root / "theirs")
    for name in ("ours", "theirs"):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        present = batch()["attention_mask"] == 1
        with torch.no_grad():
            ours, expected = (m(**batch()).logits[present] for m in (model, peer.load_4bit(root / name)))
        assert relative(ours, expected) <= 1e-5, name


def test_merging_is_pefts(root):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    theirs = peer.add_adapters(theirs)
    theirs.save_pretrained(root / "adapter")
    peer.run_cli(
        "merge", "--model", root / "float", "--adapter", root / "adapter", "--output", root / "merged", "--dtype", "float32"
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32).state_dict()
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    ours = peft.PeftModel.from_pretrained(ours, root / "adapter")
    again = qlorapp.AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert relative(ours(**batch()).logits, again(**batch()).logits) <= 1e-5


STEPS, RATE = 20, 2e-3
#: One case of each architecture.
FIRST = list({case.get("family", "Llama"): name for name, case in reversed(FAMILIES.items())}.values())


@pytest.mark.parametrize("root", FIRST, indirect=True)
def test_twenty_steps_are_those_of_transformers_peft_and_bitsandbytes(root):
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
    losses = [entry["loss"] for entry in peer.history(root / "run")]
    assert losses == pytest.approx(expected, abs=1e-5)
