# SPDX-License-Identifier: Apache-2.0
"""What the command takes besides local JSON: names on the Hub, parquet, YAML; and where it reports a run."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import peer
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from conftest import BUILD, ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TINY = ROOT / "examples" / "data" / "tiny-llama"
ROWS = TINY.parent / "train.jsonl"
TRAIN = ("train", "--model", TINY, "--data", ROWS, "--max_steps", 3, "--logging_steps", 1)


def through_python(*arguments, **env):
    """python -m qlorapp, which names the interpreter to the program."""
    command = [sys.executable, "-m", "qlorapp", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def cached(hub, kind, name, files):
    """A repository in huggingface_hub's cache, as a download leaves it."""
    repository = hub / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    for path in files:
        shutil.copy(path, snapshot)
    return snapshot


def as_parquet(path, count=40):
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:count]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


def test_names_on_the_hub(tmp_path):
    hub = tmp_path / "hub"
    cached(hub, "models", "some/model", TINY.iterdir())
    cached(hub, "datasets", "some/rows", [as_parquet(tmp_path / "train-00000-of-00001.parquet")])
    done = through_python(
        "train",
        "--model",
        "some/model",
        "--data",
        "some/rows",
        "--output",
        tmp_path / "o",
        "--max_steps",
        2,
        HF_HUB_CACHE=str(hub),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "o" / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/model"
    shown = through_python(
        "generate", "--model", "some/model", "--prompt", "The cat", "--max_new_tokens", 3, HF_HUB_CACHE=str(hub)
    )
    assert shown.returncode == 0 and shown.stdout
    planned = through_python("plan", "--model", "some/model", "--gpu", "T4", HF_HUB_CACHE=str(hub))
    assert planned.returncode == 0, planned.stderr
    absent = through_python("generate", "--model", "some/other", "--prompt", "x", HF_HUB_CACHE=str(hub))
    assert absent.returncode == 2 and "hf download some/other --local-dir other" in absent.stderr
    other = through_python(
        "train", "--model", "some/model", "--data", "some/none", "--output", tmp_path / "p", HF_HUB_CACHE=str(hub)
    )
    assert (
        other.returncode == 2 and "hf download --repo-type dataset some/none" in other.stderr and not (tmp_path / "p").exists()
    )


def test_the_program_alone_says_how_to_get_there(tmp_path):
    failed = peer.run_cli("eval", "--model", "some/model", "--data", "x", check=False)
    assert failed.returncode == 2 and "`python -m qlorapp`" in failed.stderr and "hf download some/model" in failed.stderr


def test_rows_in_parquet_are_those_in_json(tmp_path):
    part = tmp_path / "rows.jsonl"
    part.write_text("".join(line + "\n" for line in ROWS.read_text().splitlines()[:40]))
    losses = []
    for data in (part, as_parquet(tmp_path / "rows.parquet")):
        done = through_python("eval", "--model", TINY, "--data", data, "--dtype", "float32", TMPDIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        losses.append(re.search(r"eval_loss ([\d.]+)", done.stdout)[1])
    assert losses[0] == losses[1]
    assert not list(tmp_path.glob(".qlorapp-temporary-*"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    failed = through_python("eval", "--model", TINY, "--data", tmp_path / "bad.parquet")
    assert failed.returncode == 2 and "bad.parquet" in failed.stderr and "convert it to .jsonl" in failed.stderr


def test_a_package_that_is_missing_is_named(tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('none here')")
    failed = through_python(
        "eval", "--model", TINY, "--data", as_parquet(tmp_path / "rows.parquet"), PYTHONPATH=f"{tmp_path}:{BUILD / 'python'}"
    )
    assert failed.returncode == 2 and "pip install pyarrow" in failed.stderr


def test_init_config_writes_what_config_reads(tmp_path):
    text = peer.run_cli("init-config").stdout
    assert yaml.safe_load(text) == {"model": "TEXT", "data": "TEXT", "output": "TEXT"}
    peer.run_cli("init-config", "--output", tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_text() == text
    again = peer.run_cli("init-config", "--output", tmp_path / "run.yaml", check=False)
    assert again.returncode == 2 and "is there already" in again.stderr
    # Every commented line holds: with all of them in force the run is the default one.
    plain = "\n".join(
        line[2:] if re.match(r"# \w+: ", line) else line for line in text.splitlines() if not line.startswith("# ---")
    )
    settings = yaml.safe_load("\n".join(line for line in plain.splitlines() if re.match(r"\w+: ", line)))
    settings |= {"model": str(TINY), "data": str(ROWS), "output": str(tmp_path / "o"), "max_steps": 1}
    settings["memory_budget"] = "8GiB"  # the free memory may be another in the second run
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(settings))
    outs = [
        peer.run_cli("train", *options, "--dry_run").stdout
        for options in (
            ("--config", tmp_path / "all.yaml"),
            ("--model", TINY, "--data", ROWS, "--output", tmp_path / "o", "--max_steps", 1, "--memory_budget", "8GiB"),
        )
    ]
    said = [line for line in outs[1].splitlines() if not line.startswith("defaults (")]  # nothing is left to default
    assert len(said) == len(outs[1].splitlines()) - 1 and outs[0].splitlines() == said


def numbers(history):
    """(step, key, value) of log_history."""
    found = set()
    for entry in history:
        for key, value in entry.items():
            tag = f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
            if key != "step":
                found.add((entry["step"], tag, float(f"{value:.6g}")))
    return found


def test_tensorboard_reads_the_run(tmp_path):
    options = ("--model", TINY, "--data", ROWS, "--val_size", 8, "--output", tmp_path / "o", "--max_steps", 4, "--logging_steps", 1,
               "--eval_strategy", "steps", "--eval_steps", 2, "--report_to", "tensorboard")  # fmt: skip
    peer.run_cli("train", *options)
    (file,) = (tmp_path / "o" / "runs").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    events = EventAccumulator(str(file)).Reload()
    seen = {(event.step, tag, float(f"{event.value:.6g}")) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    history = json.loads((tmp_path / "o" / "trainer_state.json").read_text())["log_history"]
    expected = numbers(history)
    assert {(step, tag) for step, tag, _ in seen} == {(step, tag) for step, tag, _ in expected}
    for step, tag, value in expected:
        assert any(s == step and t == tag and abs(v - value) <= 1e-5 * abs(value) + 1e-9 for s, t, v in seen), (step, tag)


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_get_the_run_through_their_packages(kind, tmp_path):
    (tmp_path / f"{kind}.py").write_text(
        textwrap.dedent(f"""
        import json
        out = open({str(tmp_path / "seen")!r}, "w")
        def init(**options): print(json.dumps(["init", options]), file=out, flush=True)
        def log(values, step): print(json.dumps(["log", step, values]), file=out, flush=True)
        def finish(): print(json.dumps(["finish"]), file=out, flush=True)
        """)
    )
    options = (*TRAIN, "--output", tmp_path / "o", "--report_to", kind, "--run_name", "mine")
    done = through_python(*options, PYTHONPATH=f"{tmp_path}:{BUILD / 'python'}")
    assert done.returncode == 0, done.stderr
    first, *logs, last = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert first[0] == "init" and first[1]["name"] == "mine" and first[1]["project"] == "huggingface"
    assert first[1]["config"]["max_steps"] == 3 and last == ["finish"]
    assert [step for _, step, values in logs if "train/loss" in values] == [1, 2, 3]


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path):
    (tmp_path / "wandb.py").write_text("def init(**options): raise RuntimeError('no network')")
    options = (*TRAIN, "--output", tmp_path / "o", "--report_to", "wandb")
    done = through_python(*options, PYTHONPATH=f"{tmp_path}:{BUILD / 'python'}")
    assert done.returncode == 0 and "no network" in done.stderr
    assert (tmp_path / "o" / "adapter_model.safetensors").exists()
    alone = peer.run_cli(*options, "--overwrite_output_dir", check=False)
    assert alone.returncode == 2 and "`python -m qlorapp`, or use tensorboard" in alone.stderr
    wrong = peer.run_cli(*options[:-1], "tensorbord", check=False)
    assert wrong.returncode == 2 and "Did you mean 'tensorboard'" in wrong.stderr


def test_a_tracker_that_hangs_does_not_hold_the_run(tmp_path):
    (tmp_path / "wandb.py").write_text("import time\ndef init(**options): time.sleep(600)")
    options = (*TRAIN, "--output", tmp_path / "o", "--report_to", "wandb")
    done = through_python(*options, PYTHONPATH=f"{tmp_path}:{BUILD / 'python'}", QLORAPP_REPORT_SECONDS="1")
    assert done.returncode == 0 and "wandb has not ended within 1 s" in done.stderr
    assert (tmp_path / "o" / "adapter_model.safetensors").exists()
    wrong = through_python(*options, "--overwrite_output_dir", QLORAPP_REPORT_SECONDS="soon")
    assert wrong.returncode == 2 and "[QLORAPP_REPORT_SECONDS] must be a number above 0; got 'soon'" in wrong.stderr


def test_each_split_of_a_dataset_has_its_use(tmp_path):
    """What packages print is no answer: the scripts' standard output is the command's standard error."""
    hub, folder = tmp_path / "hub", tmp_path / "rows"
    folder.mkdir()
    lines = ROWS.read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:60]), ("validation", lines[60:70]), ("test", lines[70:75])):
        (folder / f"{name}-00000.jsonl").write_text("".join(part))
    cached(hub, "datasets", "some/rows", folder.iterdir())
    (tmp_path / "sitecustomize.py").write_text("print('Hello from a package')")
    loss = []
    for data, held in (("some/rows", "some/rows"), (folder / "train-00000.jsonl", folder / "validation-00000.jsonl")):
        options = (
            "--data",
            data,
            "--eval_data",
            held,
            "--output",
            tmp_path / f"o{len(loss)}",
            "--max_steps",
            2,
            "--dtype",
            "float32",
        )
        done = through_python(
            "train", "--model", TINY, *options, HF_HUB_CACHE=str(hub), PYTHONPATH=f"{tmp_path}:{BUILD / 'python'}"
        )
        assert done.returncode == 0, done.stderr
        history = json.loads((tmp_path / f"o{len(loss)}" / "trainer_state.json").read_text())["log_history"]
        loss.append([entry["eval_loss"] for entry in history if "eval_loss" in entry])
    assert loss[0] == loss[1] and loss[0]
