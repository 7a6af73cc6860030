# SPDX-License-Identifier: Apache-2.0
"""Adapters as servers read them: by the rules of their loaders, and by the weights that come out."""

import json
import re

import gguf
import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from families import FAMILIES
from safetensors.torch import load_file
from test_export_adapter import adapted
from test_export_gguf import export, write

#: Layers' names that vLLM's classes of a family expect (packed_modules_mapping expanded; vllm/lora/lora_model.py, September 2026).
SPLIT = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
VLLM = {"Phi-3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}}
VLLM_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
SCALED = {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 40}}


def served(folder):
    """{module: change of its weight} as a server sees it that knows lora_alpha / r of the config and one rank, and the config."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, changes = load_file(folder / "adapter_model.safetensors"), {}
    for name, a in tensors.items():
        match = VLLM_NAME.fullmatch(name)
        assert match, f"{name} is none of a server's"
        if match[2] == "A":
            b = tensors[name.replace("lora_A", "lora_B")]
            assert a.shape[0] == b.shape[1] == config["r"]
            changes[match[1]] = config["lora_alpha"] / config["r"] * b.float() @ a.float()
    assert not (config["use_rslora"] or config["rank_pattern"] or config["alpha_pattern"] or config["use_dora"])
    assert config["bias"] == "none" and not config["modules_to_save"] and config["peft_type"] == "LORA"
    assert set(config["target_modules"]) == {module.split(".")[-1] for module in changes}
    return changes, config


def changes_of(model):
    """The same by PEFT."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)


@pytest.mark.parametrize("options", [{}, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("case", ["Llama", "Qwen3", "Gemma 3", "Phi-3", "GLM-4", "Granite", "Hunyuan"])
def test_vllm(case, options, tmp_path):
    model, adapter = adapted(write(tmp_path / "model", **FAMILIES[case]), **options)
    assert export(tmp_path / "model", adapter=adapter, adapter_for="vllm", output=tmp_path / "o") == str(tmp_path / "o")
    ours, config = served(tmp_path / "o")
    expected = {}
    for name, change in changes_of(model).items():
        if case == "GLM-4" and name.endswith("gate_up_proj"):
            gate, up = change.chunk(2)
            expected |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            expected[name] = change
    assert same(ours, expected)
    assert set(config["target_modules"]) <= VLLM.get(case, SPLIT)
    if not options:
        assert (config["r"], config["lora_alpha"]) == (8, 16)  # nothing was multiplied into B
    if case != "GLM-4":  # PEFT reads the folder too
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        assert same(changes_of(peft.PeftModel.from_pretrained(base, tmp_path / "o")), expected)


@pytest.mark.parametrize("targets", [["k_proj"], ["q_proj"], ["up_proj", "o_proj"], ["q_proj", "v_proj"], ["down_proj"]])
def test_sglang_gets_the_layers_that_it_asks_for(targets, tmp_path):
    """q with v, and gate with up (sglang 0.5.23, srt/lora/lora.py: normalize_qkv_proj, normalize_gate_up_proj)."""
    model, adapter = adapted(write(tmp_path / "model"), target_modules=targets, **SCALED)
    command = (
        "export",
        "--model",
        tmp_path / "model",
        "--adapter",
        adapter,
        "--adapter_for",
        "sglang",
        "--output",
        tmp_path / "o",
    )
    peer.run_cli(*command)
    ours, config = served(tmp_path / "o")
    words = set(config["target_modules"])
    assert (
        ("q_proj" in words) == ("v_proj" in words)
        and words & {"q_proj", "k_proj"} <= words
        and ("up_proj" not in words or "gate_proj" in words)
    )
    expected = changes_of(model)
    assert all(torch.count_nonzero(change) == 0 for name, change in ours.items() if name not in expected)
    assert same({name: change for name, change in ours.items() if name in expected}, expected)


@pytest.mark.parametrize("server", ["peft", "transformers"])
@pytest.mark.parametrize(
    "options", [SCALED, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}]
)
def test_peft_and_transformers_apply_everything(server, options, tmp_path):
    model, adapter = adapted(write(tmp_path / "model"), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "embedding_B" in name:
                parameter.add_(0.01)
    model.save_pretrained(adapter)
    export(tmp_path / "model", adapter=adapter, adapter_for=server, output=tmp_path / "o")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        plain = base(ids).logits
        if server == "peft":
            base = peft.PeftModel.from_pretrained(base, tmp_path / "o")
        else:
            base.load_adapter(tmp_path / "o")
        found = base(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (expected - plain).abs().max() > 1e-3


def test_names_of_older_files_become_those_in_memory(tmp_path):
    """A text model's adapter whose names have a wrapper of an older transformers."""
    model, adapter = adapted(write(tmp_path / "model"))
    expected = changes_of(model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {
        name.replace("model.model.layers", "model.language_model.model.layers"): value for name, value in tensors.items()
    }
    from safetensors.torch import save_file

    save_file(renamed, adapter / "adapter_model.safetensors", {"format": "pt"})
    for server in ("vllm", "sglang"):
        export(tmp_path / "model", adapter=adapter, adapter_for=server, output=tmp_path / server)
        assert same(served(tmp_path / server)[0], expected)


@pytest.mark.parametrize(
    ("server", "options", "reason"),
    [
        ("vllm", {"use_dora": True}, "vllm does not serve .*lora_magnitude_vector"),
        ("sglang", {"use_dora": True}, "sglang does not serve .*lora_magnitude_vector"),
        ("vllm", {"modules_to_save": ["lm_head"]}, r"vllm does not serve .base_model\.model\.lm_head\.weight."),
        ("sglang", {"modules_to_save": ["lm_head"]}, "sglang does not serve .*lm_head"),
        ("vllm", {"target_modules": ["q_proj", "lm_head"]}, "vllm does not serve .*lm_head.lora_A"),
        ("vllm", {"r": 600}, "at most rank 512; this one has 600"),
        ("vlm", {}, "must be one of .*got 'vlm'. Did you mean 'vllm'"),
    ],
)
def test_what_a_server_ignores_is_refused(server, options, reason, tmp_path):
    _, adapter = adapted(write(tmp_path / "model"), **options)
    with pytest.raises((qlorapp.FormatError, ValueError), match=reason):
        export(tmp_path / "model", adapter=adapter, adapter_for=server, output=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_llama_cpp_gets_a_file(tmp_path):
    _, adapter = adapted(write(tmp_path / "model"))
    export(tmp_path / "model", adapter=adapter, adapter_for="llama.cpp", output=tmp_path / "a.gguf")
    export(tmp_path / "model", adapter=adapter, gguf_adapter=tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["adapter.type"].contents() == "lora"
    with pytest.raises(ValueError, match="adapter_for needs output"):
        export(tmp_path / "model", adapter=adapter, adapter_for="vllm")
    with pytest.raises(qlorapp.FormatError, match="SmolLM3ForCausalLM through transformers' classes"):
        _, adapter = adapted(write(tmp_path / "smol", family="SmolLM3"))
        export(tmp_path / "smol", adapter=adapter, adapter_for="sglang", output=tmp_path / "o")
