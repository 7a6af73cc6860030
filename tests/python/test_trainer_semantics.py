# SPDX-License-Identifier: Apache-2.0
"""The Trainer beside transformers' Trainer, run live: events, flags, logs, rates, order of rows, resume, best model, outputs."""

import json
import math
import os
import signal
import sys
import types

import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import adapters, arguments, losses, rows, trained

EVENTS = [
    "init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "pre_optimizer_step", "optimizer_step",
    "substep_end", "step_end", "evaluate", "predict", "save", "log", "prediction_step",
]  # fmt: skip
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
NEEDS = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
OURS_ALONE = {"eval_loss_token_weighted", "a_eval_loss_token_weighted"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A float checkpoint and a first adapter as folders, and rows. (bitsandbytes on a CPU evaluates in bfloat16.)"""
    root = tmp_path_factory.mktemp("semantics")
    peer.write_llama(root / "float")
    peer.add_adapters(transformers.LlamaForCausalLM.from_pretrained(root / "float")).save_pretrained(root / "adapter")
    return root, peer.write_rows(root / "rows.jsonl", 22), peer.write_rows(root / "eval.jsonl", 7, seed=5)


def recorder(base):
    """A callback of either side that notes every event, where it stands, the flags and what it is given."""

    class Recorder(base):
        def __init__(self):
            self.seen, self.given, self.logs = [], set(), []

    def method(name):
        def note(self, args, state, control, **kwargs):
            flags = tuple(getattr(control, flag) for flag in FLAGS)
            self.seen.append((name, state.global_step, round(state.epoch or 0, 9), flags))
            assert set(kwargs) >= NEEDS, name
            self.given |= {key for key, value in kwargs.items() if value is not None}
            if name == "log":
                self.logs.append(dict(kwargs["logs"]))

        return note

    for event in EVENTS:
        setattr(Recorder, f"on_{event}", method(event))
    return Recorder()


COMMON = {
    "per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "learning_rate": 5e-3, "logging_steps": 1,
    "save_strategy": "no", "weight_decay": 0.01, "warmup_steps": 2, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def theirs(setting, output, callbacks=(), resume=None, kind=transformers.Trainer, more=None, **options):
    root, train, held_out = setting
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(root / "float"), root / "adapter", is_trainable=True
    )
    args = transformers.TrainingArguments(str(output), use_cpu=True, label_names=["labels"], **{**COMMON, **options})
    seen = recorder(transformers.TrainerCallback)
    trainer = kind(
        model, args, data_collator=peer.collate, train_dataset=train, eval_dataset=held_out, callbacks=[seen, *callbacks],
        **(more or {}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, trainer.train(resume_from_checkpoint=resume), seen


def ours(setting, output, callbacks=(), resume=None, kind=qlorapp.Trainer, more=None, **options):
    root, train, held_out = setting
    model = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    model = qlorapp.PeftModel.from_pretrained(model, root / "adapter", is_trainable=True)
    seen = recorder(qlorapp.TrainerCallback)
    args = qlorapp.TrainingArguments(str(output), **{**COMMON, **options})
    trainer = kind(model, args, train_dataset=train, eval_dataset=held_out, callbacks=[seen, *callbacks], **(more or {}))
    trainer.remove_callback(qlorapp.PrinterCallback)
    return trainer, trainer.train(resume_from_checkpoint=resume), seen


def without_ours(entry):
    return {key: value for key, value in entry.items() if key not in OURS_ALONE}


def assert_same_entries(mine, reference, tolerance=1e-5):
    assert [list(without_ours(entry)) for entry in mine] == [list(entry) for entry in reference]
    for a, b in zip(mine, reference, strict=True):
        for key in b:
            if "runtime" in key or "second" in key or key == "total_flos":
                assert a[key] >= 0
            elif key in ("grad_norm",):
                assert a[key] == pytest.approx(b[key], rel=max(1e-3, 5 * tolerance))
            else:
                assert a[key] == pytest.approx(b[key], rel=tolerance, abs=1e-9), key


SETTINGS = {
    "plain": {},
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    "steps": {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4, "logging_steps": 3,
              "logging_first_step": True},
    "cut short": {"max_steps": 4, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "delayed": {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 4, "eval_on_start": True},
    "shares": {"eval_strategy": "steps", "eval_steps": 0.5, "logging_steps": 0.34},
    "half an epoch": {"num_train_epochs": 1.5, "logging_strategy": "epoch"},
    "best": {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True, "learning_rate": 0.04},
    "tokens": {"include_num_input_tokens_seen": "non_padding", "eval_strategy": "epoch"},
    "in Python": {"loss": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "epoch", "logging_steps": 2},
}  # fmt: skip


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_events_flags_logs_and_outputs_are_transformers(setting, tmp_path, options):
    kinds = [type("Mine", (OwnLoss, side.Trainer), {}) for side in (transformers, qlorapp)]
    kinds = [{"kind": kind} if options.get("loss") else {} for kind in kinds]
    options = {name: value for name, value in options.items() if name != "loss"}
    reference, their_output, they_saw = theirs(setting, tmp_path / "theirs", **options, **kinds[0])
    mine, our_output, we_saw = ours(setting, tmp_path / "ours", **options, **kinds[1])
    assert bool(mine._autograd_reasons) == bool(kinds[1])
    tolerance = 1e-5 if options.get("learning_rate") is None else 2e-3  # a run that diverges magnifies roundings
    assert we_saw.seen == they_saw.seen
    assert we_saw.given >= NEEDS - {"processing_class", "eval_dataloader"}
    assert_same_entries(we_saw.logs, they_saw.logs, tolerance)
    assert_same_entries(mine.state.log_history, reference.state.log_history, tolerance)
    assert our_output.global_step == their_output.global_step
    assert our_output.training_loss == pytest.approx(their_output.training_loss, rel=tolerance)
    assert set(our_output.metrics) == set(their_output.metrics)
    for field in ("max_steps", "best_global_step", "train_batch_size", "num_train_epochs", "eval_steps", "save_steps", "epoch"):
        assert getattr(mine.state, field) == getattr(reference.state, field), field
    if mine.state.best_metric is not None:
        assert mine.state.best_metric == pytest.approx(reference.state.best_metric, rel=tolerance)
        there = [os.path.basename(trainer.state.best_model_checkpoint) for trainer in (mine, reference)]
        assert there[0] == there[1]
    assert sorted(p.name for p in (tmp_path / "ours").glob("*")) == sorted(p.name for p in (tmp_path / "theirs").glob("*"))


@pytest.mark.parametrize("skip", [True, False])
def test_a_resumed_run_sees_the_rows_that_transformers_sees(setting, tmp_path, skip):
    options = {"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": not skip, "data_seed": 11}
    found = {}
    for side, run in (("theirs", theirs), ("ours", ours)):
        run(setting, tmp_path / side, **options)
        found[side], _, _ = run(setting, tmp_path / side, resume=str(tmp_path / side / "checkpoint-2"), **options)
    mine, reference = losses(found["ours"]), losses(found["theirs"])
    assert len(mine) == len(reference) and mine == pytest.approx(reference, rel=1e-5)
    whole, _, _ = ours(setting, tmp_path / "whole", **options)
    assert (losses(whole) == mine) == skip


def test_what_decays_is_what_transformers_lets_decay(setting, tmp_path):
    reference, _, _ = theirs(setting, tmp_path / "theirs", max_steps=1)
    mine, _, _ = ours(setting, tmp_path / "ours", max_steps=1)
    wanted = reference.get_decay_parameter_names(reference.model)
    trainable = {name for name, p in reference.model.named_parameters() if p.requires_grad}
    assert set(mine.get_decay_parameter_names(mine.model)) == trainable & set(wanted) == trainable


@pytest.mark.parametrize("rate", [5e-3, 0.3])
def test_early_stopping_ends_where_transformers_ends(setting, tmp_path, rate):
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_train_epochs": 5, "metric_for_best_model": "loss",
               "learning_rate": rate}  # fmt: skip
    reference, output, _ = theirs(setting, tmp_path / "theirs", [transformers.EarlyStoppingCallback(1, 0.01)], **options)
    mine, our_output, _ = ours(setting, tmp_path / "ours", [qlorapp.EarlyStoppingCallback(1, 0.01)], **options)
    assert our_output.global_step == output.global_step < mine.state.max_steps or rate < 0.1
    assert mine.state.best_global_step == reference.state.best_global_step


def test_a_skipped_fp16_step_of_the_native_loop_counts_and_the_schedule_waits_as_in_transformers(
    setting, tmp_path, monkeypatch
):
    """There the second step of the optimizer is left out and reported as a scaler's overflow; here gradients do overflow."""
    from accelerate.optimizer import AcceleratedOptimizer

    class Skips(transformers.Trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer()
            plain, calls = type(optimizer).step, []

            def step(self, *args, **kwargs):
                calls.append(1)
                self.was_skipped = len(calls) == 2
                return None if self.was_skipped else plain(self, *args, **kwargs)

            optimizer.__class__ = type("Skipping", (type(optimizer),), {"step": step})
            return optimizer

    class Overflow(qlorapp.TrainerCallback):
        """Of the second step alone."""

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                self.before = adapters(types.SimpleNamespace(model=model))
                self.poisoned = next(p for name, p in model.named_parameters() if "down_proj.lora_B" in name)
                self.poisoned.data.fill_(math.inf)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                name = next(name for name, p in model.named_parameters() if p is self.poisoned)
                self.poisoned.data.copy_(self.before[name])
                now = adapters(types.SimpleNamespace(model=model))
                assert all(torch.equal(value, now[key]) for key, value in self.before.items())

    monkeypatch.setattr(AcceleratedOptimizer, "step_was_skipped", property(lambda self: self.optimizer.was_skipped))
    options = {"warmup_steps": 0, "num_train_epochs": 3}
    reference, output, they_saw = theirs(setting, tmp_path / "theirs", kind=Skips, **options)
    mine, our_output, we_saw = ours(setting, tmp_path / "ours", [Overflow()], fp16=True, **options)
    assert not mine._autograd_reasons  # the native loop
    assert we_saw.seen == they_saw.seen
    assert our_output.global_step == output.global_step == len(losses(mine))
    entries = [[entry for entry in one.state.log_history if "loss" in entry] for one in (mine, reference)]
    rates = [[entry["learning_rate"] for entry in of] for of in entries]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12) and rates[0][1] == rates[0][2] < rates[0][0]
    for step, (a, b) in enumerate(zip(*entries, strict=True)):
        if step != 1:  # whose loss is not finite here
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), step
    assert not math.isfinite(entries[0][1]["loss"])
    assert mine._scaler.get_scale() == 32768.0 and mine._core.optimizer_steps == our_output.global_step - 1


# --- what needs no peer


def test_early_stopping_says_what_it_lacks(folder, tmp_path):
    with pytest.raises(ValueError, match="metric_for_best_model"):
        trained(folder, tmp_path, more={"callbacks": [qlorapp.EarlyStoppingCallback()]})


def test_the_best_adapters_are_loaded_at_the_end(folder, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = trained(folder, tmp_path, learning_rate=0.5, num_train_epochs=4, more={"eval_dataset": rows(5)}, **options)
    evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(evals) and trainer.state.best_model_checkpoint
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evals), rel=1e-6)
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {os.path.basename(trainer.state.best_model_checkpoint), "checkpoint-12"}


def test_a_metric_that_an_evaluation_has_not_is_named_with_those_it_has(folder, tmp_path):
    with pytest.raises(ValueError, match="no 'eval_bleu', but .*eval_loss"):
        trained(folder, tmp_path, eval_strategy="epoch", metric_for_best_model="bleu", more={"eval_dataset": rows(5)})


def test_a_nan_loss_is_shown_and_not_averaged_away(folder, tmp_path):
    class Poison(qlorapp.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                next(p for n, p in model.named_parameters() if "down_proj.lora_B" in n).data.fill_(math.nan)

    with pytest.raises(RuntimeError, match="got nan in step 3, whose loss is nan"):
        trained(folder, tmp_path, more={"callbacks": [Poison]})


@pytest.mark.parametrize("filtered", [True, False])
def test_logging_nan_inf_filter_is_about_the_mean_of_an_evaluation(folder, tmp_path, filtered):
    class Broken(qlorapp.Trainer):
        calls = 0

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            self.calls += 1
            return (loss * math.nan if self.calls == 1 else loss), logits, labels

    trainer = Broken(trained(folder, tmp_path, max_steps=1).model, arguments(tmp_path, logging_nan_inf_filter=filtered, per_device_eval_batch_size=2),
                     train_dataset=rows(4), eval_dataset=rows(6))  # fmt: skip
    assert math.isnan(trainer.evaluate()["eval_loss"]) != filtered


InPython = type("InPython", (OwnLoss, qlorapp.Trainer), {})


@pytest.mark.parametrize("kind", [qlorapp.Trainer, InPython])
def test_count_position_zero_divides_by_each_rows_first_label_too(folder, tmp_path, kind):
    data = [{**row, "labels": row["input_ids"]} for row in rows(12)]  # one step
    tokens = sum(len(row["input_ids"]) for row in data)
    by_targets, older = (
        losses(trained(folder, tmp_path, kind, data=data, max_steps=1, count_position_zero=count))[0] for count in (False, True)
    )
    assert older == pytest.approx(by_targets * (tokens - 12) / tokens, rel=1e-4)


def test_a_callback_may_stop_an_epoch_save_evaluate_and_log(folder, tmp_path):
    class Asks(qlorapp.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            asked = qlorapp.TrainerControl()
            asked.should_epoch_stop = state.global_step == 2
            asked.should_save = asked.should_evaluate = asked.should_log = state.global_step == 1
            asked.should_training_stop = control.should_training_stop
            return asked  # transformers takes a control that a callback returns

    trainer = trained(folder, tmp_path, logging_strategy="no", more={"callbacks": [Asks], "eval_dataset": rows(4)})
    entries = trainer.state.log_history
    assert [entry["step"] for entry in entries if "loss" in entry] == [1] == [e["step"] for e in entries if "eval_loss" in e]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert trainer.output.global_step == 5  # two steps of the first epoch, three of the second


def test_callbacks_come_and_go(folder, tmp_path):
    class Mine(qlorapp.TrainerCallback):
        seen = 0

        def on_step_end(self, args, state, control, **kwargs):
            type(self).seen += 1

    trainer = qlorapp.Trainer(
        trained(folder, tmp_path, max_steps=1).model, arguments(tmp_path, max_steps=2), train_dataset=rows(8)
    )
    trainer.add_callback(Mine)
    one = trainer.pop_callback(Mine)
    assert isinstance(one, Mine) and trainer.pop_callback(Mine) is None
    trainer.add_callback(one)
    trainer.train()
    assert Mine.seen == 2
    trainer.remove_callback(Mine)
    assert one not in trainer.callback_handler.callbacks


def test_a_callback_that_steers_an_optimizer_that_is_not_used_hears_of_it(folder, tmp_path):
    class Steers(qlorapp.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            optimizer.param_groups[0]["lr"] = 1.0

    with pytest.raises(ValueError, match="the C\\+\\+ loop does not read"):
        trained(folder, tmp_path, more={"callbacks": [Steers]})


def test_a_checkpoint_of_the_model_alone_cannot_be_resumed_from(folder, tmp_path):
    trained(folder, tmp_path, save_strategy="epoch", save_only_model=True)
    with pytest.raises(qlorapp.FormatError, match="the model alone .save_only_model."):
        trained(folder, tmp_path, resume=tmp_path / "checkpoint-3")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_sigterm_ends_a_run_with_enable_jit_checkpoint_after_its_step_with_a_checkpoint(folder, tmp_path):
    class Terminate(qlorapp.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    trainer = trained(folder, tmp_path, enable_jit_checkpoint=True, more={"callbacks": [Terminate]})
    assert trainer.output.global_step == 2 and (tmp_path / "checkpoint-2" / "run_state.json").exists()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("where", [{"logging_dir": "tb"}, {"run_name": "mine"}, {}])
def test_report_to_tensorboard_writes_scalars_under_transformers_names(folder, tmp_path, monkeypatch, where):
    written = {}

    class SummaryWriter:
        def __init__(self, log_dir):
            written["dir"] = log_dir

        def add_text(self, *args):
            written["text"] = args

        def add_scalar(self, name, value, step):
            written.setdefault(name, []).append(step)

        def flush(self): ...
        def close(self):
            written["closed"] = True

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trained(folder, tmp_path, report_to="tensorboard", eval_strategy="epoch", more={"eval_dataset": rows(4)}, **where)
    assert written["train/loss"] == [1, 2, 3, 4, 5, 6] and written["eval/loss"] == [3, 6] and written["closed"]
    wanted = where.get("logging_dir", str(tmp_path / "runs" / where.get("run_name", "")))
    assert written["dir"].startswith(wanted) and json.loads(written["text"][1])["report_to"] == ["tensorboard"]


def test_what_is_written_can_be_read_by_tensorboard(folder, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install -r requirements/test.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trained(folder, tmp_path, report_to="tensorboard", logging_dir=str(tmp_path / "tb"))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert [step for step, _ in found] == [step for step, _ in logged] and len(found) == 6
    assert [value for _, value in found] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_tensorboard_that_is_not_installed_is_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        trained(folder, tmp_path, report_to="tensorboard")
    trained(folder, tmp_path, report_to="all", max_steps=1)


def test_evaluations_that_cannot_be_are_said_before_training(folder, tmp_path):
    with pytest.raises(ValueError, match="eval_strategy is 'epoch', but there is no eval_dataset"):
        trained(folder, tmp_path, eval_strategy="epoch")
    for options, rule in [
        ({"save_strategy": "best"}, "save_strategy=best needs evaluations"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "to be the same"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4},
         "multiple"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=rule):
            arguments(tmp_path, **options)


def test_adapters_after_the_run_are_those_of_the_command(folder, tmp_path):
    """The loop from Python and from the command line is one: nothing of the callbacks changes a number."""
    quiet, watched = (
        trained(folder, tmp_path / "a"),
        trained(folder, tmp_path / "b", more={"callbacks": [recorder(qlorapp.TrainerCallback)]}),
    )
    assert all(torch.equal(value, adapters(watched)[name]) for name, value in adapters(quiet).items())


@pytest.mark.parametrize("kind", [qlorapp.Trainer, qlorapp.SFTTrainer])
def test_arguments_that_are_changed_after_the_trainer_was_made_count(folder, tmp_path, kind):
    options = {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    if kind is qlorapp.SFTTrainer:
        args = qlorapp.SFTConfig(str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, **options)
    else:
        args = qlorapp.TrainingArguments(str(tmp_path), **options)
    trainer = kind(load(folder), args, train_dataset=rows(26))
    trainer.args.max_steps, trainer.args.learning_rate = 1, 0.125
    assert trainer.train().global_step == 1 and trainer.state.max_steps == 1
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == [0.125]


class Plain:
    """A tokenizer as far as prepared rows need one."""

    eos_token_id = pad_token_id = 2
    pad_token = eos_token = "x"

    def get_vocab(self):
        return {"x": 2}

    def save_pretrained(self, folder):
        with open(os.path.join(folder, "plain.txt"), "w", encoding="utf-8") as file:
            file.write("saved")


def test_checkpoints_hold_the_tokenizer(folder, tmp_path):
    trained(folder, tmp_path, more={"processing_class": Plain()}, save_strategy="steps", save_steps=2, max_steps=4)
    assert all((tmp_path / f"checkpoint-{step}" / "plain.txt").read_text() == "saved" for step in (2, 4))


def test_several_processes_are_refused_before_each_trains_the_whole_run(folder, tmp_path, monkeypatch):
    model = load(folder)
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        qlorapp.Trainer(model, arguments(tmp_path), train_dataset=rows(4))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"\[Trainer\] training runs in one process.*WORLD_SIZE=2 .*python script\.py"):
        qlorapp.Trainer(model, arguments(tmp_path), train_dataset=rows(4))
