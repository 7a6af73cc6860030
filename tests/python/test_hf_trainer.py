# SPDX-License-Identifier: Apache-2.0
"""Trainer over transformers' own: steps of C++ and of torch give the same run, and steps that C++ does not compute are torch's."""

import dataclasses
import json
import logging
import os
from typing import ClassVar

import pytest
import qlorapp
import torch
import transformers
from qlorapp.hf.training_arguments import OWN
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import (
    adapted,
    adapters,
    arguments,
    assert_same_run,
    base_model,
    in_cpp,
    losses,
    made,
    rows,
    tokenizer,
    trained,
)

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
EVAL_ROWS = rows(9, seed=3)


class TestArguments:
    def test_it_is_transformers_own_with_extra_fields(self, tmp_path):
        args = qlorapp.TrainingArguments(
            output_dir=str(tmp_path), checkpoint_keep="attention_only", memory_budget="14GiB", report_to="none"
        )
        assert isinstance(args, transformers.TrainingArguments) and args.checkpoint_keep == ["attention_only"]
        theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        assert {field.name for field in dataclasses.fields(qlorapp.TrainingArguments)} - theirs == set(OWN)
        assert args.to_dict()["memory_budget"] == "14GiB"

    def test_values_are_checked(self, tmp_path):
        with pytest.raises(ValueError, match="everything, attention_only"):
            qlorapp.TrainingArguments(output_dir=str(tmp_path), checkpoint_keep="some")
        with pytest.raises(TypeError, match="learning_rat"):
            qlorapp.TrainingArguments(output_dir=str(tmp_path), learning_rat=1)

    def test_older_names(self, tmp_path, caplog):
        with caplog.at_level(logging.WARNING, logger="qlorapp"):
            args = qlorapp.TrainingArguments(
                output_dir=str(tmp_path), evaluation_strategy="steps", eval_steps=5, warmup_ratio=0.25, per_gpu_train_batch_size=3,
                group_by_length=True, overwrite_output_dir=True, no_cuda=True, report_to="none",
            )  # fmt: skip
        assert args.eval_strategy == "steps" and args.per_device_train_batch_size == 3 and args.use_cpu
        assert args.get_warmup_steps(100) == 25 and args.train_sampling_strategy == "group_by_length"
        with pytest.raises(TypeError, match="same option"):
            qlorapp.TrainingArguments(output_dir=str(tmp_path), evaluation_strategy="no", eval_strategy="steps")

    @pytest.mark.parametrize("kind", [qlorapp.TrainingArguments, qlorapp.SFTConfig])
    def test_the_argument_parser(self, kind, tmp_path):
        parser = transformers.HfArgumentParser(kind)
        words = ["--output_dir", str(tmp_path), "--loss_chunk_rows", "64", "--fp8", "--checkpoint_keep", "input_only:1", "everything:2",
                 "--report_to", "none", "--use_cpu"]  # fmt: skip
        (args,) = parser.parse_args_into_dataclasses(words)
        assert args.loss_chunk_rows == 64 and args.fp8 is True and args.checkpoint_keep == ["input_only:1", "everything:2"]
        assert "--memory_budget" in parser.format_help()


class TestSameRun:
    OPTIONS: ClassVar = {
        "as it is": {},
        "cosine with warm-up, decay, clipping": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "no clipping, log every third": {"max_grad_norm": 0.0, "logging_steps": 3, "logging_first_step": True},
        "checkpointed blocks": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        "sequential, last batch dropped": {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        "max_steps over epochs": {"max_steps": 8, "data_seed": 7},
        "by epoch": {"logging_strategy": "epoch"},
    }  # fmt: skip

    @pytest.mark.parametrize("case", OPTIONS)
    def test_cpp_and_transformers(self, folder, tmp_path, case):
        mine, theirs = (
            trained(kind, folder, tmp_path, **self.OPTIONS[case]) for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine)
        assert_same_run(mine, theirs)
        assert mine.output.global_step == theirs.output.global_step
        assert list(mine.output.metrics) == list(theirs.output.metrics)
        assert abs(mine.output.training_loss - theirs.output.training_loss) < 1e-5

    def test_evaluation_and_the_best_model(self, folder, tmp_path):
        options = {
            **EVALUATED,
            "load_best_model_at_end": True,
            "greater_is_better": True,
            "save_total_limit": 2,
        }  # the first is the best
        mine, theirs = (
            trained(kind, folder, tmp_path / kind.__module__, more={"eval_dataset": EVAL_ROWS}, **options)
            for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine)
        assert_same_run(mine, theirs)
        assert mine.state.best_global_step == theirs.state.best_global_step == 2
        left = [{*os.listdir(tmp_path / kind.__module__)} for kind in (qlorapp.Trainer, transformers.Trainer)]
        assert left[0] == left[1] | {"run.json", "run_report.json", "loss.svg"}

    def test_several_data_sets_and_metrics(self, folder, tmp_path):
        def metrics(prediction):
            return {"wide": float(prediction.predictions.shape[-1]), "rows": float(len(prediction.label_ids))}

        more = {"eval_dataset": {"a": EVAL_ROWS, "b": EVAL_ROWS[:4]}, "compute_metrics": metrics}
        options = {"eval_strategy": "epoch", "eval_on_start": True}
        mine, theirs = (
            trained(kind, folder, tmp_path, more=more, **options) for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine) and any(entry.get("eval_b_rows") == 4 for entry in mine.state.log_history)
        assert_same_run(mine, theirs)

    def test_plain_arguments_of_transformers(self, folder, tmp_path):
        plain = {key: value for key, value in arguments(tmp_path).to_dict().items() if key not in OWN}
        args = transformers.TrainingArguments(**plain)
        trainers = []
        for kind in (qlorapp.Trainer, transformers.Trainer):
            trainers.append(made(kind, folder, tmp_path, gradient_checkpointing=True))
            trainers[-1].args = args
            trainers[-1].train()
        assert in_cpp(trainers[0])
        assert_same_run(*trainers)

    def test_bfloat16_under_autocast(self, folder, tmp_path):
        mine, theirs = (
            trained(kind, folder, tmp_path, model=adapted(base_model(folder, dtype=torch.bfloat16)), bf16=True)
            for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine)
        torch.testing.assert_close(torch.tensor(losses(mine)), torch.tensor(losses(theirs)), rtol=0.02, atol=0.02)
        mine.train()
        assert in_cpp(mine)

    def test_state_and_files_of_a_checkpoint(self, folder, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3, "include_num_input_tokens_seen": "non_padding"}
        more = {"processing_class": tokenizer()}
        for kind in (qlorapp.Trainer, transformers.Trainer):
            trained(kind, folder, tmp_path / kind.__module__, more=more, **options)
        mine, theirs = (tmp_path / kind.__module__ / "checkpoint-3" for kind in (qlorapp.Trainer, transformers.Trainer))
        states = [json.loads((path / "trainer_state.json").read_text()) for path in (mine, theirs)]
        assert states[0].keys() == states[1].keys()
        for key in set(states[0]) - {"log_history", "total_flos", "stateful_callbacks"}:
            assert states[0][key] == states[1][key], key
        ours, others = ({*os.listdir(path)} for path in (mine, theirs))
        assert others <= ours and ours - others == {"run_inputs.json", "loop_state.pth"}
        assert (mine / "adapter_config.json").read_text() == (theirs / "adapter_config.json").read_text()


class Recorder(transformers.TrainerCallback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def heard(args, state, control, **given):
            rate = given["optimizer"].param_groups[0]["lr"] if given["optimizer"] is not None else None
            last = given["lr_scheduler"].get_last_lr()[0] if given["lr_scheduler"] is not None else None
            there = sorted(key for key, value in given.items() if value is not None)
            flags = {key: value for key, value in vars(control).items()}
            training = given["model"].training if name not in ("on_init_end", "on_train_begin", "on_epoch_begin") else None
            rounded = [None if value is None else round(value, 12) for value in (state.epoch, rate, last)]
            self.events.append((name, state.global_step, *rounded, flags, there, training, sorted(given.get("logs") or {})))
            return self.asks(name, state, control)

        return heard

    def asks(self, name, state, control):
        return None


class TestCallbacks:
    @pytest.mark.parametrize("case", ["plain", "evaluated", "stops", "asks", "epoch"])
    def test_they_see_the_same_both_ways(self, folder, tmp_path, case):
        class Asking(Recorder):
            def asks(self, name, state, control):
                if case == "stops" and name == "on_step_end" and state.global_step == 3:
                    control.should_training_stop = True
                if case == "epoch" and name == "on_step_end" and state.global_step == 1:
                    control.should_epoch_stop = True
                if case == "asks" and name == "on_step_end":
                    control.should_log, control.should_evaluate = state.global_step == 2, state.global_step == 4
                    control.should_save = state.global_step == 5
                return control

        seen = []
        for kind in (qlorapp.Trainer, transformers.Trainer):
            recorder = Asking()
            options = {**EVALUATED, "eval_on_start": True} if case == "evaluated" else {}
            trainer = trained(
                kind, folder, tmp_path / kind.__module__, more={"callbacks": [recorder], "eval_dataset": EVAL_ROWS}, **options
            )
            assert kind is not qlorapp.Trainer or in_cpp(trainer)
            seen.append(recorder.events)
        assert [event[:2] for event in seen[0]] == [event[:2] for event in seen[1]]
        for mine, theirs in zip(*seen, strict=True):
            assert mine == theirs

    def test_early_stopping(self, folder, tmp_path):
        options = {
            **EVALUATED,
            "eval_steps": 1,
            "save_steps": 1,
            "load_best_model_at_end": True,
            "learning_rate": 1.0,
            "max_grad_norm": 0.0,
        }
        stopped = []
        for kind in (qlorapp.Trainer, transformers.Trainer):
            more = {"eval_dataset": EVAL_ROWS, "callbacks": [transformers.EarlyStoppingCallback(2)]}
            stopped.append(trained(kind, folder, tmp_path / kind.__module__, more=more, num_train_epochs=5, **options))
        assert stopped[0].state.global_step == stopped[1].state.global_step < stopped[0].state.max_steps
        assert stopped[0].state.best_model_checkpoint.endswith(f"checkpoint-{stopped[1].state.best_global_step}")

    def test_an_error_in_a_callback_reaches_the_caller(self, folder, tmp_path):
        class Breaks(transformers.TrainerCallback):
            def on_log(self, args, state, control, **given):
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            trained(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Breaks()]})

    def test_an_interrupted_run_leaves_a_checkpoint(self, folder, tmp_path):
        class Interrupts(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **given):
                if state.global_step == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trained(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Interrupts()]})
        whole = trained(qlorapp.Trainer, folder, tmp_path / "whole")
        resumed = trained(qlorapp.Trainer, folder, tmp_path, resume=True)
        assert losses(resumed) == losses(whole)


class TestResume:
    @pytest.mark.parametrize("step", [1, 2, 3, 4])
    @pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
    def test_it_goes_on_with_the_same_bits(self, folder, tmp_path, step, optim):
        options = {
            "save_strategy": "steps",
            "save_steps": step,
            "logging_steps": 3,
            "optim": optim,
            "lora": {"lora_dropout": 0.1},
        }
        whole = trained(qlorapp.Trainer, folder, tmp_path, **options)
        resumed = trained(qlorapp.Trainer, folder, tmp_path / "again", resume=str(tmp_path / f"checkpoint-{step}"), **options)
        assert in_cpp(whole) and in_cpp(resumed)
        assert losses(resumed) == losses(whole) and resumed.state.global_step == whole.state.global_step
        for name, value in adapters(whole).items():
            assert torch.equal(adapters(resumed)[name], value), name

    def test_a_checkpoint_of_transformers_goes_on(self, folder, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2}
        whole = trained(transformers.Trainer, folder, tmp_path, **options)
        resume = {"resume": str(tmp_path / "checkpoint-2"), **options}
        in_windows = trained(qlorapp.Trainer, folder, tmp_path / "windows", **resume)
        assert in_cpp(in_windows) and losses(in_windows) == pytest.approx(losses(whole), rel=1e-6)

        class WithTheirSteps(qlorapp.Trainer):
            training_step = transformers.Trainer.training_step

        resumed = trained(WithTheirSteps, folder, tmp_path / "again", **resume)
        assert not in_cpp(resumed) and losses(resumed) == losses(whole)
        for name, value in adapters(whole).items():
            assert torch.equal(adapters(resumed)[name], value), name

    def test_trained_again_it_begins_anew(self, folder, tmp_path):
        trainer = trained(qlorapp.Trainer, folder, tmp_path, max_steps=2)
        first = losses(trainer)
        trainer.train()
        again = losses(trainer)
        assert in_cpp(trainer) and trainer.state.global_step == 2 and len(again) == 2 and again[0] < first[0]


class TestTorchComputes:
    """What C++ does not compute is computed by torch, with the reason logged once."""

    @pytest.fixture
    def said(self, caplog):
        caplog.set_level(logging.INFO, logger="qlorapp")
        return lambda: [record.getMessage() for record in caplog.records if "torch computes the steps" in record.getMessage()]

    CASES: ClassVar = {
        "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, {}),
        "neftune_noise_alpha": ({"neftune_noise_alpha": 5}, {}),
        "optim": ({"optim": "sgd"}, {}),
        "lr_scheduler_type": ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, {"eval_dataset": EVAL_ROWS}),
        "compute_loss_func": ({}, {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()}),
        "use_seedable_sampler": ({"accelerator_config": {"use_seedable_sampler": False}}, {}),
        "bf16": ({"bf16": True}, {}),
    }  # fmt: skip

    @pytest.mark.parametrize("case", CASES)
    def test_options(self, folder, tmp_path, case, said):
        options, more = self.CASES[case]
        trainer = trained(qlorapp.Trainer, folder, tmp_path, more=more, max_steps=2, **options)
        assert not in_cpp(trainer) and len(said()) == 1 and case in said()[0], said()
        assert trainer.state.global_step == 2
        trainer.train()
        assert len(said()) == 1

    def test_overridden_methods_are_called(self, folder, tmp_path, said):
        for name in ("compute_loss", "training_step", "create_optimizer", "_prepare_inputs"):
            called = []

            def own(self, *args, name=name, called=called, **given):
                called.append(name)
                return getattr(transformers.Trainer, name)(self, *args, **given)

            kind = type("Mine", (qlorapp.Trainer,), {name: own})
            trainer = trained(kind, folder, tmp_path, max_steps=1)
            assert called and not in_cpp(trainer) and f"Mine.{name} is overridden" in said()[-1]

    def test_an_instance_method_and_a_patched_class(self, folder, tmp_path, said, monkeypatch):
        trainer = made(qlorapp.Trainer, folder, tmp_path, max_steps=1)
        trainer.training_step = lambda *args, **given: type(trainer).training_step(trainer, *args, **given)
        trainer.train()
        assert "training_step was replaced" in said()[-1]
        theirs = transformers.Trainer.compute_loss
        monkeypatch.setattr(transformers.Trainer, "compute_loss", lambda *args, **given: theirs(*args, **given))
        trained(qlorapp.Trainer, folder, tmp_path, max_steps=1)
        assert "compute_loss is overridden" in said()[-1]

    def test_evaluate_and_log_may_be_overridden(self, folder, tmp_path):
        class Mine(qlorapp.Trainer):
            heard = 0

            def log(self, logs, start_time=None):
                logs["mine"] = 1.0
                super().log(logs, start_time)

            def evaluate(self, *args, **given):
                Mine.heard += 1
                return super().evaluate(*args, **given)

        trainer = trained(Mine, folder, tmp_path, more={"eval_dataset": EVAL_ROWS}, **EVALUATED)
        assert in_cpp(trainer) and Mine.heard == 3 and all("mine" in entry for entry in trainer.state.log_history)

    def test_other_models(self, folder, tmp_path, said):
        trained(qlorapp.Trainer, folder, tmp_path, max_steps=1, lora={"use_dora": True})
        assert "Dora" in said()[-1]
        trained(qlorapp.Trainer, folder, tmp_path, max_steps=1, lora={"modules_to_save": ["lm_head"]})
        trainer = made(qlorapp.Trainer, folder, tmp_path, max_steps=1)
        next(p for p in trainer.model.parameters() if p.requires_grad).requires_grad_(False)
        trainer.train()
        assert len(said()) == 3 and "is frozen" in said()[-1]
        trainer = made(qlorapp.Trainer, folder, tmp_path, max_steps=1)
        next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient)
        trainer.train()
        assert "has hooks" in said()[-1]

    def test_padding_on_the_left_and_rows_that_differ(self, folder, tmp_path, caplog):
        caplog.set_level(logging.INFO, logger="qlorapp")
        left = tokenizer()
        left.padding_side = "left"
        every = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(26)]
        more = {"data_collator": transformers.DataCollatorForSeq2Seq(left)}
        trainer = trained(qlorapp.Trainer, folder, tmp_path, data=every, more=more, max_steps=2)
        assert "labels are predicted from padding" in caplog.text
        assert_same_run(trainer, trained(transformers.Trainer, folder, tmp_path, data=every, more=more, max_steps=2))
        trainer = trained(qlorapp.Trainer, folder, tmp_path, more=more, max_steps=2)  # the first token of each row is masked
        assert in_cpp(trainer)
        with pytest.raises(ValueError):
            trained(qlorapp.Trainer, folder, tmp_path, more={"data_collator": transformers.default_data_collator}, max_steps=1)

    def test_a_language_model_collator_makes_its_labels(self, folder, tmp_path):
        collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        data = [{"input_ids": row["input_ids"]} for row in rows(26)]
        mine, theirs = (
            trained(kind, folder, tmp_path, data=data, more={"data_collator": collator})
            for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine)
        assert_same_run(mine, theirs)

    def test_a_flattening_collator_packs_batches(self, folder, tmp_path):
        collator = transformers.DataCollatorWithFlattening()
        mine, theirs = (
            trained(kind, folder, tmp_path, more={"data_collator": collator})
            for kind in (qlorapp.Trainer, transformers.Trainer)
        )
        assert in_cpp(mine)
        assert_same_run(mine, theirs)


def test_a_run_is_gone_when_it_ends(folder, tmp_path):
    import gc
    import weakref

    trainer = trained(qlorapp.Trainer, folder, tmp_path, max_steps=1)
    gone = weakref.ref(trainer.model)
    assert trainer._windows is None
    del trainer
    gc.collect()
    assert gone() is None


def test_memory_is_cpps(folder, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="qlorapp"):
        trainer = trained(
            qlorapp.Trainer,
            folder,
            tmp_path,
            max_steps=2,
            memory_budget="2GiB",
            worst_case_first=True,
            gradient_checkpointing=True,
        )
    assert in_cpp(trainer) and "the largest micro-batch of the data" in caplog.text
    args = trainer.args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 12
    assert arguments(tmp_path).memory_budget == ""
