# SPDX-License-Identifier: Apache-2.0
"""report_to: services get what is logged through transformers' own callbacks, where their package is installed."""

import os
import subprocess
import sys
import textwrap

import pytest
import qlorapp
from conftest import BUILD, ROOT
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_run import qlorapp as command
from tiny_trainer import rows, trained

#: What transformers' callback uses of wandb: every call is kept.
WANDB = """
import json, types

class Run:
    id, name, url, summary = "1", "run", "", {}
    def _label(self, **kwargs): ...

class Config(dict):
    def update(self, values, allow_val_change=False):
        dict.update(self, values)

run, config, logged, begun = None, Config(), [], []

def init(**options):
    global run
    begun.append(options)
    run = Run()

def log(entry):
    logged.append(entry)

def define_metric(*args, **kwargs): ...
def termwarn(*args, **kwargs): ...
"""
#: And of trackio.
TRACKIO = """
import types

class Config(dict):
    def update(self, values, allow_val_change=False):
        dict.update(self, values)

__version__, config, logged, begun, frozen = "9.0", Config(), [], [], []
context_vars = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: "me/space"))

def init(**options):
    begun.append(options)

def log(entry):
    logged.append(entry)

def finish(): ...

def freeze(**options):
    frozen.append(options)
"""


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Packages by these names, which tell what they were given."""
    place = tmp_path / "site"
    (place / "wandb" / "sdk" / "lib").mkdir(parents=True)
    (place / "trackio").mkdir()
    (place / "wandb" / "__init__.py").write_text(WANDB)
    (place / "wandb" / "sdk" / "__init__.py").touch()
    (place / "wandb" / "sdk" / "lib" / "__init__.py").touch()
    (place / "wandb" / "sdk" / "lib" / "config_util.py").write_text("class ConfigError(Exception): ...\n")
    (place / "trackio" / "__init__.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(place))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "trackio")]:
        del sys.modules[name]


def test_wandb_gets_the_run_its_settings_and_what_is_logged(folder, tmp_path, services):
    run = trained(folder, tmp_path, report_to="wandb", run_name="mine", eval_strategy="epoch", more={"eval_dataset": rows(4)})
    import wandb

    assert wandb.begun == [{"project": "huggingface", "name": "mine"}]
    assert (
        wandb.config["learning_rate"] == 1e-2 and wandb.config["hidden_size"] == 64 and "default" in wandb.config["peft_config"]
    )
    told = {(entry["train/global_step"], entry["train/loss"]) for entry in wandb.logged if "train/loss" in entry}
    assert told == {(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry} and len(told) == 6
    assert [entry["train/global_step"] for entry in wandb.logged if "eval/loss" in entry] == [3, 6]
    assert wandb.run.summary["train_loss"] == run.output.training_loss


def test_trackio_gets_its_own_options(folder, tmp_path, services):
    options = {"project": "tries", "trackio_space_id": "me/space", "trackio_bucket_id": "me/bucket", "run_name": "mine"}
    trained(folder, tmp_path, report_to=["trackio"], max_steps=2, trackio_static_space_id="me/static", **options)
    import trackio

    (begun,) = trackio.begun
    assert {name: begun[name] for name in ("project", "name", "space_id", "bucket_id")} == {
        "project": "tries", "name": "mine", "space_id": "me/space", "bucket_id": "me/bucket",
    }  # fmt: skip
    assert [entry["train/global_step"] for entry in trackio.logged if "train/loss" in entry] == [1, 2]
    assert [(end["space_id"], end["new_space_id"]) for end in trackio.frozen] == [("me/space", "me/static")]


def test_all_reports_to_each_service_that_is_installed(folder, tmp_path, services):
    run = trained(folder, tmp_path, report_to="all", max_steps=1)
    names = [type(callback).__name__ for callback in run.callback_handler.callbacks]
    assert {"WandbCallback", "TrackioCallback"} <= set(names) and len(names) == len(set(names))


def test_a_service_that_is_not_installed_is_said_once_and_costs_no_more(folder, tmp_path):
    code = f"""
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        from tiny_trainer import trained
        for _ in range(2):
            run = trained({str(folder)!r}, {str(tmp_path)!r}, report_to=["wandb", "dvclive"], max_steps=1)
        print([type(callback).__name__ for callback in run.callback_handler.callbacks])
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BUILD / "python"), os.path.dirname(__file__)])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, check=True, capture_output=True, text=True)
    for service, package in (("wandb", "Run `pip install wandb`"), ("dvclive", "Run `pip install dvclive`")):
        (line,) = [line for line in done.stdout.splitlines() if f"report_to={service}" in line]
        assert line.startswith(f"[Trainer] report_to={service} has no effect: ") and package in line
    assert done.stdout.endswith("['PrinterCallback']\n")


def test_a_service_needs_transformers_for_its_callback(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert trained(folder, tmp_path, report_to="comet_ml", max_steps=1).output.global_step == 1
    assert (
        "report_to=comet_ml has no effect without transformers, whose callback reports: pip install transformers" in caplog.text
    )


def test_one_service_or_several_are_a_list():
    assert qlorapp.SFTConfig("out", report_to="wandb").report_to == ["wandb"]
    assert qlorapp.TrainingArguments("out", report_to=["wandb", "tensorboard"]).report_to == ["wandb", "tensorboard"]


def test_a_service_of_another_name_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"report_to must be one of \[none, all, tensorboard, wandb.*got 'wandbb'.*mean 'wandb'\?"
    ):
        qlorapp.TrainingArguments("out", report_to="wandbb")


def test_the_command_line_says_that_services_are_pythons(tmp_path):
    words = [
        "--model",
        ROOT / "examples/data/tiny-llama",
        "--data",
        ROOT / "examples/data/eval.jsonl",
        "--output",
        tmp_path / "out",
    ]
    done = command("train", *words, "--dry_run", "--report_to", "wandb", "--run_name", "mine", "--project", "tries")
    assert done.returncode == 0, done.stderr
    for given in ("report_to wandb", "run_name", "project"):
        said = f"[train] --{given} has no effect on the command line: Python's Trainer reports to services. log_history in"
        assert (done.stdout + done.stderr).count(said) == 1, done.stderr
