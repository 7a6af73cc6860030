# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint written by transformers, and its model in qlorapp: what the tests of the Python surface share."""

import json

import pytest
import qlorapp
import torch
import transformers

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
         "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
SHAPES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "gqa": {"num_key_value_heads": 2, "head_dim": 24},
    "llama3 rope": {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
}


def write_checkpoint(folder, *, v4: bool = False, **extra):
    """A tiny Llama by transformers; v4: the rope settings as transformers 4 wrote them."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **extra}))
    for parameter in model.parameters():  # the default deviation of 0.02 gives logits that are all alike
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    if v4:
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        (folder / "config.json").write_text(json.dumps(config))
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, num_key_value_heads=2)
    return path


def ragged_batch():
    torch.manual_seed(4)
    ids = torch.randint(3, SIZES["vocab_size"], (3, 17))
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    mask[1, :4] = 0
    labels = torch.where(mask == 1, ids, -100)
    labels[1, 4] = -100  # transformers predicts it from the padding before it
    labels[2, :6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def load(folder, **lora):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=qlorapp.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
    )
    torch.manual_seed(5)
    return qlorapp.get_peft_model(model, qlorapp.LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))
