# SPDX-License-Identifier: Apache-2.0
"""Options of TrainingArguments and SFTConfig under every name that named releases had.

option_names.json is what those releases' signatures hold, read by scripts/list_option_names.py.
"""

import dataclasses
import json
import logging
import os
import pathlib
import re

import pytest
import qlorapp
import transformers
from tiny_run import qlorapp as command

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


def test_arguments_are_replaced_and_written_with_the_options_of_cpp(tmp_path):
    args = qlorapp.TrainingArguments(str(tmp_path), report_to="none", memory_budget="2GiB", checkpoint_keep="attention_only")
    again = dataclasses.replace(args, max_steps=4)
    assert (again.max_steps, again.memory_budget, again.checkpoint_keep) == (4, "2GiB", ["attention_only"])
    written = json.loads(again.to_json_string())
    assert written["memory_budget"] == "2GiB" and written["checkpoint_keep"] == ["attention_only"]


# --- the command


def test_what_divides_a_model_elsewhere_is_refused_with_an_option_that_divides_it_here():
    """Each refusal names options of this command that it uses, and base_sharding makes a process smaller by what it divides."""
    unused, used = unused_and_used(command("train", "--help-all").stdout)
    elsewhere = [name for name in unused if re.search("fsdp|deepspeed|parallel|^mp_", name)]
    assert {"fsdp", "fsdp_config", "deepspeed", "parallelism_config", "mp_parameters"} <= set(elsewhere)
    for name in elsewhere:
        done = command("train", "--model", "m", "--data", "d", "--output", "o", f"--{name}", "1")
        assert done.returncode == 2 and f"--{name} is not supported" in done.stderr
        named = set(re.findall(r"--(\w+)", done.stderr)) - {name}
        assert "base_sharding" in named and named <= used, done.stderr
    plan = ("plan", "--model", "llama-3-8b", "--gpu", "24GiB", "--batch", "1", "--seq", "512")
    whole, half = (peak(command(*plan, *more).stdout) for more in ((), ("--gpus", "2", "--base_sharding", "full")))
    assert whole - half > 1.5  # of 3.4 GiB in four bits, and of two tables of 1 GiB


def test_the_page_of_migration_names_options_that_the_command_uses():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    section = text[text.index("## From axolotl") : text.index("## On the command line")]
    cells = [line.split("|")[-2] for line in section.splitlines() if line.startswith("| `")] + [section.splitlines()[-2]]
    named = set(re.findall(r"`(\w+)(?:: [\w-]+)?`", "".join(cells)))
    _, used = unused_and_used(command("train", "--help-all").stdout)
    assert len(named) > 20 and named - used - {"messages", "prompt", "completion"} == set()


def unused_and_used(text: str) -> tuple[set[str], set[str]]:
    used, unused = re.split(r"^Accepted without effect", text, flags=re.MULTILINE)
    heads = ("\n".join(re.findall(r"^  --.*", part, re.MULTILINE)) for part in (unused, used))
    return tuple(set(re.findall(r"--(\w+)", head)) for head in heads)  # also of other names of an option


def peak(text: str) -> float:
    return float(re.search(r"([0-9.]+) GiB", text)[1])
