# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose manifest fits what a stranger wrote into them: each is refused by file and key, and none stops the program."""

import hashlib
import json
import pathlib
import shutil
import sys

import conftest
import peer
import pytest
from families import FAMILIES
from family_runs import rows
from family_runs import train as run
from lost_runs import refused, root, train, whole  # noqa: F401  (root and whole are fixtures)
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(conftest.ROOT / "tests" / "fuzz"))
import fuzz


def seal(checkpoint: pathlib.Path) -> None:
    """Writes the manifest of the files that are there."""
    path = checkpoint / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        if entry["sha256"] != hashlib.sha256(content).hexdigest():
            chunks = [content[at : at + (4 << 20)] for at in range(0, len(content), 4 << 20)]
            crcs = [f"{fuzz.crc32c(chunk):08x}" for chunk in chunks]
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "crc32c": crcs}
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    path.write_text(json.dumps({**manifest, "sha256": digest}, indent=1) + "\n")


@pytest.fixture
def changed(whole, tmp_path):
    """changed(file, keys or text) → a sealed copy of checkpoint-2."""

    def call(file, change):
        checkpoint = tmp_path / "run" / "checkpoint-2"
        shutil.copytree(whole / "checkpoint-2", checkpoint)
        path = checkpoint / file
        path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
        seal(checkpoint)
        return checkpoint

    return call


@pytest.mark.parametrize(
    "file, change, shown",
    [
        ("run_state.json", {"micro_step": -1}, "'micro_step' must be an integer from 0"),
        ("run_state.json", {"micro_step": 2**32}, "'micro_step' must be an integer from 0"),
        ("run_state.json", {"batch": 2**60}, "'batch' must be an integer from 0"),
        ("run_state.json", {"epoch": True}, "'epoch' must be an integer from 0"),
        ("run_state.json", {"seed": "2a\n[resume] forged"}, r"'seed' must be a string of hexadecimal digits; got '2a\x0a[resume] forged'"),
        ("run_state.json", {"loss_sum": "0"}, "'loss_sum' must be a number"),
        ("run_state.json", {"base_fingerprint": "0"}, "another base model"),
        ("run_state.json", {"train_data": "0"}, "the training data"),
        ("run_state.json", {"base_config": []}, "'base_config' must be an object"),
        ("run_state.json", {"base_config": {"rms_norm_eps": {}}}, "'base_config' must hold numbers"),
        ("run_state.json", {"base_config": {"rms_norm_eps": "x\n[resume] forged"}}, r'rms_norm_eps "x\n[resume] forged" → '),
        ("run_state.json", "[]", "lacks 'schema'"),
        ("run_state.json", '{"schema": ' * 5000, "nested at most"),
        ("training_args.json", {"per_device_train_batch_size": 0}, "per_device_train_batch_size must be"),
        ("training_args.json", {"per_device_train_batch_size": 2**62}, "per_device_train_batch_size"),
        ("training_args.json", {"gradient_accumulation_steps": -1}, "gradient_accumulation_steps must be"),
        ("training_args.json", {"learning_rate": "fast"}, "learning_rate"),
        ("training_args.json", "{", "invalid JSON"),
        ("trainer_state.json", {"log_history": {}}, "must hold a list 'log_history'"),
        ("trainer_state.json", {"log_history": [1]}, "log_history"),
        ("trainer_state.json", {"log_history": [{"loss": {}}]}, "log_history"),
        ("trainer_state.json", "[]", "must hold a list 'log_history'"),
        ("adapter_config.json", {"r": 0}, "r must be"),
        ("adapter_config.json", {"r": 2}, "the model has other adapters"),
    ],
)  # fmt: skip
def test_numbers_that_no_run_wrote_are_refused(root, changed, tmp_path, file, change, shown):
    checkpoint = changed(file, change)
    error = refused(*train(root, tmp_path / "out", resume_from_checkpoint=checkpoint))
    assert shown in error
    assert (
        "another base" in error
        or "a base whose config.json" in error
        or "other adapters" in error
        or "training data" in error
        or str(checkpoint / file) in error
    )


@pytest.mark.parametrize(
    "file, name, spoil, shown",
    [
        ("optimizer.safetensors", "exp_avg", lambda tensor: tensor[:-1], "'exp_avg' must have shape"),
        ("optimizer.safetensors", "exp_avg", lambda tensor: tensor.double(), "'exp_avg' must"),
        ("optimizer.safetensors", "exp_avg_sq", lambda tensor: None, "exp_avg_sq"),
        ("adapter_model.safetensors", None, lambda tensor: tensor * float("nan"), "must be finite"),
        ("adapter_model.safetensors", None, lambda tensor: tensor[:, :-1].contiguous(), "must have shape"),
    ],
)
def test_tensors_of_another_run_are_refused(root, whole, tmp_path, file, name, spoil, shown):
    checkpoint = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(whole / "checkpoint-2", checkpoint)
    tensors = load_file(checkpoint / file)
    name = name or next(iter(tensors))
    spoiled = spoil(tensors[name])
    tensors = {key: value for key, value in {**tensors, name: spoiled}.items() if value is not None}
    save_file(tensors, checkpoint / file, {"format": "pt"})
    seal(checkpoint)
    error = refused(*train(root, tmp_path / "out", resume_from_checkpoint=checkpoint))
    assert shown in error and str(checkpoint) in error


def test_the_best_checkpoint_of_a_stranger_leads_nowhere(root, changed, tmp_path):
    secret = tmp_path / "elsewhere" / "checkpoint-9"
    shutil.copytree(changed("trainer_state.json", {"best_model_checkpoint": str(secret), "best_global_step": 2}), secret)
    out = tmp_path / "out"
    result = peer.run_cli(*train(root, out, resume_from_checkpoint=tmp_path / "run" / "checkpoint-2"))
    assert "the best checkpoint, 'checkpoint-9', is not beside" in result.stderr
    assert json.loads((out / "trainer_state.json").read_text())["best_model_checkpoint"] is None


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    "keys, shown",
    [
        ({"rms_norm_eps": 0.02}, "rms_norm_eps 1e-"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}}, "rope_theta 10000.0 → 30000.0"),
        ({"rope_parameters": LLAMA3}, 'rope_type "default" → "llama3", rope_factor null → 8.0'),
    ],
)
def test_a_base_whose_config_computes_something_else_is_refused_by_field(root, whole, tmp_path, keys, shown):
    base = tmp_path / "model"
    shutil.copytree(root / "model", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **keys}))
    error = refused(*train(root, tmp_path / "out", model=base, resume_from_checkpoint=whole / "checkpoint-2"))
    assert "computes something else: " in error and shown in error


def test_windows_and_ropes_of_layers_are_compared_too(tmp_path):
    gemma = FAMILIES["Gemma 3"]
    peer.write_llama(tmp_path / "model", **gemma)
    data = rows(tmp_path)
    options = {"save_strategy": "steps", "save_steps": 2}
    run(tmp_path / "model", data, tmp_path / "whole", **options)
    ropes = {**gemma["rope_parameters"], "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    for change, shown in (
        ({"sliding_window": 7}, r"windows \[6,0,6\] → \[7,0,7\]"),
        ({"layer_types": ["full_attention"] * 3}, r"windows \[6,0,6\] → unset"),
        ({"rope_parameters": ropes}, r"ropes .*20000\.0"),
    ):
        config = json.loads((tmp_path / "model/config.json").read_text())
        shutil.copytree(tmp_path / "model", tmp_path / "other", dirs_exist_ok=True)
        (tmp_path / "other/config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=f"computes something else: .*{shown}"):
            run(tmp_path / "other", data, tmp_path / "out", resume_from=str(tmp_path / "whole/checkpoint-2"), **options)


def test_a_checkpoint_without_its_base_s_config_is_resumed_and_says_so(root, changed, whole, tmp_path):
    checkpoint = changed("run_state.json", {})
    state = json.loads((checkpoint / "run_state.json").read_text())
    del state["base_config"]
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    seal(checkpoint)
    result = peer.run_cli(*train(root, tmp_path / "out", resume_from_checkpoint=checkpoint))
    said = [line for line in result.stderr.splitlines() if "could not be compared" in line]
    assert len(said) == 1 and "rms_norm_eps" in said[0] and "rope_theta" in said[0] and str(checkpoint) in said[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
