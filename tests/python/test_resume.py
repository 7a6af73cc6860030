# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped and resumed ends in the same bytes as one that was never stopped."""

import json
import math
import os
import signal
import subprocess

import peer
import pytest
from conftest import BUILD

STEPS = 14  # 21 rows in batches of 2, windows of 2: 11 batches and 6 steps an epoch, whose last window has one row
VARIANTS = {
    "fp32": [],
    "dropout": ["--lora_dropout", 0.1, "--gradient_checkpointing", "true"],
    "fp16 with dropout": ["--fp16", "true", "--lora_dropout", 0.1],
    "bf16, grouped by length": ["--bf16", "true", "--train_sampling_strategy", "group_by_length"],
    "eight-bit moments": ["--optim", "adamw_8bit", "--lora_dropout", 0.1],
    "DoRA": ["--use_dora", "true", "--lora_dropout", 0.1],
    "trained tables": ["--modules_to_save", "embed_tokens,lm_head"],
    "packed": ["--packing", "true", "--max_length", 40, "--per_device_train_batch_size", 1],
    "two threads, cosine": ["--lr_scheduler_type", "cosine", "--lora_dropout", 0.1],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    peer.write_llama(root / "model")
    peer.write_rows(root / "rows.jsonl", 21)
    peer.write_rows(root / "eval.jsonl", 5, seed=8)
    return root


def command(root, out, *options):
    """`options` come instead of these where both name one: the command line takes each once."""
    values = {
        "--model": root / "model", "--data": root / "rows.jsonl", "--eval_data": root / "eval.jsonl", "--output": out,
        "--eval_strategy": "steps", "--eval_steps": 4, "--logging_steps": 3, "--max_steps": STEPS, "--warmup_steps": 3,
        "--per_device_train_batch_size": 2, "--gradient_accumulation_steps": 2, "--learning_rate": 1e-2, "--weight_decay": 0.01,
        "--r": 8, "--target_modules": "all-linear", "--defaults": "trainer", **dict(zip(options[::2], options[1::2], strict=True)),
    }  # fmt: skip
    return ["train", *(word for pair in values.items() for word in pair)]


def log_history(folder):
    """Without what a clock wrote."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timed = ("_runtime", "_per_second")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in entries]


def contents(folder):
    """Every file of a checkpoint that must be the same, by name."""
    ignored = {"trainer_state.json", "training_args.json", "MANIFEST.json"}  # times, and the name of the output folder
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ignored}


def assert_same_end(ours, reference, last=STEPS):
    name = "adapter_model.safetensors"
    assert (ours / name).read_bytes() == (reference / name).read_bytes()
    assert log_history(ours) == log_history(reference)
    if (reference / f"checkpoint-{last}").exists():
        assert contents(ours / f"checkpoint-{last}") == contents(reference / f"checkpoint-{last}")


@pytest.fixture(scope="module")
def whole(folder):
    """The run of a variant that was never stopped; it leaves a checkpoint after each step."""
    made = {}

    def run(variant):
        if variant not in made:
            made[variant] = folder / f"whole {variant}"
            options = [*VARIANTS[variant], "--save_steps", 1]
            peer.run_cli(*command(folder, made[variant], *options), threads=2 if "threads" in variant else 1)
        return made[variant]

    return run


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [5, 6, 8], ids=["in the first epoch", "between two epochs", "in the second epoch"])
def test_a_resumed_run_ends_in_the_same_bytes(folder, whole, tmp_path, variant, step):
    reference = whole(variant)
    options = [*VARIANTS[variant], "--save_steps", 1, "--resume_from_checkpoint", reference / f"checkpoint-{step}"]
    peer.run_cli(*command(folder, tmp_path / "out", *options), threads=2 if "threads" in variant else 1)
    assert not (tmp_path / "out" / f"checkpoint-{step}").exists()  # it began after that step
    assert_same_end(tmp_path / "out", reference)


def test_the_variants_are_different_runs_and_each_step_moves_the_adapter(whole):
    name = "adapter_model.safetensors"
    ends = {variant: (whole(variant) / name).read_bytes() for variant in VARIANTS}
    assert len(set(ends.values())) == len(VARIANTS)
    for variant in VARIANTS:
        steps = {(whole(variant) / f"checkpoint-{step}" / name).read_bytes() for step in (5, 6, 8, 14)}
        assert len(steps) == 4, variant


def test_the_loss_scale_is_part_of_the_checkpoint(whole):
    folders = [whole("fp16 with dropout") / f"checkpoint-{step}" for step in (2, 5, 14)]
    states = [json.loads((folder / "scaler.json").read_text()) for folder in folders]
    assert all(state["scale"] > 0 and math.log2(state["scale"]).is_integer() for state in states)
    assert states[0] != states[1] or states[1] != states[2]
    assert not (whole("fp32") / "checkpoint-5" / "scaler.json").exists()


def test_true_takes_the_newest_checkpoint_of_the_output_folder(folder, whole, tmp_path):
    out = tmp_path / "out"
    peer.run_cli(*command(folder, out, "--save_steps", 5))
    assert_same_end(out, whole("fp32"))
    for name in ("checkpoint-14", "adapter_model.safetensors", "trainer_state.json"):
        (out / name).rename(tmp_path / name)  # as if it had been killed after step 10
    peer.run_cli(*command(folder, out, "--save_steps", 5, "--resume_from_checkpoint", "true"))
    assert_same_end(out, whole("fp32"))


# --- what is no continuation


@pytest.mark.parametrize(
    "options, message",
    [
        (["--model", "{root}/other"], "another base model"),
        (["--model", "{root}/wider"], "another base model"),
        (["--quant_type", "fp4"], "quantized differently"),
        (["--optim", "adamw_8bit"], "optim"),
        (["--fp16", "true"], "belongs to another base model"),  # the base is held in the precision of the run
        (["--resume_from_checkpoint", "{root}/model"], "is not a checkpoint"),
        (["--resume_from_checkpoint", "{root}/absent"], "is not a checkpoint"),
        (["--resume_from_checkpoint", "true"], "there is no checkpoint"),
    ],
    ids=["base", "width", "codes", "moments", "precision", "no checkpoint", "no folder", "none there"],
)
def test_what_does_not_continue_that_run_is_refused(folder, whole, tmp_path, options, message):
    for name, config in (("other", {"seed": 9}), ("wider", {"hidden_size": 128})):
        if not (folder / name).exists():
            peer.write_llama(folder / name, **config)
    given = dict(zip(options[::2], [option.format(root=folder) for option in options[1::2]], strict=True))
    given = {"--resume_from_checkpoint": whole("fp32") / "checkpoint-5", **given}
    words = [word for pair in given.items() for word in pair]
    result = peer.run_cli(*command(folder, tmp_path / "out", *words), check=False)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


# --- stopped from outside


LONG = 300


@pytest.fixture(scope="module")
def long_run(folder):
    out = folder / "long"
    peer.run_cli(*command(folder, out, "--max_steps", LONG, "--save_strategy", "no"))
    return out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_from_outside_is_resumed_to_the_same_bytes(folder, long_run, tmp_path, how):
    out = tmp_path / "out"
    save = ["--save_strategy", "no"] if how == signal.SIGINT else ["--save_steps", 1, "--save_total_limit", 2]
    words = [str(word) for word in command(folder, out, "--max_steps", LONG, *save)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([BUILD / "qlorapp", *words], env=environment, **pipes) as process:
        # The first step's loss is printed before anything is saved.
        awaited = "'loss'" if how == signal.SIGINT else "saved "
        while awaited not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(how)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), rest + errors
    assert "Traceback" not in errors and not (out / "adapter_model.safetensors").exists()
    if how == signal.SIGINT:
        assert "stopped by SIGINT after step" in rest
    peer.run_cli(*command(folder, out, "--max_steps", LONG, *save, "--resume_from_checkpoint", "true"))
    assert_same_end(out, long_run, last=LONG)
    assert not [file.name for file in out.iterdir() if file.name.startswith(".")]
