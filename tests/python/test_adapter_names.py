# SPDX-License-Identifier: Apache-2.0
"""Adapters by the name of a hub repository, from the local cache: found under PEFT's ways, or what is missing is named."""

import pytest
import qlorapp
import torch
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)

NAME = "me/ad"


def put(root, files):
    """A hub cache, as huggingface_hub lays it out; files: what the adapter's repository has, by name."""
    repository = root / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    for name, content in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(content)
    return snapshot


@pytest.fixture
def trained(folder, tmp_path, monkeypatch):
    """Values of an adapter, and its files; nothing may be asked of a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = load(folder, r=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(tmp_path / "saved")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir() if path.is_file()}
    return qlorapp.get_peft_model_state_dict(model), files


def base(folder):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder)


def test_adapters_and_configs_are_found_by_name(trained, folder, tmp_path):
    values, files = trained
    put(tmp_path / "hub", {**files, "generation_config.json": b'{"max_new_tokens": 7}'})
    model = qlorapp.PeftModel.from_pretrained(base(folder), NAME)
    model.load_adapter(NAME, "second")
    for name in ("default", "second"):
        found = qlorapp.get_peft_model_state_dict(model, adapter_name=name)
        assert found.keys() == values.keys() and all(torch.equal(found[key], values[key]) for key in values)
    assert qlorapp.PeftConfig.from_pretrained(NAME).r == 4
    chosen = qlorapp.GenerationConfig.from_pretrained(NAME, temperature=0.5)
    assert (chosen.max_new_tokens, chosen.temperature) == (7, 0.5)


def test_an_adapter_may_lie_in_a_folder_of_its_repository(trained, folder, tmp_path):
    values, files = trained
    put(tmp_path / "hub", {f"last/{name}": content for name, content in files.items()})
    model = qlorapp.PeftModel.from_pretrained(base(folder), NAME, subfolder="last")
    assert all(torch.equal(value, values[key]) for key, value in qlorapp.get_peft_model_state_dict(model).items())
    with pytest.raises(FileNotFoundError, match="adapter_config.json, adapter_model.safetensors is not in"):
        qlorapp.PeftModel.from_pretrained(base(folder), NAME)


def test_what_is_missing_is_named(trained, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="adapter_config.json, adapter_model.safetensors is not in .*me--ad"):
        qlorapp.PeftModel.from_pretrained(base(folder), NAME)
    with pytest.raises(FileNotFoundError, match="generation_config.json is not in .*me--ad"):
        qlorapp.GenerationConfig.from_pretrained(NAME)
    put(tmp_path / "hub", {"adapter_config.json": trained[1]["adapter_config.json"]})
    assert qlorapp.PeftConfig.from_pretrained(NAME).r == 4  # needs no weights
    with pytest.raises(FileNotFoundError, match="cache adapter_model.safetensors is not in .*me--ad/snapshots/0123abcd"):
        qlorapp.PeftModel.from_pretrained(base(folder), NAME)
