# SPDX-License-Identifier: Apache-2.0
"""Runs that were stopped, folders that were damaged, and inputs that changed: nothing is lost, and nothing wrong is used in silence."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD
from qlorapp import _C
from safetensors.torch import load_file, save_file

STEPS = 6
BASE = {
    "--max_steps": STEPS, "--save_steps": 2, "--per_device_train_batch_size": 2, "--gradient_accumulation_steps": 2, "--r": 4,
    "--learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    peer.write_llama(folder / "model", num_hidden_layers=1)
    peer.write_rows(folder / "rows.jsonl", 21)
    return folder


@pytest.fixture(scope="module")
def whole(root):
    peer.run_cli(*train(root, root / "whole"))
    return root / "whole"


def train(root, out, **options):
    given = {f"--{name}": value for name, value in options.items()}
    values = {"--model": root / "model", "--data": root / "rows.jsonl", "--output": out, **BASE, **given}
    return ["train", *(word for pair in values.items() for word in pair)]


def refused(*words):
    """The one line of a command that was not carried out."""
    result = peer.run_cli(*words, check=False)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


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


def damage(checkpoint, file, harm):
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "zero":
        content[:] = bytes(len(content))
    elif harm == "other step":
        content = (checkpoint.parent / "checkpoint-4" / file).read_bytes()
    path.unlink() if harm == "remove" else path.write_bytes(content)


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
    for words in (
        ["eval", "--model", model, "--data", root / "rows.jsonl"],
        ["quantize", "--model", model, "--output", tmp_path / "out"],
        train(root, tmp_path / "out", model=model),
    ):
        error = refused(*words)
        assert str(model) in error and name in error and "must be finite" in error
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
        whole: "output folder of a run",
        whole / "checkpoint-2": "checkpoint",
        root / "model": "model",
    }.items():
        assert peer.run_cli("inspect", folder).stdout.startswith(f"{folder}: {kind}, whole\n")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(whole / name, adapter / name)
    assert f"{adapter}: adapter, whole" in peer.run_cli("inspect", adapter).stdout
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    tensors[first][0, 0] = torch.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    result = peer.run_cli("inspect", adapter, check=False)
    assert result.returncode == 1 and f"'{first}' holds inf or nan" in result.stdout
    assert "is no model, adapter, checkpoint or output folder" in refused("inspect", tmp_path)


# --- Python's trainer

PYTHON = """
import json, sys, qlorapp, transformers
root, out, resume = sys.argv[1:4]
transformers.set_seed(1)
model = qlorapp.AutoModelForCausalLM.from_pretrained(f"{root}/model")
model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [json.loads(line) for line in open(f"{root}/rows.jsonl")]
class Announce(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            print("training", flush=True)
args = qlorapp.TrainingArguments(
    out, max_steps=150, save_steps=100, save_total_limit=1, per_device_train_batch_size=1, report_to="none", disable_tqdm=True,
    learning_rate=1e-2, logging_strategy="no")
trainer = qlorapp.Trainer(model, args, train_dataset=rows, callbacks=[Announce])
trainer.train(resume_from_checkpoint=resume == "resume")
trainer.save_model(out)
"""


def python(root, out, resume="anew", stop=None):
    environment = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PYTHON, str(root), str(out), resume]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if stop is not None:
            assert process.stdout.readline() == "training\n", process.stderr.read()
            process.send_signal(stop)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def outcome(out):
    found = json.loads((out / "run_report.json").read_text())
    return found["outcome"], found["error"]


def test_sigterm_in_python_leaves_a_checkpoint_from_which_the_run_ends_in_the_same_bytes(root, tmp_path):
    out = tmp_path / "out"
    code, errors = python(root, out, stop=signal.SIGTERM)
    assert code == 143, errors
    assert outcome(out) == ("stopped", None)
    (checkpoint,) = out.glob("checkpoint-*")
    assert peer.run_cli("inspect", checkpoint).stdout.startswith(f"{checkpoint}: checkpoint, whole")
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    code, errors = python(root, out, resume="resume")
    assert code == 0, errors
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-150"]
    assert json.loads((out / "checkpoint-150" / "trainer_state.json").read_text())["global_step"] == 150
    code, errors = python(root, tmp_path / "whole")
    assert code == 0, errors
    assert weights(out) == weights(tmp_path / "whole")


def best_run(root, out, kind=qlorapp.Trainer, resume=None, callbacks=(), **options):
    transformers.set_seed(1)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(root / "model")
    model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    given = {
        "max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "use_cpu": True,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2,
        "logging_strategy": "no", **options,
    }  # fmt: skip
    trainer = kind(
        model,
        qlorapp.TrainingArguments(str(out), **given),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class InTransformersLoop(qlorapp.Trainer):
    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options)


KINDS = [qlorapp.Trainer, InTransformersLoop]


class Signals(transformers.TrainerCallback):
    """Sends signals to this process in one event of a step."""

    def __init__(self, event, step, *numbers):
        self.step, self.numbers = step, numbers
        setattr(self, event, self.send)

    def send(self, args, state, control, **_):
        numbers, self.numbers = (self.numbers, ()) if state.global_step == self.step else ((), self.numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
            if number != signal.SIGINT:
                assert signal.getsignal(number) is signal.SIG_DFL  # a second one ends the process


PLAIN = {"max_steps": 6, "eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no", "save_steps": 100}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_transformers_loop_behind_its_step_with_a_checkpoint(root, tmp_path, how):
    out, options = tmp_path / "out", {**PLAIN, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        sends = Signals("on_substep_end", 2, how)
        best_run(root, out, InTransformersLoop, callbacks=[sends], save_only_model=True, logging_steps=1, **options)
    assert raised.type is KeyboardInterrupt if how == signal.SIGINT else raised.value.code == 128 + how
    assert signal.getsignal(how) is (signal.default_int_handler if how == signal.SIGINT else signal.SIG_DFL)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]
    assert peer.run_cli("inspect", out / "checkpoint-3").stdout.startswith(f"{out / 'checkpoint-3'}: checkpoint, whole")
    assert outcome(out) == ("stopped", None)
    resumed = best_run(root, out, InTransformersLoop, True, **options)
    assert outcome(out) == ("finished", None) and resumed.state.global_step == 6
    whole = best_run(root, tmp_path / "whole", InTransformersLoop, **options)
    resumed, whole = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_stop_is_saved_although_the_run_saves_nothing(root, tmp_path):
    with pytest.raises(SystemExit):
        best_run(root, tmp_path, InTransformersLoop, callbacks=[Signals("on_step_begin", 5, signal.SIGTERM)], **PLAIN)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert best_run(root, tmp_path, InTransformersLoop, True, **PLAIN).state.global_step == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_in_an_evaluation_leaves_a_resumable_checkpoint_at_once(root, tmp_path, kind):
    predictions = []

    class Counts(transformers.TrainerCallback):
        def on_prediction_step(self, *_, **__):
            predictions.append(1)

    with pytest.raises(SystemExit) as raised:
        sends = Signals("on_prediction_step", 2, signal.SIGHUP)
        best_run(root, tmp_path, kind, callbacks=[Counts(), sends], save_only_model=True)
    assert raised.value.code == 129 and len(predictions) == 1
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert outcome(tmp_path) == ("stopped", None)
    best_run(root, tmp_path, kind, True)
    assert outcome(tmp_path) == ("finished", None)


def test_a_second_signal_acts_in_the_middle_of_the_step(root, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        sends = Signals("on_step_begin", 2, signal.SIGINT, signal.SIGINT)
        best_run(root, tmp_path, InTransformersLoop, callbacks=[sends], **PLAIN)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_after_the_best_adapter_was_loaded_saves_no_mixture(root, tmp_path, kind):
    """The optimizer is that of the last step, which was saved before."""
    options = {"metric_for_best_model": "loss", "greater_is_better": True}  # the best one is the first
    with pytest.raises(SystemExit):
        best_run(root, tmp_path, kind, callbacks=[Signals("on_train_end", 4, signal.SIGTERM)], **options)
    first, last = (weights(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    assert first != last
    best_run(root, tmp_path / "whole", kind, **options)
    assert last == weights(tmp_path / "whole" / "checkpoint-4")


@pytest.mark.parametrize("kind", KINDS)
def test_python_loads_the_best_checkpoint_of_the_resumed_one_s_folder_alone(root, tmp_path, kind):
    """The state names another folder, whose adapter is valid; its manifest is that of a whole checkpoint."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    best_run(root, out, kind, metric_for_best_model="loss", greater_is_better=True)  # the best one is the first
    shutil.copytree(out, elsewhere)
    file = elsewhere / "checkpoint-2" / "adapter_model.safetensors"
    save_file({name: torch.full_like(value, 7.0) for name, value in load_file(file).items()}, file, {"format": "pt"})
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    for name in (str(elsewhere / "checkpoint-2"), str(elsewhere)):
        state["best_model_checkpoint"] = name
        (out / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
        remake_manifest(out / "checkpoint-4")
        trainer = best_run(root, out, kind, str(out / "checkpoint-4"), metric_for_best_model="loss", greater_is_better=True)
        assert trainer.state.global_step == 4
        assert trainer.state.best_model_checkpoint in (str(out / "checkpoint-2"), None)
        assert all((value != 7.0).any() for name, value in trainer.model.named_parameters() if "lora_" in name)


def remake_manifest(checkpoint):
    """The manifest that a hostile writer makes."""
    path = checkpoint / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    folder = _C.RunFolder(str(checkpoint.parent))
    folder.go_on_from(str(checkpoint.parent / "checkpoint-2"))
    writer = _C.CheckpointWriter(folder, manifest["step"])
    for file in checkpoint.iterdir():
        if file.name != "MANIFEST.json":
            shutil.copy(file, writer.folder)
    writer.commit()
    folder.close()
    made = json.loads(path.read_text())
    assert made["files"].keys() == manifest["files"].keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["flip", "remove the manifest"])
def test_python_refuses_to_load_a_damaged_best_checkpoint(root, tmp_path, kind, harm):
    class Damages(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 4 and harm == "flip":
                damage(tmp_path / "checkpoint-2", "adapter_model.safetensors", "flip")
            elif state.global_step == 4:
                (tmp_path / "checkpoint-2" / "MANIFEST.json").unlink()

    options = {"metric_for_best_model": "loss", "greater_is_better": True}
    with pytest.raises(qlorapp.FormatError, match=r"checkpoint-2.*checkpoint-4 or an earlier") as raised:
        best_run(root, tmp_path, kind, callbacks=[Damages()], **options)
    assert ("adapter_model.safetensors" if harm == "flip" else "MANIFEST.json") in str(raised.value)
    assert outcome(tmp_path)[0] == "failed" and "load_best_model_at_end" in outcome(tmp_path)[1]


@pytest.mark.parametrize(
    "change, shown",
    [
        ({"learning_rate": 2e-2}, "learning_rate 0.01 → 0.02"),
        ({"seed": 7}, "seed 42 → 7, data_seed 42 → 7"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 1 → 2"),
        ({"optim": "adamw_torch"}, 'optim "adamw_torch_fused" → "adamw_torch"'),
        ("rows", "the training data (other rows, or another order of them)"),
    ],
)
def test_changed_inputs_of_transformers_loop_are_refused_by_name(root, tmp_path, change, shown):
    best_run(root, tmp_path, InTransformersLoop, max_steps=2)
    options = {"max_steps": 4, **(change if change != "rows" else {})}
    if change == "rows":
        other = tmp_path / "other"
        shutil.copytree(root, other, ignore=shutil.ignore_patterns("whole"))
        lines = (root / "rows.jsonl").read_text().splitlines(keepends=True)
        (other / "rows.jsonl").write_text("".join(lines[::-1]))
        root = other
    with pytest.raises(qlorapp.FormatError) as raised:
        best_run(root, tmp_path, InTransformersLoop, True, **options)
    assert shown in str(raised.value) and "resume_with_changes=True" in str(raised.value)
    first = json.loads((tmp_path / "checkpoint-2" / "MANIFEST.json").read_text())["run_id"]
    best_run(root, tmp_path, InTransformersLoop, True, resume_with_changes=True, **options)
    found = json.loads((tmp_path / "run_report.json").read_text())
    assert found["resumed_with_changes"] and found["run_id"] != first
    assert (found["first_step"], found["global_step"], found["max_steps"], found["outcome"]) == (2, 4, 4, "finished")
