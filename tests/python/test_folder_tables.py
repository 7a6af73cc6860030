# SPDX-License-Identifier: Apache-2.0
"""Odd checkpoints and config.json files that transformers loads: the command and Python compute its losses, or refuse by name."""

import json
import re

import conftest
import peer
import pytest
import qlorapp
import torch
import transformers
from safetensors.torch import load_file, save_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TINY = conftest.ROOT / "examples/data/tiny-llama"
ROW = [5, 17, 99, 240, 33, 61, 8, 120, 310, 44, 7, 19]


@pytest.fixture
def variant(tmp_path):
    """variant(name, change of the tensors, **keys of config.json; None removes one) → a folder."""

    def call(name, change=None, **keys):
        folder = tmp_path / name
        folder.mkdir()
        config = {**json.loads((TINY / "config.json").read_text()), **keys}
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        tensors = load_file(TINY / "model.safetensors")
        save_file(change(tensors) if change else tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return call


def other_head(tensors):
    head = torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(3)) * 0.1
    return {**tensors, HEAD: head.bfloat16()}


def head_alone(tensors):
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def theirs(folder) -> float:
    ids = torch.tensor([ROW])
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, labels=ids).loss.item()


def ours(folder) -> float:
    ids = torch.tensor([ROW])
    with torch.no_grad():
        return qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, labels=ids).loss.item()


def evaluated(folder, rows, *words) -> float:
    rows.write_text(json.dumps({"input_ids": ROW}))
    result = peer.run_cli("eval", "--model", folder, "--data", rows, "--dtype", "float32", "--load_in_4bit", "false", *words)
    return float(re.search(r"^eval_loss (\S+)", result.stdout, re.M).group(1))


@pytest.mark.parametrize(
    "change, keys",
    [
        (other_head, {}),
        (other_head, {"architectures": ["LlamaModel"]}),
        (lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].clone()}, {}),
        (head_alone, {}),
        (lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, {"architectures": ["LlamaModel"]}),
        (None, {"architectures": ["Aurora", "LlamaForCausalLM"], "pretraining_tp": 4, "dtype": "torch.bfloat16"}),
        (None, {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 2, "dtype": "auto"}),
        (None, {"architectures": None, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "hidden_dropout": 0.5, "hidden_act": "swish"}),
        (None, {"dtype": None, "torch_dtype": "auto", "original_max_position_embeddings": 16}),
    ],
)  # fmt: skip
def test_a_folder_that_transformers_loads_has_its_loss(variant, tmp_path, change, keys):
    folder = variant("model", change, **keys)
    wanted = theirs(folder)
    assert ours(folder) == pytest.approx(wanted, abs=2e-5)
    assert evaluated(folder, tmp_path / "rows.jsonl") == pytest.approx(wanted, abs=2e-5)


def test_two_tables_under_a_tied_config_live_through_training_and_saving(variant, tmp_path):
    folder = variant("model", other_head)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=transformers.BitsAndBytesConfig(**options))
    model.save_pretrained(tmp_path / "saved")
    peer.run_cli("quantize", "--model", folder, "--output", tmp_path / "quantized")
    for written in (tmp_path / "saved", tmp_path / "quantized"):
        tensors = load_file(written / "model.safetensors")
        assert torch.equal(tensors[HEAD].float(), load_file(folder / "model.safetensors")[HEAD].float())
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": ROW[i:] + ROW[:i]}) + "\n" for i in range(4)))
    result = peer.run_cli(
        "train", "--model", folder, "--data", rows, "--output", tmp_path / "adapter", "--max_steps", "1", "--logging_steps", "1",
        "--per_device_train_batch_size", "4", "--load_in_4bit", "false", "--dtype", "float32",
    )  # fmt: skip
    said = [line for line in result.stderr.splitlines() if "lm_head.weight differ" in line]
    assert len(said) == 1 and str(folder / "model.safetensors") in said[0]
    ids = torch.tensor([ROW[i:] + ROW[:i] for i in range(4)])
    with torch.no_grad():
        wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, labels=ids).loss.item()
    state = json.loads((tmp_path / "adapter" / "trainer_state.json").read_text())
    assert state["log_history"][0]["loss"] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(
    "change, keys, shown",
    [
        (None, {"num_hidden_layers": 3}, "Set num_hidden_layers to the checkpoint's, 4"),
        (lambda t: {**t, "model.layers.2.self_attn.k_norm.weight": torch.ones(32)}, {}, "'model.layers.2.self_attn.k_norm.weight'"),
        (None, {"rope_paramters": {"rope_theta": 5e5, "rope_type": "default"}}, "Did you mean 'rope_parameters'?"),
        (None, {"rms_norm_esp": 1e-2}, "Did you mean 'rms_norm_eps'?"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_in_silence_is_refused_everywhere(variant, tmp_path, change, keys, shown):
    folder, rows = variant("model", change, **keys), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": ROW}))
    for words in (
        ["eval", "--data", rows],
        ["train", "--data", rows, "--output", tmp_path / "out"],
        ["quantize", "--output", tmp_path / "four"],
        ["plan", "--gpu", "cpu"],
    ):
        result = peer.run_cli(words[0], "--model", folder, *words[1:], check=False)
        assert result.returncode == 2 and shown in result.stderr and str(folder) in result.stderr, (words, result.stderr)
    with pytest.raises(qlorapp.FormatError, match=re.escape(shown)):
        qlorapp.AutoModelForCausalLM.from_pretrained(folder)


def test_the_loop_under_python_does_not_resume_on_a_base_that_computes_something_else(variant, tmp_path):
    folder = variant("model")

    def trainer():
        model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True)
        model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(task_type="CAUSAL_LM"))
        args = qlorapp.TrainingArguments(tmp_path / "out", max_steps=2, save_steps=1, report_to=[], use_cpu=True)
        return qlorapp.Trainer(model, args, train_dataset=[{"input_ids": ROW, "labels": ROW}] * 4)

    trainer().train()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 3e-3}))
    with pytest.raises(qlorapp.FormatError, match=r"rms_norm_eps 1e-05 → 0\.003"):
        trainer().train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
