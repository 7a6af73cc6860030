# SPDX-License-Identifier: Apache-2.0
"""config.json as transformers writes it: sizes, rotary frequencies, names of the parameters, quantization_config."""

import json
import subprocess

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from qlorapp import _C
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def run(build_dir, *args) -> subprocess.CompletedProcess:
    return subprocess.run(
        [build_dir / "tests/format/format_probe", *map(str, args)], capture_output=True, text=True, check=False
    )


def read(build_dir, folder, length=0) -> dict:
    """length: of a batch's longest row, which rotary frequencies may depend on."""
    result = run(build_dir, "model-config", folder, length)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "extra",
    [{}, {"num_key_value_heads": 2, "head_dim": 24}, {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3]}],
)
def test_sizes_names_and_shapes_are_those_of_the_model_that_transformers_builds(build_dir, tmp_path, tied, extra):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, **extra)).to(torch.float16)
    model.save_pretrained(tmp_path)
    ours = read(build_dir, tmp_path)
    config = model.config
    for key in [*SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"]:
        assert ours[key] == getattr(config, key), key
    assert ours["eos_token_id"] == (config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id])
    assert ours["dtype"] == "float16"
    linears = {
        name: list(module.weight.shape)
        for name, module in model.model.named_modules(prefix="model")
        if isinstance(module, torch.nn.Linear)
    }
    assert ours["linear_layers"] == linears
    dense = {name: list(p.shape) for name, p in model.named_parameters() if name.removesuffix(".weight") not in linears}
    assert ours["dense_parameters"] == dense
    assert ours["parameter_count"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("architecture", _C.native_architectures())
@pytest.mark.parametrize("more", [{}, {"num_key_value_heads": None}])
def test_what_a_file_leaves_out_is_what_the_class_of_the_family_assumes(build_dir, tmp_path, architecture, more):
    kind = getattr(transformers, architecture).config_class
    sizes = {**SIZES, "hidden_size": 640, "num_attention_heads": 320}  # which each default of num_key_value_heads divides
    if kind.model_type == "granitemoehybrid":  # the class alone has Mamba layers and experts, which have no row
        sizes |= {"layer_types": ["full_attention"] * 2, "num_local_experts": 0}
    if kind.model_type == "seed_oss":  # which would be dropout
        sizes |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    if kind.model_type == "gemma3_text":
        del sizes["vocab_size"]  # wrappers leave it out
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [architecture], "model_type": kind.model_type, **sizes, **more})
    )
    try:
        theirs = kind.from_pretrained(tmp_path)
    except huggingface_hub.errors.StrictDataclassFieldValidationError:
        pytest.skip("null is no value of the class")
    ours = read(build_dir, tmp_path)
    for key in ("vocab_size", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert ours[key] == getattr(theirs, key), key
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (ours["rope_type"], ours["rope_theta"]) == (rope["rope_type"], rope["rope_theta"])
    if getattr(theirs, "head_dim", None) is not None:  # a class that has none derives it in the model
        assert ours["head_dim"] == theirs.head_dim
    fields = ours["fields"]
    for key, _type, _least, _most, _required, _doc in _C.config_fields():
        name = "shared_intermediate_size" if key == "intermediate_size" and hasattr(theirs, "shared_intermediate_size") else key
        if getattr(theirs, name, None) is not None and key in fields:
            assert fields[key] == getattr(theirs, name), key
    assert fields.get("attention_multiplier", 0) == getattr(theirs, "attention_multiplier", 0)
    window = getattr(theirs, "sliding_window", None) or 0
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 2
    wanted = [window if kind == "sliding_attention" else 0 for kind in types]
    assert fields.get("windows", [0, 0]) == wanted


ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 2.5,
        "low_freq_factor": 0.7,
        "high_freq_factor": 3.3,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 15e4, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096},
]  # fmt: skip


def spacing(a, b) -> int:
    """Distance in float32 values."""
    bits = [np.asarray(x, dtype=np.float32).view(np.int32).astype(np.int64) for x in (a, b)]
    return int(np.abs(bits[0] - bits[1]).max())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("version", [4, 5])
def test_rotary_frequencies_are_those_of_transformers(build_dir, tmp_path, rope, head_dim, version):
    rope, kind = dict(rope), rope["rope_type"]
    if kind == "longrope":
        rope |= {
            f"{name}_factor": [1.0 + i * step for i in range(head_dim // 2)] for name, step in (("short", 0.1), ("long", 0.7))
        }
    if kind == "dynamic" and head_dim == 2:
        pytest.skip("its exponent divides by head_dim - 2")
    config = LlamaConfig(**SIZES, head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(rope))
    stored = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    if version == 4:
        stored.pop("rope_parameters")
        stored["rope_theta"] = rope["rope_theta"]
        stored["rope_scaling"] = None if kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    for length in (0, 200_000) if kind in ("dynamic", "longrope") else (0,):
        reference, attention_factor = compute(config, device=torch.device("cpu"), seq_len=length or None)
        ours = read(build_dir, tmp_path, length)
        assert ours["attention_factor"] == pytest.approx(attention_factor, rel=1e-15)
        assert ours["rope_type"] == kind and ours["rope_theta"] == rope["rope_theta"]
        assert len(ours["inverse_frequencies"]) == head_dim // 2
        # Blends subtract nearly equal numbers and divide by the factor, which magnifies the one ulp of the power.
        assert spacing(ours["inverse_frequencies"], reference.numpy()) <= 2 * (rope.get("factor") or 32)
    # and transformers itself reads the same file to the same frequencies
    again, _ = compute(LlamaConfig.from_pretrained(tmp_path), device=torch.device("cpu"), seq_len=length or None)
    assert torch.equal(reference, again)


def test_llama3_without_an_original_length_takes_the_model_s_as_transformers_does(build_dir, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stored = SIZES | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))
    reference, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(tmp_path), device=torch.device("cpu"))
    assert spacing(read(build_dir, tmp_path)["inverse_frequencies"], reference.numpy()) <= 16


@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
        {},
        {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_quant_storage": torch.bfloat16,
            "llm_int8_skip_modules": ["lm_head", "model.layers.0"],
            "llm_int8_threshold": 5.5,
        },
    ],
)
def test_quantization_config_is_written_as_transformers_writes_it(build_dir, tmp_path, options):
    config = BitsAndBytesConfig(load_in_4bit=True, **options)
    (tmp_path / "q.json").write_text(json.dumps(config.to_dict()))
    model = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    model.save_pretrained(tmp_path / "plain")
    model.quantization_config = config
    model.save_pretrained(tmp_path / "quantized")
    result = run(build_dir, "quantization-config", tmp_path / "plain" / "config.json", tmp_path / "q.json")
    assert result.stdout == (tmp_path / "quantized" / "config.json").read_text(), result.stderr


def test_the_config_of_a_saved_four_bit_model_is_rebuilt_to_its_bytes(build_dir, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    quantized = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    quantized.save_pretrained(tmp_path / "quantized")
    ours = read(build_dir, tmp_path / "quantized")
    assert ours["quantization"] == json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    (tmp_path / "q.json").write_text(json.dumps(ours["quantization"]))
    result = run(build_dir, "quantization-config", tmp_path / "plain" / "config.json", tmp_path / "q.json")
    assert result.stdout == (tmp_path / "quantized" / "config.json").read_text(), result.stderr
    states = json.loads(run(build_dir, "quant-state", tmp_path / "quantized").stdout)
    assert set(states) == {f"{name}.weight" for name in ours["linear_layers"]}
    copy = tmp_path / "copy.safetensors"
    run(build_dir, "safetensors-copy", tmp_path / "quantized" / "model.safetensors", copy)
    assert copy.read_bytes() == (tmp_path / "quantized" / "model.safetensors").read_bytes()
