# SPDX-License-Identifier: Apache-2.0
"""from_pretrained: what scripts for transformers pass beside the name."""

import logging
import shutil

import pytest
import qlorapp
import torch
import transformers
from qlorapp.hf.forward import engine_of
from qlorapp.hf.placement import layers_on_host
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)

read = qlorapp.AutoModelForCausalLM.from_pretrained
IDS = torch.arange(3, 27)[None]


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict": True, "low_cpu_mem_usage": True, "torch_dtype": torch.float16, "attn_implementation": "sdpa"},
        {"config": None, "subfolder": "", "variant": None, "state_dict": None, "proxies": None, "gguf_file": None},
        {"force_download": False, "offload_state_dict": False, "pretraining_tp": 1, "device_map": {"": "cpu"}},
        {"ignore_mismatched_sizes": False, "output_loading_info": False, "key_mapping": None, "use_safetensors": True},
    ],
    ids=str,
)
def test_what_asks_for_nothing_leaves_the_engine(folder, options):
    assert engine_of(read(folder, **options)) is not None


@pytest.mark.parametrize(
    ("device_map", "rest", "on_host"),
    [
        ({"": 0, "model.layers": "cpu"}, {"": 0}, True),
        ({"": "cuda:1", "model.layers.0": "cpu", "model.layers.1": "cpu"}, {"": "cuda:1"}, True),
        ({"model.embed_tokens": 0, "model.norm": 0, "lm_head": 0, "model.layers": "cpu"},
         {"model.embed_tokens": 0, "model.norm": 0, "lm_head": 0}, True),
        ({"": "cpu", "model.layers": "cpu"}, {"": "cpu", "model.layers": "cpu"}, False),
        ({"": 0}, {"": 0}, False),
        ("auto", "auto", False),
    ],
    ids=str,
)  # fmt: skip
def test_layers_on_the_cpu_beside_a_gpu_are_a_base_on_the_host(device_map, rest, on_host):
    assert layers_on_host(device_map, transformers.LlamaConfig(num_hidden_layers=2)) == (rest, on_host)


@pytest.mark.parametrize(
    "layers",
    [
        {"model.layers.0": "cpu"},
        {"model.layers.0": "cpu", "model.layers.1": 0},
        {"model.layers.0": "cpu", "model.layers.2": "cpu"},
    ],
)
def test_some_layers_on_the_cpu_are_refused(layers):
    with pytest.raises(ValueError, match="device_map must leave all layers on the CPU, or none"):
        layers_on_host({"": 0, **layers}, transformers.LlamaConfig(num_hidden_layers=2))


def test_layers_on_the_host_are_for_what_cpp_computes(folder):
    with pytest.raises(ValueError, match="device_map with layers on the CPU"):
        read(folder, device_map={"": 0, "model.layers": "cpu"}, output_loading_info=True)


def test_what_asks_for_something_is_transformers_own(folder, caplog):
    model, report = read(folder, output_loading_info=True)
    assert type(model) is transformers.LlamaForCausalLM and not report["missing_keys"]
    assert "LlamaForCausalLM with output_loading_info: transformers' own code" in caplog.text
    with pytest.raises(OSError, match="fp16"):
        read(folder, variant="fp16")
    with pytest.raises(TypeError, match="nonsense"):
        read(folder, nonsense=1)


def test_a_subfolder_is_where_the_model_is_read(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "inner" / "model")
    assert torch.equal(read(tmp_path, subfolder="inner/model")(IDS).logits, read(folder)(IDS).logits)
    with pytest.raises(FileNotFoundError, match="must hold a config.json; .*outer has none"):
        read(tmp_path, subfolder="outer")


def test_a_config_of_the_folder_s_model_counts(folder, caplog):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache, config.pad_token_id, config.dtype = False, 7, torch.float16
    with caplog.at_level(logging.WARNING, "qlorapp"):
        model = read(folder, config=config, load_in_4bit=True)
    assert "own code" not in caplog.text and engine_of(model) is not None and model.is_loaded_in_4bit
    assert (model.config.use_cache, model.config.pad_token_id, model.dtype) == (False, 7, torch.float16)
    for other in ({"use_cache": False}, 1.0):
        with pytest.raises(TypeError, match="config must be a config of transformers; got (dict|float)"):
            read(folder, config=other)


ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"rms_norm_eps": 0.1}, {"rope_parameters": ROPE}], ids=str)
@pytest.mark.parametrize("by", ["config", "options"])
def test_a_config_that_computes_otherwise_is_computed(folder, changes, by, caplog):
    """C++ reads config.json of the folder: such a model is transformers' own."""
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    with caplog.at_level(logging.WARNING, "qlorapp"):
        model = read(folder, config=config) if by == "config" else read(folder, **changes)
    assert f"LlamaForCausalLM with {next(iter(changes))}=" in caplog.text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, theirs(IDS).logits)
        assert not torch.allclose(model(IDS).logits, read(folder)(IDS).logits, atol=1e-3)


def test_such_a_model_is_in_four_bits_too(folder):
    model = read(folder, num_hidden_layers=1, load_in_4bit=True)
    assert len(model.model.layers) == 1 and isinstance(model.model.layers[0].mlp.up_proj, qlorapp.nn.Linear4bit)
