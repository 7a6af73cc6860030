# SPDX-License-Identifier: Apache-2.0
"""What scripts read of a model and of its config, and call on it, beside transformers' own."""

import ast
import json
import subprocess
import sys

import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, os
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)


def test_a_config_has_what_transformers_config_has(folder):
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name in (
        "_name_or_path", "name_or_path", "dtype", "torch_dtype", "is_encoder_decoder", "return_dict", "use_return_dict",
        "_attn_implementation", "output_attentions", "output_hidden_states", "rope_scaling", "model_type",
    ):  # fmt: skip
        assert str(getattr(ours.config, name)) == str(getattr(theirs.config, name)), name
    assert ours.config.torch_dtype is torch.bfloat16 and ours.config.rope_theta == 10000.0
    assert '"dtype": "bfloat16"' in ours.config.to_json_string() and ours.config.to_dict()["_name_or_path"] == str(folder)
    assert not hasattr(ours.config, "nonsense") and not hasattr(ours.config, "quantization_config")


def test_a_config_of_transformers_4_reads_the_same(tmp_path):
    from tiny_llama import write_checkpoint

    write_checkpoint(tmp_path, v4=True, rope_parameters={"rope_type": "default", "rope_theta": 7000.0})
    values = json.loads((tmp_path / "config.json").read_text())
    values["torch_dtype"] = values.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert config.rope_theta == 7000.0 and config.torch_dtype is config.dtype is torch.float32


def test_a_model_has_the_small_methods_of_transformers(folder, caplog):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for one in (model, load(folder)):
        assert one.main_input_name == theirs.main_input_name and one.vocab_size == theirs.vocab_size
        decoder = one.get_decoder()
        assert decoder.embed_tokens is one.get_input_embeddings() and not hasattr(decoder, "lm_head")
        assert one.tie_weights() is None
        with pytest.raises(NotImplementedError, match=r"prepare_inputs_for_generation\] .*Call model.generate"):
            one.prepare_inputs_for_generation(torch.tensor([[1]]))
    for one in (model, theirs):
        one.add_model_tags(["sft", "trl"])
        one.add_model_tags("trl")
        assert one.model_tags == ["sft", "trl"]
    assert sum("no model card is made here" in record.getMessage() for record in caplog.records) == 1
    model.set_input_embeddings(model.get_input_embeddings())
    model.set_output_embeddings(model.get_output_embeddings())
    for change in (model.set_input_embeddings, model.set_output_embeddings, model.set_decoder):
        with pytest.raises(NotImplementedError, match="cannot be changed"):
            change(torch.nn.Linear(2, 2))


def test_a_model_has_the_attributes_of_transformers(folder):
    ours, theirs = (kind.from_pretrained(folder) for kind in (qlorapp.AutoModelForCausalLM, transformers.AutoModelForCausalLM))
    for one in (ours, theirs):
        assert one.base_model is one.model and one.supports_gradient_checkpointing and not hasattr(one, "quantization_method")
        one.config.update({"use_cache": False, "of_my_own": 3})
        assert (one.config.use_cache, one.config.of_my_own) == (False, 3)
    assert load(folder).quantization_method == transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    states = []
    for one, config in ((ours, qlorapp.LoraConfig(r=2)), (theirs, peft.LoraConfig(r=2))):
        with pytest.raises(ValueError, match="adapter"):
            one.get_adapter_state_dict()
        one.add_adapter(config, adapter_name="mine")
        states.append(one.get_adapter_state_dict())
    assert states[0].keys() == states[1].keys() == ours.get_adapter_state_dict("mine").keys()
    with pytest.raises(
        NotImplementedError, match=r"\[from_config\] a model is read from a checkpoint.*save them by transformers"
    ):
        qlorapp.AutoModelForCausalLM.from_config(theirs.config)


def test_a_layers_compute_dtype_is_the_models(folder):
    model = load(folder)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert layer.compute_dtype is model.dtype
    layer.compute_dtype = torch.float64
    assert layer.compute_dtype is model.dtype


SPEAKS_OF_ATTENTION = """
import logging, sys, qlorapp
lines = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("qlorapp").addHandler(handler)
for kind in (None, "sdpa", "eager", "flash_attention_2", "flash_attention_2"):
    qlorapp.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=kind)
print([line for line in lines if "attn_implementation" in line])
"""


def test_an_attention_that_is_not_taken_is_said_once_as_a_warning(folder):
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    command = [sys.executable, "-c", SPEAKS_OF_ATTENTION, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (line,) = ast.literal_eval(done.stdout.splitlines()[-1])
    assert line == (
        "[from_pretrained] attn_implementation='flash_attention_2' has no effect: the fastest attention of the device is always used."
    )
