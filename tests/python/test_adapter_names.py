# SPDX-License-Identifier: Apache-2.0
"""Models and adapters by the name of a hub repository, from the local cache: found, or what is missing is named."""

import json
import pathlib

import peft
import pytest
import qlorapp
import torch
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)

BASE, NAME = "me/base", "me/ad"


def put(root, name, files):
    """A hub cache, as huggingface_hub lays it out; files: what the repository has, by name."""
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    for file, content in files.items():
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_bytes(content)
    return snapshot


def files_of(place: pathlib.Path):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """(values of an adapter, its files, the cache), the base in the cache; nothing may be asked of a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    put(tmp_path / "hub", BASE, files_of(folder))
    model = load(folder, r=4, task_type="CAUSAL_LM")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": BASE}))
    return peft.get_peft_model_state_dict(model), files_of(tmp_path / "saved"), tmp_path / "hub"


def assert_values(model, values):
    parameters = {
        name.removeprefix("base_model.model.").replace(".default", ""): p
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    assert len(parameters) == len(values)
    for name, value in values.items():
        assert torch.equal(parameters[name.removeprefix("base_model.model.")], value), name


def test_an_adapter_s_name_gives_its_base_with_it(hub):
    values, files, cache = hub
    put(cache, NAME, files)
    assert_values(qlorapp.AutoModelForCausalLM.from_pretrained(NAME, load_in_4bit=True), values)
    model = qlorapp.AutoPeftModelForCausalLM.from_pretrained(NAME, load_in_4bit=True)
    assert isinstance(model, peft.PeftModel)
    assert_values(model, values)
    merged = model.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.up_proj, qlorapp.nn.Linear4bit)


def test_an_adapter_may_lie_in_a_folder_of_its_repository(hub):
    values, files, cache = hub
    put(cache, NAME, {f"last/{name}": content for name, content in files.items()})
    assert_values(qlorapp.AutoModelForCausalLM.from_pretrained(NAME, subfolder="last"), values)


def test_names_are_merged(hub, tmp_path):
    put(hub[2], NAME, hub[1])
    qlorapp.merge(BASE, NAME, tmp_path / "merged")
    merged = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        expected = qlorapp.AutoModelForCausalLM.from_pretrained(NAME)(ids).logits
        assert (merged(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_missing_is_named(hub, tmp_path):
    _, files, cache = hub
    with pytest.raises(FileNotFoundError, match=r"me/ad.*Cannot find an appropriate cached snapshot"):
        qlorapp.AutoModelForCausalLM.from_pretrained(NAME)
    put(cache, NAME, {"adapter_config.json": files["adapter_config.json"]})
    with pytest.raises(FileNotFoundError, match=r"me--ad/snapshots/0123abcd has no adapter_model\.safetensors"):
        qlorapp.merge(BASE, NAME, tmp_path / "out")
