# SPDX-License-Identifier: Apache-2.0
"""Words as people type them: lists, other trainers' names, folders in each other's place, options of sampling alone."""

import json
import re

import pytest
from conftest import ROOT
from tiny_run import qlorapp, write_model, write_rows


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    done = train(folder, "adapter", "--layers_to_transform", 0, 1, "--target_modules", "q_proj", "v_proj")
    assert done.returncode == 0, done.stderr
    return folder


def train(here, output, *arguments):
    common = ["--model", "model", "--data", "rows.jsonl", "--output", output, "--max_steps", 1]
    return qlorapp("train", *common, *arguments, cwd=here)


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    "words",
    [["k_proj, up_proj"], ["k_proj", "up_proj"], ["k_proj,", "up_proj"], [" k_proj ,up_proj,"], ['["k_proj", "up_proj"]']],
)
def test_a_list_may_have_spaces_or_several_words(here, tmp_path, words):
    done = train(here, tmp_path / "out", "--target_modules", *words, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert sorted(config_of(tmp_path / "out")["target_modules"]) == ["k_proj", "up_proj"]


def test_numbers_and_mixtures_are_lists_too(here, tmp_path):
    assert sorted(config_of(here / "adapter")["layers_to_transform"]) == [0, 1]
    keep = ["--gradient_checkpointing", "--checkpoint_keep", "input_only:1", "everything:1", "--per_device_train_batch_size", 2]
    assert train(here, tmp_path / "out", *keep).returncode == 0
    options = json.loads((tmp_path / "out" / "checkpoint-1" / "training_args.json").read_text())
    assert options["checkpoint_keep"] == ["input_only:1", "everything:1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target_modules", "q_proj", "--save_strategy", "no", "v_proj"], "'v_proj' is not an option, and --save_strategy has one value"),
        (["rows.jsonl"], "'rows.jsonl' is not an option, and --max_steps has one value"),
        (["--target_modules", "[qv]_proj", "o_proj"], "one expression; got 'o_proj' after '[qv]_proj'"),
    ],
)  # fmt: skip
def test_a_word_that_belongs_to_nothing_is_named(here, tmp_path, words, said):
    done = train(here, tmp_path / "out", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


NAMES = re.findall(r'OtherName\{"(\w+)", "(\w*)"', (ROOT / "cli" / "other_names.cpp").read_text())


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("train", "lr", "learning_rate"), ("train", "batch-size", "per_device_train_batch_size"), ("train", "cutoff_len", "max_length"),
        ("train", "model_name_or_path", "model"), ("train", "micro_batch_size", "per_device_train_batch_size"), ("train", "epochs", "num_train_epochs"),
        ("train", "iters", "max_steps"), ("train", "sample_packing", "packing"), ("train", "lora_target", "target_modules"),
        ("train", "adapter_path", "output"), ("generate", "adapter_path", "adapter"), ("plan", "batch_size", "per_device_train_batch_size"),
        ("eval", "batch_size", "per_device_eval_batch_size"), ("generate", "max_tokens", "max_new_tokens"), ("eval", "dataset", "data"),
    ],
)  # fmt: skip
def test_another_trainers_name_is_answered_with_this_commands(command, theirs, ours):
    done = qlorapp(command, f"--{theirs}", "1")
    assert done.returncode == 2 and f"there is no option '--{theirs.replace('-', '_')}'. It is --{ours} here." in done.stderr


def test_each_other_name_leads_to_an_option_of_some_command():
    commands = ("train", "plan", "eval", "generate", "chat", "merge", "quantize")
    options = {name for command in commands for name in re.findall(r"--(\w+)", qlorapp(command, "--help-all").stdout)}
    assert len(NAMES) > 100 and {ours for _, ours in NAMES if ours} - options == set()
    trains = set(re.findall(r"^  --(\w+)", qlorapp("train", "--help-all").stdout, re.MULTILINE))
    # A known name is never looked up; this one is known to train alone.
    assert {theirs for theirs, ours in NAMES if theirs in trains and ours in trains} <= {"base_model_name_or_path"}


@pytest.mark.parametrize("name", ["qq", "x", "lr2"])
def test_nothing_is_suggested_that_only_looks_alike(name):
    said = qlorapp("train", f"--{name}", "1").stderr
    assert "Did you mean 'r'" not in said and "Did you mean 'fp8'" not in said
    assert "Did you mean 'learning_rate'" in qlorapp("train", "--learning_rte", "1").stderr


@pytest.mark.parametrize(
    "command", [["eval", "--data", "rows.jsonl"], ["generate", "--prompt", "Hi"], ["merge", "--output", "x"], ["train", "--data", "rows.jsonl", "--output", "x"]]
)  # fmt: skip
def test_a_model_and_an_adapter_in_each_others_place_are_named(here, command):
    option = "init_adapter" if command[0] == "train" else "adapter"
    swapped = qlorapp(*command, "--model", "adapter", f"--{option}", "model", cwd=here)
    assert swapped.returncode == 2 and "[model] adapter holds an adapter, not a model; its base is model." in swapped.stderr
    twice = qlorapp(*command, "--model", "model", f"--{option}", "model", cwd=here)
    assert twice.returncode == 2 and f"[{option}] model holds a model, not an adapter." in twice.stderr
    assert not (here / "x").exists()


@pytest.mark.parametrize("command", [["plan"], ["quantize", "--output", "x"]])
def test_other_commands_name_an_adapter_as_model_too(here, command):
    done = qlorapp(*command, "--model", "adapter", cwd=here)
    assert done.returncode == 2 and "[model] adapter holds an adapter, not a model" in done.stderr


@pytest.mark.parametrize("given", [["--temperature", 1.5], ["--top_p", 0.99], ["--top_k", 40], ["--min_p", 0.001]])
def test_an_option_of_sampling_samples(here, given):
    def generated(*arguments):
        return qlorapp(
            "generate", "--model", "model", "--prompt", "What is 2 + 2?", "--max_new_tokens", 12, *arguments, cwd=here
        )

    sampled = generated(*given)
    assert sampled.stdout == generated(*given, "--do_sample").stdout != generated().stdout and sampled.stderr == ""
    greedy = generated(*given, "--do_sample", "false")
    assert greedy.stdout == generated().stdout
    assert f"{given[0]} has no effect with --do_sample false" in greedy.stderr
