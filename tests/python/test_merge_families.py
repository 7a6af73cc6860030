# SPDX-License-Identifier: Apache-2.0
"""Merging by names and shapes: checkpoints that transformers writes, adapters of PEFT, and PEFT's merge_and_unload as the oracle."""

import json
import shutil

import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from safetensors.torch import load_file, save_file

IDS = torch.arange(3, 99).view(4, 24)
SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ATTENTION = r".*self_attn\.[qkvo]_proj"


def wrapped(name, vision, **text):
    text = transformers.AutoConfig.for_model(text.pop("model_type"), **{**SMALL, "head_dim": 16, **text})
    return getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=127, mm_tokens_per_image=4
    )


# Model class, its config, options of the adapter.
FAMILIES = {
    "Qwen2": (transformers.Qwen2Config(**SMALL), {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "Qwen3": (transformers.Qwen3Config(**SMALL, head_dim=16), {"use_dora": True}),
    "Mistral": (transformers.MistralConfig(**SMALL), {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}}),
    "Gemma": (transformers.GemmaConfig(**SMALL, head_dim=8), {"modules_to_save": ["embed_tokens"]}),
    "Gemma 3": (transformers.Gemma3TextConfig(**SMALL, head_dim=16), {"modules_to_save": ["norm", "q_norm"]}),
    "Gemma 3 with pictures": (
        wrapped("Gemma3", VISION, model_type="gemma3_text"),
        {"target_modules": r".*(language_model|vision_tower).*(q_proj|fc1|down_proj)"},
    ),
    "Mistral 3": (
        wrapped("Mistral3", transformers.PixtralVisionConfig(**VISION), model_type="mistral"),
        {"target_modules": ["q_proj", "gate_proj", "linear_1"]},
    ),
    "Phi-3": (transformers.Phi3Config(**SMALL), {"use_rslora": True}),
    "Granite": (transformers.GraniteConfig(**SMALL), {"layers_to_transform": [1], "target_modules": ["o_proj", "up_proj"]}),
    "OLMo 2": (transformers.Olmo2Config(**SMALL), {"exclude_modules": ["k_proj"]}),
    "SmolLM3": (transformers.SmolLM3Config(**SMALL), {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "Qwen3-MoE": (
        transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        {"target_modules": ATTENTION},
    ),
    "GPT-2": (transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=128), {"lora_bias": True}),
    "GPT-2, DoRA": (
        transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=128),
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
    ),
}


def base_of(config, folder):
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else transformers.AutoModelForCausalLM
    model = model.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    return model


def reload(folder):
    return load(folder).eval()


def load(folder):
    pictures = "vision_config" in json.loads((folder / "config.json").read_text())
    return (transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM).from_pretrained(folder)


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def close(ours, theirs):
    return (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def shake(model):
    model = peer.shaken(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.bias") or "lora_embedding_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def trained(model, **options):
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    return shake(peft.get_peft_model(model, peft.LoraConfig(**options)))


def check_equal(merged, expected):
    state = expected.state_dict()
    loaded = reload(merged)
    ours = loaded.state_dict()
    assert set(ours) == set(state)
    for name, value in ours.items():
        assert value.dtype == state[name].dtype and value.shape == state[name].shape, name
        assert torch.allclose(value, state[name], rtol=0, atol=1e-5 * state[name].abs().max().item()), name
    assert close(logits(loaded), logits(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_of_any_family_is_pefts(tmp_path, family):
    config, options = FAMILIES[family]
    base_of(config, tmp_path / "base")
    theirs = trained(load(tmp_path / "base"), **options)
    theirs.save_pretrained(tmp_path / "adapter")
    qlorapp.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    assert set(before) <= set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert 0 < len(changed) < len(before)
    expected = logits(theirs)
    check_equal(tmp_path / "merged", theirs.merge_and_unload())
    assert close(logits(reload(tmp_path / "merged")), expected)


# --- what is refused, and how


def edited(folder, output, **keys):
    shutil.copytree(folder, output)
    config = json.loads((output / "adapter_config.json").read_text())
    (output / "adapter_config.json").write_text(json.dumps({**config, **keys}))
    return output


def refused(message, base, adapter, folder):
    with pytest.raises((ValueError, OSError), match=message):
        qlorapp.merge(base, adapter, folder / "merged")
    assert not (folder / "merged").exists()


def test_what_is_no_product_of_two_matrices_is_refused_by_name_with_the_way_out(tmp_path):
    base = tmp_path / "base"
    base_of(FAMILIES["Qwen3-MoE"][0], base)
    trained(load(base), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]).save_pretrained(
        tmp_path / "parameters"
    )
    refused("target_parameters must be null.*AutoPeftModelForCausalLM", base, tmp_path / "parameters", tmp_path)
    trained(load(base)).save_pretrained(tmp_path / "all")
    config = json.loads((tmp_path / "all" / "adapter_config.json").read_text())
    refused(
        "experts.*AutoPeftModelForCausalLM", base, edited(tmp_path / "all", tmp_path / "same", target_parameters=None), tmp_path
    )
    assert config["peft_type"] == "LORA"
    trained(load(base), target_modules=["q_proj"], trainable_token_indices=[3]).save_pretrained(tmp_path / "tokens")
    refused("trainable_token_indices must be null.*AutoPeftModelForCausalLM", base, tmp_path / "tokens", tmp_path)


def test_an_adapter_that_lacks_a_layer_or_a_kind_of_layer_is_refused(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base_of(FAMILIES["Qwen3"][0], base)
    trained(load(base), target_modules=["q_proj", "up_proj"]).save_pretrained(adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for gone in ("layers.1.self_attn.q_proj", "up_proj"):
        kept = {name: value for name, value in tensors.items() if gone not in name}
        save_file(kept, adapter / "adapter_model.safetensors")
        refused(f"lacks 'base_model.model.model.*{gone}.lora_A.weight'", base, adapter, tmp_path)
    save_file({**tensors, "base_model.model.model.norm.bias": torch.zeros(32)}, adapter / "adapter_model.safetensors")
    refused("holds 'base_model.model.model.norm.bias', which does not fit", base, adapter, tmp_path)


def test_keys_of_a_later_peft_that_are_off_are_named_in_one_line(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    peer.write_llama(base)
    trained(load(base)).save_pretrained(adapter)
    off = edited(adapter, tmp_path / "off", use_kasa=False, use_dorra=False, velora_config2=None)
    said = peer.run_cli("merge", "--model", base, "--adapter", off, "--output", tmp_path / "merged").stderr
    assert said.count("unknown keys that are null or false are ignored: 'use_dorra', 'use_kasa', 'velora_config2'") == 1
    refused(
        "'use_dorra' is not a key of an adapter. Did you mean 'use_dora'",
        base,
        edited(adapter, tmp_path / "on", use_dorra=True),
        tmp_path / "on",
    )


def test_an_adapter_of_mlx_lm_is_named(tmp_path):
    peer.write_llama(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "lora_parameters": {"rank": 8}, "num_layers": 16}'
    )
    refused("is an adapter of mlx-lm.*mlx_lm.fuse", tmp_path / "base", tmp_path / "adapter", tmp_path)


def test_inspect_names_only_programs_that_load_the_adapter(tmp_path):
    base_of(FAMILIES["GPT-2"][0], tmp_path / "gpt2")
    base_of(FAMILIES["Mistral"][0], tmp_path / "mistral")
    peer.write_llama(tmp_path / "llama")
    for base, options, expected in [
        ("gpt2", {}, ["qlorapp merge --adapter"]),
        ("mistral", {}, ["qlorapp eval, generate and merge --adapter", "qlorapp train --init_adapter"]),
        ("llama", {}, ["qlorapp eval, generate and merge --adapter", "qlorapp train --init_adapter"]),
        ("llama", {"target_modules": ["lm_head", "q_proj"]}, ["qlorapp merge --adapter"]),
    ]:
        adapter = tmp_path / f"{base} {len(options)}"
        trained(load(tmp_path / base), **options).save_pretrained(adapter)
        said = peer.run_cli("inspect", adapter).stdout
        loads = [line.split("loads in: ")[1] for line in said.splitlines() if "loads in: " in line]
        assert loads[1:] == expected, said
        elsewhere = peer.run_cli("inspect", edited(adapter, tmp_path / "elsewhere", base_model_name_or_path="org/name")).stdout
        assert ("if the base is of a family that qlorapp computes" in elsewhere) is (not options and base != "gpt2")
        shutil.rmtree(tmp_path / "elsewhere")
