# SPDX-License-Identifier: Apache-2.0
"""Steps whose gradients are not finite: raise, skip, roll back; and the report that a run leaves."""

import functools
import json
import shutil

import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file, save_file
from test_nothing_lost import refused

#: In the rows of step 6 alone. Its embedding is the only one with a value that the first projection multiplies by 3e38.
POISON = 7
ROWS, BAD, SAVED = 12, 6, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    peer.write_llama(folder / "model", num_hidden_layers=1)
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 5] = 0
    tensors["model.embed_tokens.weight"][POISON, 5] = 1
    tensors["model.layers.0.self_attn.q_proj.weight"][:, 5] = 3e38
    save_file(tensors, file, {"format": "pt"})
    tensors["model.layers.0.self_attn.q_proj.weight"][:, 5] = 6e4  # the same in float16
    shutil.copytree(folder / "model", folder / "half")
    save_file(tensors, folder / "half" / "model.safetensors", {"format": "pt"})
    rows = []
    for i in range(ROWS):
        ids = [20 + i + k for k in range(8)]
        if i + 1 == BAD:
            ids[2] = POISON
        rows.append({"input_ids": [*ids, 2], "labels": [*ids, 2 if i % 2 else -100]})
    write(folder / "rows.jsonl", rows)
    # What is left of them when a run goes back from step 6 to step 4.
    write(folder / "left.jsonl", rows[:SAVED] + rows[BAD:])
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(root, out, data="rows.jsonl", **options):
    values = {
        "model": root / "model", "data": root / data, "output": out, "max_steps": ROWS, "save_steps": SAVED, "r": 4, "dtype": "float32",
        "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant",
        "learning_rate": 1e-2, "double_quant": "false", "load_in_4bit": "false", **options,
    }  # fmt: skip
    return peer.run_cli("train", *(word for name, value in values.items() for word in (f"--{name}", value)), check=False)


def report(out):
    return json.loads((out / "run_report.json").read_text())


def test_a_step_that_is_not_finite_raises_by_default(root, tmp_path):
    result = train(root, tmp_path)
    assert result.returncode == 1 and f"in step {BAD}" in result.stderr
    found = report(tmp_path)
    assert found["outcome"] == "failed" and f"in step {BAD}" in found["error"] and found["skipped_steps"] == 1


def test_skip_leaves_the_step_out(root, tmp_path):
    result = train(root, tmp_path, on_non_finite="skip")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"skipped step {BAD}:") == 1
    found = report(tmp_path)
    assert (found["outcome"], found["global_step"], found["skipped_steps"], found["rollbacks"]) == ("finished", ROWS, 1, 0)
    assert all(value.isfinite().all() for value in load_file(tmp_path / "adapter_model.safetensors").values())
    # A resumed run knows what its first part skipped.
    result = train(root, tmp_path, on_non_finite="skip", resume_from_checkpoint=tmp_path / "checkpoint-8", max_steps=ROWS)
    assert result.returncode == 0 and report(tmp_path)["skipped_steps"] == 1


def test_skip_ends_when_no_step_is_finite_any_more(root, tmp_path):
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    write(tmp_path / "bad.jsonl", [rows[BAD - 1]] * 20)
    result = train(root, tmp_path / "out", tmp_path / "bad.jsonl", on_non_finite="skip", max_steps=20)
    assert result.returncode == 1 and "in step 17, as in the 16 before it" in result.stderr


def test_rollback_continues_from_the_last_checkpoint_behind_the_rows_of_the_step(root, tmp_path):
    result = train(root, tmp_path / "out", on_non_finite="rollback")
    assert result.returncode == 0, result.stderr
    assert f"rolled back from step {BAD} to {tmp_path}/out/checkpoint-{SAVED}" in result.stderr
    assert train(root, tmp_path / "left", "left.jsonl", max_steps=ROWS - 2).returncode == 0
    ends = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "left")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    found = report(tmp_path / "out")
    assert (found["rollbacks"], found["skipped_steps"], found["global_step"]) == (1, 1, ROWS - 2)
    assert (tmp_path / "out" / f"checkpoint-{ROWS - 2}").is_dir()  # the end of a run is saved, whichever step it is
    again = train(root, tmp_path / "out", on_non_finite="rollback", resume_from_checkpoint="true")
    assert (
        again.returncode == 0 and report(tmp_path / "out")["first_step"] == report(tmp_path / "out")["global_step"] == ROWS - 2
    )


def test_rollback_without_a_checkpoint_says_so(root, tmp_path):
    result = train(root, tmp_path, on_non_finite="rollback", save_steps=100)
    assert result.returncode == 1 and "no checkpoint to roll back to" in result.stderr
    assert "must be one of raise, skip, rollback" in refused(
        "train", "--model", root / "model", "--data", root / "rows.jsonl", "--output", tmp_path / "b", "--on_non_finite", "stop"
    ).replace("[", "").replace("]", "")


@pytest.fixture(scope="module")
def in_python(root):
    """run(rows, folder, steps, resume=None, **arguments): a trainer behind its run, and its adapter. All begin with the same."""

    @functools.cache
    def loaded(name, dtype):
        base = qlorapp.AutoModelForCausalLM.from_pretrained(root / name, dtype=dtype)
        return qlorapp.get_peft_model(base, qlorapp.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def run(rows, out, steps, resume=None, callbacks=(), **options):
        model = loaded(*(("half", torch.float16) if options.get("fp16") else ("model", torch.float32)))
        args = qlorapp.TrainingArguments(
            str(out), max_steps=steps, per_device_train_batch_size=1, report_to="none", disable_tqdm=True, learning_rate=1e-2,
            lr_scheduler_type="constant", train_sampling_strategy="sequential", use_cpu=True,
            **{"save_steps": SAVED, "logging_strategy": "no", **options},
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
        trainer = qlorapp.Trainer(model, args, train_dataset=rows, callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer, {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}

    return run


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rollback_in_python_ends_as_in_the_command(root, in_python, tmp_path):
    rows, out = rows_of(root / "rows.jsonl"), tmp_path / "out"
    trainer, rolled_back = in_python(rows, out, ROWS, on_non_finite="rollback")
    assert trainer.state.global_step == ROWS - 2 and report(out)["rollbacks"] == 1
    assert (out / f"checkpoint-{ROWS - 2}").is_dir()  # the end of a run is saved, whichever step it is
    without, left = in_python(rows_of(root / "left.jsonl"), tmp_path / "left", ROWS - 2)
    assert all(torch.equal(rolled_back[name], left[name]) for name in left)
    mean = [t.state.log_history[-1]["train_loss"] for t in (trainer, without)]
    assert mean[0] == pytest.approx(mean[1], rel=1e-12)  # of the steps that count
    # A resumed run, too, goes on behind the rows that were left out.
    again, resumed = in_python(rows, out, ROWS, resume=out / "checkpoint-8", on_non_finite="rollback")
    assert again.state.global_step == ROWS - 2 and report(out)["rollbacks"] == 1
    assert all(torch.equal(resumed[name], left[name]) for name in left)
    at_end, _ = in_python(rows, out, ROWS, resume=out / f"checkpoint-{ROWS - 2}", on_non_finite="rollback")
    assert at_end.state.global_step == ROWS - 2


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"logging_strategy": "steps", "logging_steps": 3}])
def test_a_rollback_in_the_second_epoch_is_resumed_behind_its_rows(root, in_python, tmp_path, options):
    """With micro-batches that a step sums, and with losses that wait for a log entry."""
    rows, poisoned = rows_of(root / "left.jsonl"), rows_of(root / "rows.jsonl")[BAD - 1]

    class Changing(list):
        """The fourth row is another in the second epoch."""

        is_second = False

        def __getitem__(self, i):
            return poisoned if i == 3 and self.is_second else super().__getitem__(i)

    class Epochs(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            changing.is_second = int(state.epoch) == 1

    changing, given = Changing(rows), {"on_non_finite": "rollback", "save_steps": 3, "num_train_epochs": 3, **options}
    trainer, end = in_python(changing, tmp_path / "out", -1, callbacks=[Epochs()], **given)
    undone = sum(trainer._undone_steps)
    assert undone > 0 and trainer.state.global_step == 3 * len(rows) // options.get("gradient_accumulation_steps", 1) - undone
    saved = sorted(int(folder.name.split("-")[1]) for folder in (tmp_path / "out").glob("checkpoint-*"))
    assert saved[-1] == trainer.state.global_step
    resumed, same = in_python(rows, tmp_path / "out", -1, resume=tmp_path / "out" / f"checkpoint-{saved[-2]}", **given)
    assert all(torch.equal(same[name], end[name]) for name in end)
    histories = [
        [{k: v for k, v in e.items() if k in ("loss", "step", "epoch")} for e in t.state.log_history if "loss" in e]
        for t in (trainer, resumed)
    ]
    assert histories[0] == histories[1]


def test_a_loss_scale_that_gave_up_rolls_back(root, in_python, tmp_path):
    good, bad = rows_of(root / "left.jsonl"), rows_of(root / "rows.jsonl")[BAD - 1]
    rows = good[:6] + [bad] * 17 + good[6:]  # the last bad one is the 23rd, and the newest checkpoint that of step 20
    options = {"fp16": True, "save_steps": 5}
    trainer, rolled_back = in_python(rows, tmp_path / "out", len(rows), on_non_finite="rollback", **options)
    assert trainer._undone_steps == [3] and trainer.state.global_step == len(rows) - 3
    _, left = in_python(good[:6] + [bad] * 14 + good[6:], tmp_path / "left", len(rows) - 3, **options)
    assert all(torch.equal(rolled_back[name], left[name]) for name in left)
    with pytest.raises(RuntimeError, match="17 optimizer steps in a row.*forward pass"):
        in_python(rows, tmp_path / "raised", len(rows), **options)


def test_a_run_of_the_command_that_was_rolled_back_goes_on_in_python(root, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = {"on_non_finite": "rollback"}
    assert train(root, whole, **options).returncode == 0
    model = qlorapp.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model = qlorapp.PeftModel.from_pretrained(model, whole / "checkpoint-8", is_trainable=True)
    args = qlorapp.TrainingArguments(
        str(out), max_steps=ROWS, save_strategy="no", per_device_train_batch_size=1, report_to="none", disable_tqdm=True, learning_rate=1e-2,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", use_cpu=True, resume_with_changes=True, **options,
    )  # fmt: skip
    trainer = qlorapp.Trainer(model, args, train_dataset=rows_of(root / "rows.jsonl"))
    trainer.train(resume_from_checkpoint=str(whole / "checkpoint-8"))
    trainer.save_model(str(out))
    assert trainer.state.global_step == ROWS - 2
    ends = [load_file(folder / "adapter_model.safetensors") for folder in (whole, out)]
    assert all((ends[0][name] - ends[1][name]).abs().max() <= 1e-6 * ends[0][name].abs().max() for name in ends[0])


def test_the_report_counts_rows_that_end_in_eos_as_the_log_does(tmp_path):
    """ChatML's rows end with a line feed behind EOS."""
    model = ROOT / "examples" / "data" / "tiny-llama"
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    write(tmp_path / "rows.jsonl", [{"messages": said}, {"messages": [*said, said[0]]}, {"messages": said}])
    out = tmp_path / "out"
    values = {
        "model": model,
        "data": tmp_path / "rows.jsonl",
        "output": out,
        "max_steps": 1,
        "chat_template": "zephyr",
        "defaults": "trainer",
    }
    result = peer.run_cli("train", *(word for name, value in values.items() for word in (f"--{name}", value)), check=False)
    assert result.returncode == 0, result.stderr
    assert "100 % end in a trained EOS" in result.stdout and report(out)["rows_ending_in_eos"] == report(out)["rows"] == 3


def test_the_report_says_what_became_of_the_run(root, tmp_path):
    write(tmp_path / "good.jsonl", [json.loads(line) for line in (root / "left.jsonl").read_text().splitlines()])
    assert train(root, tmp_path / "out", tmp_path / "good.jsonl", max_steps=4).returncode == 0
    found = report(tmp_path / "out")
    assert found["rows"] == 10 and found["rows_ending_in_eos"] == 5 and found["input_tokens"] == 4 * 9
    assert found["resumed_from"] is None and found["versions"] == {
        "qlorapp": qlorapp.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    assert 0 < found["memory"]["planned_bytes"] < found["memory"]["process_peak_resident_bytes"]
    assert train(root, tmp_path / "out", tmp_path / "good.jsonl", max_steps=6, resume_from_checkpoint="true").returncode == 0
    again = report(tmp_path / "out")
    assert again["run_id"] == found["run_id"] and again["resumed_from"].endswith("checkpoint-4") and again["first_step"] == 4
