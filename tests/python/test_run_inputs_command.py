# SPDX-License-Identifier: Apache-2.0
"""Rows held out by --val_size, early stopping, the loss picture, and what the end of a run says."""

import json
import xml.etree.ElementTree as ET

import pytest
import torch
import transformers
from tiny_run import qlorapp, write_model, write_rows

ROWS = [{"prompt": f"What is {i} + {i}?", "completion": f" It is {2 * i}."} for i in range(20)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run_inputs")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def train(here, output, *arguments):
    return qlorapp("train", "--model", "model", "--data", "rows.jsonl", "--output", output, *arguments, cwd=here)


def history(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_val_size_trains_on_the_rest_of_a_seeded_permutation(here):
    held = torch.randperm(20, generator=torch.Generator().manual_seed(7))[:3].tolist()
    write_rows(here / "kept.jsonl", [row for i, row in enumerate(ROWS) if i not in held])
    write_rows(here / "held.jsonl", [row for i, row in enumerate(ROWS) if i in held])
    common = ("--seed", 7, "--max_steps", 2, "--logging_steps", 1, "--learning_rate", "1e-3")
    split = train(here, "split", "--val_size", "0.11", *common)
    assert split.returncode == 0, split.stderr
    assert "val_size: 3 of 20 rows are evaluated and not trained (chosen by seed 7)" in split.stdout + split.stderr
    by_hand = qlorapp(
        "train",
        "--model",
        "model",
        "--data",
        "kept.jsonl",
        "--eval_data",
        "held.jsonl",
        "--output",
        "by_hand",
        *common,
        cwd=here,
    )
    assert by_hand.returncode == 0, by_hand.stderr
    losses = [[entry.get("loss", entry.get("eval_loss")) for entry in history(here / name)] for name in ("split", "by_hand")]
    assert losses[0] == losses[1] and any("eval_loss" in entry for entry in history(here / "split"))
    # The picture holds both curves, in XML that any reader accepts.
    picture = (here / "split" / "loss.svg").read_text()
    assert "training loss" in picture and "evaluation loss" in picture and "learning rate" in picture
    assert ET.fromstring(picture).tag.endswith("svg")
    # A resumed run is held to the same rows.
    changed = train(here, "split", "--val_size", "4", *common, "--resume_from_checkpoint", "true")
    assert changed.returncode != 0 and "val_size 0.11 → 4" in changed.stderr and "the training data" in changed.stderr
    again = train(here, "split", "--val_size", "0.11", *common, "--resume_from_checkpoint", "true")
    assert again.returncode == 0, again.stderr


def test_rows_on_one_line_of_a_json_array_are_rows(here):
    """As json.dump writes them; and of several files, whose lines have the same numbers."""
    common = ("--seed", 7, "--max_steps", 1, "--logging_steps", 1)
    (here / "array.json").write_text(json.dumps(ROWS))
    (here / "a.json").write_text(json.dumps(ROWS[:9]))
    (here / "b.json").write_text(json.dumps(ROWS[9:]))
    found = []
    for i, data in enumerate(("rows.jsonl", "array.json", "a.json,b.json")):
        done = qlorapp(
            "train", "--model", "model", "--data", data, "--output", f"of{i}", "--val_size", "0.25", *common, cwd=here
        )  # fmt: skip
        assert "val_size: 5 of 20 rows" in done.stdout + done.stderr, done.stderr
        found.append([entry.get("loss", entry.get("eval_loss")) for entry in history(here / f"of{i}")])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "given, said",
    [
        (("--val_size", "4", "--eval_data", "rows.jsonl"), "Give one of them"),
        (("--val_size", "20"), "at least one row of 20 to train on"),
        (("--val_size", "1.5"), "a share below 1; got 1.5"),
        (("--val_size", "-1"), "a share below 1; got -1"),
        (("--early_stopping_patience", "2"), "early_stopping_patience needs evaluations"),
        (("--early_stopping_patience", "2", "--val_size", "4"), "needs metric_for_best_model"),
        (("--early_stopping_patience", "0", "--val_size", "4", "--metric_for_best_model", "loss"), ">= 1; got 0"),
        (("--early_stopping_threshold", "0.1"), "needs early_stopping_patience"),
        (("--eval_strategy", "steps"), "--val_size N"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(here, tmp_path, given, said):
    result = train(here, tmp_path / "out", *given)
    assert result.returncode != 0 and said in result.stderr


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_early_stopping_ends_where_transformers_callback_does(here, tmp_path, threshold):
    result = train(
        here, tmp_path / "out", "--val_size", "4", "--max_steps", 40, "--eval_strategy", "steps", "--eval_steps", 1, "--save_steps", 1,
        "--save_total_limit", 1, "--load_best_model_at_end", "true", "--early_stopping_patience", 3, "--early_stopping_threshold", threshold,
        "--learning_rate", "0.05", "--per_device_train_batch_size", 2, "--target_modules", "all-linear", "--logging_steps", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in history(tmp_path / "out") if "eval_loss" in entry]
    callback = transformers.EarlyStoppingCallback(3, threshold)
    args = transformers.TrainingArguments(
        tmp_path / "hf",
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        use_cpu=True,
        report_to="none",
    )
    state, control, stopped = transformers.TrainerState(), transformers.TrainerControl(), None
    for step, loss in evaluated:
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        state.best_metric = loss if state.best_metric is None else min(loss, state.best_metric)
        if control.should_training_stop:
            stopped = step
            break
    assert stopped == evaluated[-1][0] < 40, evaluated
    assert f"early stopping at step {stopped}" in result.stdout + result.stderr
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["stateful_callbacks"]["EarlyStoppingCallback"]
    assert saved == callback.state()


def test_the_end_of_a_run_says_what_to_try_and_what_the_plan_counts(here, tmp_path):
    still = train(
        here,
        tmp_path / "still",
        "--max_steps",
        40,
        "--learning_rate",
        "1e-9",
        "--per_device_train_batch_size",
        2,
        "--save_strategy",
        "no",
    )
    said = still.stdout + still.stderr
    assert still.returncode == 0 and "learning_rate 1e-09 is far below what is usual for adapters" in said
    assert said.count("the loss did not fall: ") == 1
    assert (
        "before the model was loaded (program, libraries, rows)" in said
        and "more to load and train, of which the plan counts at most" in said
    )
    learns = train(
        here, tmp_path / "learns", "--max_steps", 40, "--learning_rate", "1e-2", "--per_device_train_batch_size", 2, "--target_modules", "all-linear",
        "--save_strategy", "no",
    )  # fmt: skip
    assert (
        learns.returncode == 0
        and "did not fall" not in learns.stdout + learns.stderr
        and "far above" not in learns.stderr + learns.stdout
    )
