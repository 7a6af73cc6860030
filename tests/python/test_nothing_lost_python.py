# SPDX-License-Identifier: Apache-2.0
"""The same of Python's trainers: signals, the best checkpoint, changed inputs, where C++ computes the steps and where torch does."""

import json
import os
import shutil
import signal
import subprocess
import sys

import datasets
import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD
from lost_runs import STEPS, damage, refused, root, train, weights, whole  # noqa: F401  (root and whole are fixtures)
from qlorapp import _C
from qlorapp.hf import run_inputs
from safetensors.torch import load_file, save_file

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


class ByTorch(qlorapp.Trainer):
    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options)


KINDS = [qlorapp.Trainer, ByTorch]


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


def test_a_signal_between_two_micro_batches_drops_the_step_under_way(root, tmp_path):
    class Stopped(qlorapp.Trainer):
        asked = 0

        def _is_signalled(self):
            self.asked += 1
            if self.asked == 4:  # for the second time in the window of step 2: two of its three micro-batches are computed
                os.kill(os.getpid(), signal.SIGTERM)
            return super()._is_signalled()

    options = {**PLAIN, "gradient_accumulation_steps": 3}
    with pytest.raises(SystemExit) as stopped:
        best_run(root, tmp_path / "out", Stopped, **options)
    assert stopped.value.code == 143
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    again = best_run(root, tmp_path / "out", resume=True, **options)
    plain = best_run(root, tmp_path / "plain", **options)
    assert again.state.global_step == 6
    for (name, mine), theirs in zip(again.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_transformers_loop_behind_its_step_with_a_checkpoint(root, tmp_path, how):
    out, options = tmp_path / "out", {**PLAIN, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        sends = Signals("on_substep_end", 2, how)
        best_run(root, out, ByTorch, callbacks=[sends], save_only_model=True, logging_steps=1, **options)
    assert raised.type is KeyboardInterrupt if how == signal.SIGINT else raised.value.code == 128 + how
    assert signal.getsignal(how) is (signal.default_int_handler if how == signal.SIGINT else signal.SIG_DFL)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]
    assert peer.run_cli("inspect", out / "checkpoint-3").stdout.startswith(f"{out / 'checkpoint-3'}: checkpoint, whole")
    assert outcome(out) == ("stopped", None)
    resumed = best_run(root, out, ByTorch, True, **options)
    assert outcome(out) == ("finished", None) and resumed.state.global_step == 6
    whole = best_run(root, tmp_path / "whole", ByTorch, **options)
    resumed, whole = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_stop_is_saved_although_the_run_saves_nothing(root, tmp_path):
    with pytest.raises(SystemExit):
        best_run(root, tmp_path, ByTorch, callbacks=[Signals("on_step_begin", 5, signal.SIGTERM)], **PLAIN)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert best_run(root, tmp_path, ByTorch, True, **PLAIN).state.global_step == 6


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
        best_run(root, tmp_path, ByTorch, callbacks=[sends], **PLAIN)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_stops_early_at_the_same_step(root, tmp_path, kind):
    """The patience that is used up is part of the checkpoint."""
    options = {
        "metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 20, "restore_callback_states_from_checkpoint": True,
    }  # fmt: skip

    def run(out, *more, resume=None):
        return best_run(root, out, kind, resume, callbacks=[transformers.EarlyStoppingCallback(3), *more], **options)

    assert run(tmp_path / "whole").state.global_step == 8
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", Signals("on_step_begin", 4, signal.SIGINT))
    assert run(tmp_path / "out", resume=True).state.global_step == 8
    ours, theirs = (weights(folder / "checkpoint-8") for folder in (tmp_path / "out", tmp_path / "whole"))
    assert ours == theirs


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
    best_run(root, tmp_path, ByTorch, max_steps=2)
    options = {"max_steps": 4, **(change if change != "rows" else {})}
    if change == "rows":
        other = tmp_path / "other"
        shutil.copytree(root, other, ignore=shutil.ignore_patterns("whole"))
        lines = (root / "rows.jsonl").read_text().splitlines(keepends=True)
        (other / "rows.jsonl").write_text("".join(lines[::-1]))
        root = other
    with pytest.raises(qlorapp.FormatError) as raised:
        best_run(root, tmp_path, ByTorch, True, **options)
    assert shown in str(raised.value) and "resume_with_changes=True" in str(raised.value)
    first = json.loads((tmp_path / "checkpoint-2" / "MANIFEST.json").read_text())["run_id"]
    best_run(root, tmp_path, ByTorch, True, resume_with_changes=True, **options)
    found = json.loads((tmp_path / "run_report.json").read_text())
    assert found["resumed_with_changes"] and found["run_id"] != first
    assert (found["first_step"], found["global_step"], found["max_steps"], found["outcome"]) == (2, 4, 4, "finished")


def test_the_fingerprint_of_rows_depends_on_their_values_and_order_alone():
    def table(rows, **kinds):
        return datasets.Dataset.from_dict({"input_ids": rows}, features=datasets.Features(kinds) if kinds else None)

    rows = [[i, 2 * i, 7] for i in range(3000)]
    whole = run_inputs.fingerprint(table(rows))
    narrow = table(rows, input_ids=datasets.Sequence(datasets.Value("int32")))
    halves = datasets.concatenate_datasets([table(rows[:1500]), table(rows[1500:])])
    for same in (
        narrow,
        halves,
        halves.with_format("torch"),
        halves.select(range(3000)),
        table(rows[::-1]).select(range(3000)[::-1]),
    ):
        assert run_inputs.fingerprint(same) == whole
    others = [rows[::-1], rows[1:], [*rows[:-1], [0, 0, 0]], [[0, 0], [7, *rows[1]], *rows[2:]], [*rows[:-1], None]]
    found = [run_inputs.fingerprint(table(other)) for other in others]
    assert len({whole, *found}) == 6
    assert run_inputs.fingerprint(rows) == run_inputs.fingerprint(tuple(rows)) != run_inputs.fingerprint(rows[::-1])
    assert run_inputs.fingerprint(table(["a", "b"])) != run_inputs.fingerprint(table(["ab", ""]))
    for unknown in (table([b"a"]), table(rows).with_transform(lambda batch: batch), iter(rows)):
        assert run_inputs.fingerprint(unknown) is None
