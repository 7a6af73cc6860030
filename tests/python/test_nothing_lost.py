# SPDX-License-Identifier: Apache-2.0
"""Runs that were stopped, folders that were damaged, and inputs that changed: nothing is lost, and nothing wrong is used in silence."""

import json
import os
import shutil
import signal
import subprocess
import time

import peer
import pytest
import torch
from conftest import BUILD, ROOT
from lost_runs import STEPS, damage, refused, root, train, weights, whole  # noqa: F401  (root and whole are fixtures)
from safetensors.torch import load_file, save_file

# --- one run, one folder


def test_a_new_run_in_an_old_folder_is_not_resumed_from_the_old_run(root, tmp_path):
    out = tmp_path / "out"
    peer.run_cli(*train(root, out))
    process = start(train(root, out, overwrite_output_dir="true", save_strategy="no", max_steps=400), awaited="'loss'")
    process.kill()
    process.communicate()
    error = refused(*train(root, out, resume_from_checkpoint="true"))
    assert "no checkpoint to resume from" in error and "checkpoint-6 (of an earlier run)" in error


def test_two_runs_cannot_write_into_one_folder(root, tmp_path):
    out = tmp_path / "out"
    process = start(train(root, out, max_steps=400, save_steps=1), awaited="saved ")
    began = time.monotonic()
    error = refused(*train(root, out, resume_from_checkpoint="true"))
    assert f"process {process.pid} on " in error and time.monotonic() - began < 5
    process.terminate()
    process.communicate()
    peer.run_cli(*train(root, out, max_steps=400, save_steps=300, resume_from_checkpoint="true"))


def start(words, awaited):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([BUILD / "qlorapp", *map(str, words)], env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    while awaited not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    return process


def test_an_output_folder_may_be_a_link_and_a_path_may_end_in_a_slash(root, whole, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    peer.run_cli(*train(root, tmp_path / "link"))
    assert weights(tmp_path / "far") == weights(whole)
    peer.run_cli(
        *train(root, tmp_path / "link", resume_from_checkpoint=f"{tmp_path}/far/checkpoint-2/", resume_with_changes="true")
    )
    assert json.loads((tmp_path / "far" / "run.json").read_text())["from"] == "checkpoint-2"
    peer.run_cli("quantize", "--model", root / "model", "--output", tmp_path / "link" / "quantized")


def test_the_best_checkpoint_is_never_that_of_an_older_run(root, tmp_path):
    """The best evaluation is at step 2, which this run does not save, and the older one did."""
    peer.write_rows(tmp_path / "eval.jsonl", 4, seed=9)
    out = tmp_path / "out"
    peer.run_cli(*train(root, out, seed=9))
    evaluated = {
        "eval_data": tmp_path / "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    options = {**evaluated, "greater_is_better": "true", "save_steps": 4, "overwrite_output_dir": "true", "logging_steps": 1}
    peer.run_cli(*train(root, out, **options))
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2 and state["best_model_checkpoint"] is None


# --- damage


FILES = ("adapter_model.safetensors", "optimizer.safetensors", "run_state.json", "trainer_state.json", "MANIFEST.json")


@pytest.mark.parametrize("harm", ["flip", "zero", "other step", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(root, whole, tmp_path, harm):
    out = tmp_path / "out"
    for file in FILES:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        damage(out / "checkpoint-6", file, harm)
        found = peer.run_cli("inspect", out / "checkpoint-6", check=False)
        assert found.returncode == 1 and "DAMAGED" in found.stdout, file
        error = refused(*train(root, tmp_path / "no", resume_from_checkpoint=out / "checkpoint-6"))
        assert str(out / "checkpoint-6") in error and (file in error or file == "MANIFEST.json")
    result = peer.run_cli(*train(root, out, resume_from_checkpoint="true"))
    assert "checkpoint-4; skipped: [checkpoint-6 (" in result.stderr
    assert weights(out) == weights(whole)
    assert peer.run_cli("inspect", out).stdout.startswith(f"{out}: output folder of a run, whole")


def test_the_best_checkpoint_is_one_of_this_folder(root, tmp_path):
    peer.write_rows(tmp_path / "eval.jsonl", 4, seed=9)
    best = {"eval_data": tmp_path / "eval.jsonl", "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": "true"}
    out = tmp_path / "out"
    peer.run_cli(*train(root, out, **best, max_steps=4))
    for state in out.glob("*/trainer_state.json"):
        assert json.loads(state.read_text())["best_model_checkpoint"].startswith(str(out))
    moved = tmp_path / "moved"
    out.rename(moved)
    result = peer.run_cli(*train(root, moved, **best, resume_from_checkpoint="true"))
    assert f"loaded the adapters of {moved}/checkpoint-" in result.stdout


# --- changed inputs


def test_changed_data_are_refused_and_may_be_allowed(root, whole, tmp_path):
    lines = (root / "rows.jsonl").read_text().splitlines(keepends=True)
    token = json.loads(lines[3])
    token["input_ids"][2] += 1
    changed = {
        "reversed": lines[::-1],
        "another token": [*lines[:3], json.dumps({**token, "labels": token["labels"]}) + "\n", *lines[4:]],
        "appended": [*lines, lines[0]],
    }
    for name, rows in changed.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(rows))
        options = {"data": data, "resume_from_checkpoint": whole / "checkpoint-2"}
        assert "the training data (other rows, or another order of them)" in refused(*train(root, tmp_path / "no", **options))
        result = peer.run_cli(*train(root, tmp_path / name, **options, resume_with_changes="true"))
        assert "continues" in result.stderr and "the training data" in result.stderr


@pytest.mark.parametrize(
    "option, value, shown",
    [
        ("learning_rate", 2e-2, "learning_rate 0.01 → 0.02"),
        ("lr_scheduler_type", "cosine", 'lr_scheduler_type "linear" → "cosine"'),
        ("warmup_steps", 3, "warmup_steps 0.0 → 3.0"),
        ("seed", 7, "seed 42 → 7"),
        ("data_seed", 7, "data_seed 42 → 7"),
        ("gradient_accumulation_steps", 1, "gradient_accumulation_steps x processes 2 x 2 x 1 → 2 x 1 x 1"),
        ("lora_dropout", 0.1, "lora_dropout 0 → 0.1"),
        ("adam_beta2", 0.99, "adam_beta2 0.999 → 0.99"),
        ("weight_decay", 0.1, "weight_decay 0.0 → 0.1"),
        ("max_grad_norm", 0.5, "max_grad_norm 1.0 → 0.5"),
        ("train_sampling_strategy", "sequential", "train_sampling_strategy random → sequential"),
    ],
)
def test_changed_options_are_named_and_refused(root, whole, tmp_path, option, value, shown):
    error = refused(*train(root, tmp_path / "no", **{option: value}, resume_from_checkpoint=whole / "checkpoint-2"))
    assert shown in error and "--resume_with_changes" in error


def test_what_does_not_change_the_numbers_is_logged(root, whole, tmp_path):
    options = {"save_steps": 3, "logging_steps": 1, "max_steps": 7, "resume_from_checkpoint": whole / "checkpoint-2"}
    result = peer.run_cli(*train(root, tmp_path / "out", **options))
    assert all(text in result.stdout for text in ["save_steps 2.0 → 3.0", "logging_steps 500.0 → 1.0", "max_steps 6 → 7"])


def test_each_byte_of_the_base_counts(root, whole, tmp_path):
    tensors = load_file(root / "model" / "model.safetensors")
    for name, place in [("model.norm.weight", -1), ("model.embed_tokens.weight", -1), ("model.embed_tokens.weight", 4097)]:
        model = tmp_path / name / str(place)
        shutil.copytree(root / "model", model)
        changed = {key: value.clone() for key, value in tensors.items()}
        changed[name].view(-1)[place] += 1e-6
        save_file(changed, model / "model.safetensors", {"format": "pt"})
        options = {"model": model, "resume_from_checkpoint": whole / "checkpoint-2"}
        assert "another base model" in refused(*train(root, tmp_path / "no", **options))


def test_the_scales_of_the_base_count(root, tmp_path):
    model = tmp_path / "nf4"
    peer.run_cli("quantize", "--model", root / "model", "--output", model)
    peer.run_cli(*train(root, tmp_path / "out", model=model))
    tensors = load_file(model / "model.safetensors")
    name = next(key for key in tensors if key.endswith("absmax"))
    tensors[name].view(-1)[0] += 1
    other = tmp_path / "other"
    shutil.copytree(model, other)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    error = refused(*train(root, tmp_path / "no", model=other, resume_from_checkpoint=tmp_path / "out" / "checkpoint-2"))
    assert "another base model" in error


# --- the end of a run


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_from_which_the_run_ends_in_the_same_bytes(root, tmp_path, how):
    out, steps = tmp_path / "out", 300
    process = start(train(root, out, max_steps=steps, save_strategy="no"), awaited="'loss'")
    began = time.monotonic()
    process.send_signal(how)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + how, errors
    assert time.monotonic() - began < 5
    assert f"stopped by {how.name} after step" in rest
    peer.run_cli(*train(root, out, max_steps=steps, save_strategy="no", resume_from_checkpoint="true"))
    peer.run_cli(*train(root, tmp_path / "whole", max_steps=steps, save_strategy="no"))
    assert weights(out) == weights(tmp_path / "whole")
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_a_second_signal_ends_the_process_at_once(root, tmp_path):
    peer.write_llama(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    peer.write_rows(tmp_path / "rows.jsonl", 300, seed=9)
    options = {"model": tmp_path / "model", "data": tmp_path / "rows.jsonl", "per_device_train_batch_size": 64}
    process = start(train(root, tmp_path / "out", **options), awaited="plan:")
    time.sleep(0.2)  # the first micro-batch lasts seconds
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    rest, _ = process.communicate(timeout=5)
    assert process.returncode == 130 and "stopped by" not in rest


def test_a_closed_pipe_leaves_a_checkpoint(root, tmp_path):
    process = start(train(root, tmp_path / "out", max_steps=2000, logging_steps=1, save_strategy="no"), awaited="'loss'")
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert list((tmp_path / "out").glob("checkpoint-*"))


def test_a_stop_in_an_evaluation_owes_it_to_the_resumed_run(root, tmp_path):
    peer.write_rows(tmp_path / "eval.jsonl", 1500, seed=9)
    options = {
        "eval_data": tmp_path / "eval.jsonl", "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "per_device_eval_batch_size": 1,
        "logging_steps": 1, "load_best_model_at_end": "true",
    }  # fmt: skip
    out = tmp_path / "out"
    process = start(train(root, out, **options), awaited="'step': 3}")
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped by SIGTERM after step 3" in rest and "eval_loss" not in rest
    peer.run_cli(*train(root, out, **options, resume_from_checkpoint="true"))
    peer.run_cli(*train(root, tmp_path / "whole", **options))
    assert weights(out) == weights(tmp_path / "whole")

    assert entries(out) == entries(tmp_path / "whole")


def entries(folder):
    """The log without what a clock wrote."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in entry.items() if not k.endswith(("_runtime", "_per_second"))} for entry in history]


def test_a_run_that_was_killed_behind_its_last_checkpoint_makes_up_for_the_end_of_its_epoch(root, tmp_path):
    peer.write_rows(tmp_path / "eval.jsonl", 4, seed=9)
    options = {"eval_data": tmp_path / "eval.jsonl", "eval_strategy": "epoch"}
    peer.run_cli(*train(root, tmp_path / "whole", **options))
    assert any("eval_loss" in entry for entry in entries(tmp_path / "whole"))
    last = tmp_path / "whole" / "checkpoint-6"
    assert not any("eval_loss" in entry for entry in entries(last))
    peer.run_cli(*train(root, tmp_path / "out", **options, resume_from_checkpoint=last))
    assert entries(tmp_path / "out") == entries(tmp_path / "whole")


def test_a_stop_is_resumable_although_only_the_model_is_saved(root, tmp_path):
    out = tmp_path / "out"
    options = {"max_steps": 300, "save_steps": 2, "save_only_model": "true"}
    process = start(train(root, out, **options), awaited="saved ")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    peer.run_cli(*train(root, out, **options, resume_from_checkpoint="true"))


@pytest.mark.parametrize("before, now", [((4, 1), (2, 2)), ((2, 2), (4, 1))])
def test_another_split_of_the_same_batch_goes_on_where_the_old_one_was(root, tmp_path, before, now):
    rows = (root / "rows.jsonl").read_text().splitlines(keepends=True)[:10]  # the last step of an epoch has two rows
    (tmp_path / "rows.jsonl").write_text("".join(rows))

    def split(size, steps):
        return {
            "data": tmp_path / "rows.jsonl",
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps,
            "save_steps": 1,
        }

    peer.run_cli(*train(root, tmp_path / "whole", **split(*before)))
    for step in (2, 3, 4):
        out = tmp_path / str(step)
        peer.run_cli(*train(root, out, **split(*now), resume_from_checkpoint=tmp_path / "whole" / f"checkpoint-{step}"))
        ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "whole"))
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def test_half_precision_that_never_becomes_finite_stops_with_the_block(root, tmp_path):
    tensors = load_file(root / "model" / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] *= 3e4  # finite in float16; its products are not
    model = tmp_path / "model"
    shutil.copytree(root / "model", model)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    words = train(root, tmp_path / "out", model=model, fp16="true", max_steps=40, num_train_epochs=9)
    result = peer.run_cli(*words, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "17 optimizer steps in a row" in result.stderr and "Block 1 of 1 is the first" in result.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"])
def test_a_base_that_is_not_finite_is_refused(root, tmp_path, name, value):
    tensors = load_file(root / "model" / "model.safetensors")
    tensors[name].view(-1)[-3] = value
    model = tmp_path / "model"
    shutil.copytree(root / "model", model)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    speaks = tmp_path / "model with a tokenizer"
    shutil.copytree(model, speaks)
    shutil.copy(ROOT / "examples" / "data" / "tiny-llama" / "tokenizer.json", speaks)
    for words in (
        ["eval", "--model", model, "--data", root / "rows.jsonl"],
        ["quantize", "--model", model, "--output", tmp_path / "out"],
        ["generate", "--model", speaks, "--prompt", "a"],
        train(root, tmp_path / "out", model=model),
    ):
        error = refused(*words)
        assert f"[{model}" in error and name in error and "must be finite" in error
    assert not (tmp_path / "out").exists()


def test_a_killed_quantize_does_not_block_the_next(root, tmp_path):
    peer.write_llama(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    out = tmp_path / "out"
    words = [BUILD / "qlorapp", "quantize", "--model", tmp_path / "model", "--output", out]
    with subprocess.Popen(list(map(str, words))) as process:
        while not (out.exists() and os.listdir(out)):
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL and os.listdir(out)
    peer.run_cli(*words[1:])
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert peer.run_cli("inspect", out).stdout.startswith(f"{out}: four-bit model, whole")


# --- files that are not what they seem


def test_a_link_to_nothing_is_refused_before_the_training(root, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is a link to a folder that does not exist" in refused(*train(root, tmp_path / "link"))


def test_a_pipe_without_a_writer_is_refused_and_one_with_a_writer_is_read(root, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "nothing was written into it for 10 s" in refused(
        *train(root, tmp_path / "no", data=tmp_path / "pipe", data_format="json")
    )
    with subprocess.Popen(["sh", "-c", f"exec 3> {tmp_path}/pipe; sleep 11; cat {root}/rows.jsonl >&3"]):
        peer.run_cli(*train(root, tmp_path / "out", data=tmp_path / "pipe", data_format="json"))


def test_a_misspelled_key_of_an_adapter_is_refused(root, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["lora_alhpa"] = config.pop("lora_alpha")
    path.write_text(json.dumps(config))
    words = ["eval", "--model", root / "model", "--data", root / "rows.jsonl", "--adapter", tmp_path / "adapter"]
    error = refused(*words)
    assert str(path) in error and "'lora_alhpa'" in error and "Did you mean 'lora_alpha'?" in error


# --- showing it


def test_verify_resume_shows_that_resumed_runs_are_identical(root, tmp_path):
    words = ["--model", root / "model", "--data", root / "rows.jsonl", "--lora_dropout", 0.1, "--r", 4]
    result = peer.run_cli("verify-resume", *words, "--output", tmp_path / "out", "--steps", 3)
    assert "all 2 resumed runs are identical" in result.stdout
    assert not (tmp_path / "out").exists()
    assert "--save_steps is set by this command" in refused(
        "verify-resume", *words, "--output", tmp_path / "out", "--save_steps", 3
    )


def test_inspect_says_what_a_folder_is_and_what_is_damaged(root, whole, tmp_path):
    for folder, kind in {
        whole: "output folder of a run, whole",
        whole / "checkpoint-2": "checkpoint, whole",
        root / "model": "model, no damage found, not verifiable",  # nobody wrote a manifest
    }.items():
        assert peer.run_cli("inspect", folder).stdout.startswith(f"{folder}: {kind}\n")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(whole / name, adapter / name)
    assert f"{adapter}: adapter, no damage found, not verifiable" in peer.run_cli("inspect", adapter).stdout
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    tensors[first][0, 0] = torch.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    result = peer.run_cli("inspect", adapter, check=False)
    assert result.returncode == 1 and f"'{first}' holds inf or nan" in result.stdout
    assert "is no model, adapter, checkpoint or output folder" in refused("inspect", tmp_path)
