# SPDX-License-Identifier: Apache-2.0
"""from_pretrained: what scripts for transformers pass beside the name."""

import copy
import logging
import shutil

import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)

read = qlorapp.AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict": True, "low_cpu_mem_usage": True, "torch_dtype": torch.float16},
        {"config": None, "subfolder": "", "variant": None, "state_dict": None, "proxies": None, "gguf_file": None},
        {"force_download": False, "resume_download": None, "offload_state_dict": False, "use_flash_attention_2": False},
        {"pretraining_tp": 1, "ignore_mismatched_sizes": False, "output_loading_info": False},
    ],
)
def test_what_asks_for_nothing_is_accepted(folder, options):
    assert read(folder, **options).num_parameters() > 0


def test_what_has_no_effect_here_is_said(folder, caplog):
    with caplog.at_level(logging.INFO, "qlorapp"):
        read(folder, force_download=True, use_flash_attention_2=True, proxies={"https": "x"}, ignore_mismatched_sizes=True)
    for name in ("force_download", "use_flash_attention_2", "proxies", "ignore_mismatched_sizes"):
        assert f"{name} has no effect" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_dict": False}, "return_dict=False is not supported. Give return_dict=False to the call"),
        ({"variant": "fp16"}, "variant='fp16' is not supported. Weights are read from model.safetensors"),
        (
            {"state_dict": {"w": torch.ones(2)}},
            r"state_dict=dict is not supported. Load the folder, then model.load_state_dict",
        ),
        ({"gguf_file": "a.gguf"}, "gguf_file='a.gguf' is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(folder, options, message):
    with pytest.raises(ValueError, match=message):
        read(folder, **options)


def test_a_subfolder_is_where_the_model_is_read(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "inner" / "model")
    model = read(tmp_path, subfolder="inner/model")
    assert model.name_or_path == str(tmp_path / "inner" / "model")
    ids = torch.arange(3, 9)[None]
    assert torch.equal(model(ids).logits, read(folder)(ids).logits)
    with pytest.raises(FileNotFoundError, match="subfolder must be a folder in .*; there is no 'outer'"):
        read(tmp_path, subfolder="outer")


def test_an_adapter_s_subfolder_is_not_that_of_its_base(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path / "inner")
    again = qlorapp.AutoPeftModelForCausalLM.from_pretrained(tmp_path, subfolder="inner")
    assert list(again.peft_config) == ["default"]


def test_a_config_of_the_folder_s_model_counts(folder, caplog):
    config = transformers.AutoConfig.from_pretrained(folder)
    with caplog.at_level(logging.WARNING, "qlorapp"):
        assert read(folder, config=config).config.use_cache
        assert not caplog.records
    config.use_cache = False
    config.dtype = torch.float16
    config.quantization_config = qlorapp.BitsAndBytesConfig(load_in_4bit=True)
    model = read(folder, config=config)
    assert not model.config.use_cache and model.is_loaded_in_4bit and model.dtype == torch.float16
    config.pad_token_id = 7
    with caplog.at_level(logging.WARNING, "qlorapp"):
        assert read(folder, config=config).config.pad_token_id == 7
    assert "of config, pad_token_id can be read at model.config and has no other effect" in caplog.text


def test_model_config_and_a_dict_are_configs(folder):
    own = copy.copy(read(folder).config)
    own.use_cache = False
    assert not read(folder, config=own).config.use_cache
    assert not read(folder, config={"use_cache": False}).config.use_cache
    with pytest.raises(TypeError, match="config must be a config of transformers, model.config or a dict; got float"):
        read(folder, config=1.0)


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_config_of_another_model_is_refused(folder, as_dict):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    given = {"num_hidden_layers": 1} if as_dict else config
    with pytest.raises(
        ValueError, match="config must be of the model in .*: num_hidden_layers is 1 in it, and 3 in the folder"
    ):
        read(folder, config=given)


def test_a_config_reaches_a_model_that_transformers_computes(tmp_path):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96)).save_pretrained(
        tmp_path
    )
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.use_cache = False
    assert read(tmp_path, config=config).config.use_cache is False
    assert read(tmp_path, config=config.to_dict()).config.use_cache is False
    assert read(tmp_path, config=config, load_in_4bit=True).config.use_cache is False
