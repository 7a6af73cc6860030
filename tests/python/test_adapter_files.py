# SPDX-License-Identifier: Apache-2.0
"""save_pretrained of a PEFT model: the same files as PEFT's, which take their places together. faults.py disturbs it at each file call."""

import copy
import json
import os

import peer
import peft
import pytest
import qlorapp
import torch


@pytest.fixture
def model(tmp_path):
    peer.write_llama(tmp_path / "base", num_hidden_layers=1)
    base = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return qlorapp.get_peft_model(base, qlorapp.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


#: Files that this library adds to PEFT's.
OURS = ("MANIFEST.json", "qlorapp_base.json")


def files(folder):
    """PEFT's files."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in OURS)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_files_are_pefts(model, tmp_path):
    model.add_adapter("second", qlorapp.LoraConfig(r=3, target_modules=["v_proj"]))
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
        (tmp_path / name / "other.txt").write_text("stays")
    model.save_pretrained(tmp_path / "ours")
    peft.PeftModel.save_pretrained(model, tmp_path / "theirs")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert set(files(tmp_path / "ours")) == {
        f"{part}{name}" for part in ("", "second/") for name in ("adapter_config.json", "adapter_model.safetensors")
    } | {"README.md", "other.txt"}
    assert "mine" in (tmp_path / "ours" / "README.md").read_text()


def test_pefts_arguments_keep_their_meaning(model, tmp_path):
    model.add_adapter("second", qlorapp.LoraConfig(r=3, target_modules=["v_proj"]))
    model.save_pretrained(tmp_path / "bin", False, ["default"])
    assert set(files(tmp_path / "bin")) == {"README.md", "adapter_config.json", "adapter_model.bin"}
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert files(tmp_path / "none") == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="should be a directory"):
        model.save_pretrained(tmp_path / "file")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        next(p for name, p in copied.named_parameters() if "lora_B" in name).fill_(1)
    for each, folder in ((model, tmp_path / "first"), (copied, tmp_path / "copy")):
        each.save_pretrained(folder)
    name = "adapter_model.safetensors"
    assert (tmp_path / "first" / name).read_bytes() != (tmp_path / "copy" / name).read_bytes()


def test_a_save_that_fails_leaves_the_old_adapter(model, tmp_path, monkeypatch):
    out = tmp_path / "adapter"
    model.save_pretrained(out)
    old = files(out)
    model.peft_config["default"].lora_alpha = 99
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1)

    def fail(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(peft.PeftConfig, "save_pretrained", fail)  # the weights are written before it
    for folder in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="no space"):
            model.save_pretrained(folder)
    assert files(out) == old
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    model.save_pretrained(out)
    assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == 99
    assert set(os.listdir(out)) == {"README.md", "adapter_config.json", "adapter_model.safetensors", *OURS}


@pytest.mark.parametrize("way", ["AutoPeftModelForCausalLM", "Trainer"])
def test_models_that_come_from_elsewhere_save_so_too(model, way, tmp_path):
    model.save_pretrained(tmp_path / "adapter")
    if way == "Trainer":
        loaded = peft.PeftModel.from_pretrained(model.unload(), tmp_path / "adapter", is_trainable=True)
        assert "save_pretrained" not in vars(loaded)
        args = qlorapp.TrainingArguments(tmp_path / "run", report_to="none", use_cpu=True)
        qlorapp.Trainer(loaded, args, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    else:
        loaded = qlorapp.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "again")
    assert "save_pretrained" in vars(loaded)
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
