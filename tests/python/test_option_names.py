# SPDX-License-Identifier: Apache-2.0
"""Options of TrainingArguments and SFTConfig under every name that named releases had.

option_names.json is what those releases' signatures hold, read by scripts/list_option_names.py.
"""

import dataclasses
import json
import logging
import os
import pathlib

import pytest
import qlorapp
import transformers

NAMES = json.loads((pathlib.Path(__file__).parent / "option_names.json").read_text())


def test_the_list_of_the_installed_release_is_its_signature():
    listed = NAMES["TrainingArguments"].get(f"transformers-{transformers.__version__}")
    if listed is None:
        pytest.skip(f"no list of transformers {transformers.__version__}")
    assert set(listed) == {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}


@pytest.mark.parametrize("kind", ["TrainingArguments", "SFTConfig"])
def test_no_name_of_a_release_is_unknown(tmp_path, kind):
    given = set().union(*NAMES["TrainingArguments"].values(), *NAMES[kind].values())
    known = {field.name for field in dataclasses.fields(getattr(qlorapp, kind))}
    if kind == "TrainingArguments":
        assert len(given - known) > 30
    older = dict.fromkeys(given - known)  # None asks for nothing
    assert getattr(qlorapp, kind)(str(tmp_path), report_to="none", **older).output_dir == str(tmp_path)


OLDER = {
    "push_to_hub_model_id": ("me/it", "hub_model_id", "me/it"),
    "push_to_hub_token": ("secret", "hub_token", "secret"),
    "per_gpu_eval_batch_size": (3, "per_device_eval_batch_size", 3),
    "include_inputs_for_metrics": (True, "include_for_metrics", ["inputs"]),
    "adafactor": (True, "optim", "adafactor"),
    "warmup_ratio": (0.03, "warmup_steps", 0.03),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_an_older_name_is_the_newer_one(tmp_path, name):
    value, newer, expected = OLDER[name]
    assert getattr(qlorapp.TrainingArguments(str(tmp_path), report_to="none", **{name: value}), newer) == expected


def test_what_has_no_effect_any_more_is_logged_with_the_reason(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    with caplog.at_level(logging.WARNING, logger="qlorapp"):
        qlorapp.TrainingArguments(str(tmp_path), report_to="none", save_safetensors=True, logging_dir=tmp_path / "logs")
    assert "save_safetensors has no effect: every file of weights is safetensors." in caplog.text
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "logs")


def test_arguments_are_replaced_and_written_with_the_options_of_the_cpp_loop(tmp_path):
    args = qlorapp.TrainingArguments(str(tmp_path), report_to="none", memory_budget="2GiB", checkpoint_keep="attention_only")
    again = dataclasses.replace(args, max_steps=4)
    assert (again.max_steps, again.memory_budget, again.checkpoint_keep) == (4, "2GiB", ["attention_only"])
    written = json.loads(again.to_json_string())
    assert written["memory_budget"] == "2GiB" and written["checkpoint_keep"] == ["attention_only"]
