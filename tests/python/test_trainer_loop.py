# SPDX-License-Identifier: Apache-2.0
"""Steps of C++ where a script asks for more than a plain run: beside transformers' own, run live."""

import inspect
import json

import pytest
import qlorapp
import torch
import transformers
from qlorapp.hf.loop_predicate import REPLACED, why_not
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import (
    Computed,
    adapted,
    adapters,
    assert_same_run,
    base_model,
    in_cpp,
    losses,
    made,
    rows,
    tokenizer,
    trained,
)

KINDS = (qlorapp.Trainer, transformers.Trainer)
EVAL_ROWS = rows(9, seed=3)


def both(folder, tmp_path, **options):
    mine, theirs = (trained(kind, folder, tmp_path / kind.__module__, **options) for kind in KINDS)
    assert in_cpp(mine)
    return mine, theirs


# --- options


OPTIONS = {
    "of AdamW": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.3},
    "of a schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "warmup_steps": 0.3},
    "by shares": {"eval_strategy": "steps", "eval_steps": 0.5, "logging_steps": 0.34, "more": {"eval_dataset": EVAL_ROWS}},
    "half an epoch, delayed": {"num_train_epochs": 1.5, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3,
                               "more": {"eval_dataset": EVAL_ROWS}},
    "the best is saved": {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True,
                          "metric_for_best_model": "loss", "more": {"eval_dataset": EVAL_ROWS}},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options_mean_what_they_mean_to_transformers(folder, tmp_path, case):
    mine, theirs = both(folder, tmp_path, **OPTIONS[case])
    assert_same_run(mine, theirs)
    assert mine.state.best_global_step == theirs.state.best_global_step
    own = ("run.json", "run_report.json", "loss.svg")
    left = [sorted(path.name for path in (tmp_path / kind.__module__).glob("*") if path.name not in own) for kind in KINDS]
    assert left[0] == left[1]


def test_ragged_rows_are_weighted_by_their_tokens_however_a_batch_is_split(folder, tmp_path):
    def run(batch, accumulation):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        return trained(
            qlorapp.Trainer, folder, tmp_path, data=rows(24), train_sampling_strategy="sequential", num_train_epochs=1, **sizes
        )

    whole = run(12, 1)
    assert in_cpp(whole) and len(losses(whole)) == 2
    for sizes in ((4, 3), (1, 12)):
        assert_same_run(run(*sizes), whole)


def test_rows_that_are_grouped_by_length_come_in_transformers_order_also_when_a_run_is_resumed_in_an_epoch(folder, tmp_path):
    """The global generator draws it, at the beginning of an epoch."""
    options = {"seed": 5, "train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 1}
    mine, theirs = (trained(kind, folder, tmp_path / kind.__module__, **options) for kind in KINDS)
    assert in_cpp(mine)
    assert_same_run(mine, theirs)
    for step in (2, 5):
        again = trained(
            qlorapp.Trainer,
            folder,
            tmp_path / f"{step}",
            resume=str(tmp_path / "qlorapp.hf.trainer" / f"checkpoint-{step}"),
            **options,
        )
        assert losses(again) == losses(mine)


def test_count_position_zero_divides_by_each_rows_first_label_too(folder, tmp_path):
    data = [{**row, "labels": row["input_ids"]} for row in rows(12)]  # one step
    tokens = sum(len(row["input_ids"]) for row in data)
    by_targets, older = (
        trained(qlorapp.Trainer, folder, tmp_path, data=data, max_steps=1, count_position_zero=count) for count in (False, True)
    )
    assert in_cpp(older)
    assert losses(older)[0] == pytest.approx(losses(by_targets)[0] * (tokens - 12) / tokens, rel=1e-4)


def test_numbers_of_numpy_and_no_clipping_reach_cpp(folder, tmp_path):
    import numpy as np

    options = {"max_steps": np.int64(2), "learning_rate": np.float32(0.5), "max_grad_norm": None}
    plain = {"max_steps": 2, "learning_rate": 0.5, "max_grad_norm": 0.0}
    given, expected = (trained(qlorapp.Trainer, folder, tmp_path, **some) for some in (options, plain))
    assert in_cpp(given) and losses(given) == losses(expected)


def test_arguments_and_rows_that_are_changed_after_the_trainer_was_made_count(folder, tmp_path):
    found = []
    for kind in KINDS:
        trainer = made(kind, folder, tmp_path)
        trainer.train_dataset = rows(14, seed=4)
        trainer.args.max_steps, trainer.args.learning_rate = 3, 0.125
        trainer.train()
        found.append(trainer)
    assert in_cpp(found[0]) and found[0].state.max_steps == 3
    assert_same_run(*found)


# --- overrides and hooks


def test_no_override_is_skipped_without_a_word(folder, tmp_path):
    """A method that transformers' loop calls is called here as well, or leaves the steps to torch."""
    names = {
        name
        for kind in transformers.Trainer.__mro__[:-1]
        for name, value in vars(kind).items()
        if not name.startswith("__") and (inspect.isfunction(value) or isinstance(value, staticmethod))
    }

    def called(base, names):
        seen = set()

        def wrap(name):
            def method(self, *args, **given):
                seen.add(name)
                return getattr(super(kind, self), name)(*args, **given)

            return method

        kind = type("Mine", (base,), {name: wrap(name) for name in names})
        options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
        more = {"eval_dataset": EVAL_ROWS, "processing_class": tokenizer()}
        return seen, trained(kind, folder, tmp_path / base.__module__, more=more, num_train_epochs=1, **options)

    theirs, _ = called(transformers.Trainer, names)
    mine, trainer = called(qlorapp.Trainer, names - set(REPLACED))
    assert in_cpp(trainer) and len(theirs) > 60
    assert theirs - set(REPLACED) - mine == set()


def halved(module, args, output):
    output.loss = output.loss * 0.5
    return output


class PatchedForward:
    def __init__(self, plain):
        self.plain, self.__signature__ = plain, inspect.signature(plain)

    def __call__(self, *args, **given):
        return halved(None, args, self.plain(*args, **given))


HOOKS = {
    "a hook": lambda model: model.register_forward_hook(halved),
    "a hook of the base": lambda model: model.get_base_model().register_forward_hook(halved),
    "a patched forward": lambda model: setattr(model, "forward", PatchedForward(model.forward)),
    "a patched forward of the base": lambda model: setattr(model.get_base_model(), "forward", PatchedForward(model.get_base_model().forward)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_and_a_patched_forward_run_in_steps_and_evaluations(folder, tmp_path, name):
    options = {"max_steps": 1, "eval_on_start": True, "more": {"eval_dataset": EVAL_ROWS}}
    plain = trained(qlorapp.Trainer, folder, tmp_path, **options)
    model = adapted(base_model(folder))
    HOOKS[name](model)
    hooked = trained(qlorapp.Trainer, folder, tmp_path, model=model, **options)
    assert in_cpp(plain) and not in_cpp(hooked)
    assert losses(hooked) == pytest.approx([0.5 * loss for loss in losses(plain)], rel=1e-5)
    assert hooked.state.log_history[0]["eval_loss"] == pytest.approx(0.5 * plain.state.log_history[0]["eval_loss"], rel=1e-5)


def test_what_was_undone_is_no_reason_to_leave_cpp(folder, tmp_path):
    trainer = made(qlorapp.Trainer, folder, tmp_path)
    model = trainer.model
    hooks = [model.register_forward_hook(halved), model.get_base_model().model.layers[0].register_forward_pre_hook(print)]
    parameter = next(p for p in model.parameters() if p.requires_grad)
    hooks += [parameter.register_hook(lambda gradient: gradient), parameter.register_post_accumulate_grad_hook(print)]
    assert why_not(trainer)
    for hook in hooks:
        hook.remove()
    assert why_not(trainer) == ""


def test_an_optimizer_and_a_schedule_that_are_set_later_are_used(folder, tmp_path):
    trainer = made(qlorapp.Trainer, folder, tmp_path)
    trainer.optimizer = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=0.2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5**step)
    for _ in range(2):  # in a second run, too
        trainer.train()
        assert not in_cpp(trainer) and isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(rates) == 6 and rates[1] == pytest.approx(0.5 * rates[0])


# --- runs one after another


def test_each_run_of_a_model_init_has_a_model_of_its_own(folder, tmp_path):
    trainer = made(qlorapp.Trainer, folder, tmp_path, max_steps=2)
    trainer = qlorapp.Trainer(
        args=trainer.args,
        train_dataset=rows(26),
        data_collator=trainer.data_collator,
        model_init=lambda: adapted(base_model(folder)),
    )
    trainer.train()
    first, before = trainer.model, losses(trainer)
    trainer.train()
    assert in_cpp(trainer) and trainer.model is not first and losses(trainer) == before


def test_a_run_after_an_exception_begins_anew(folder, tmp_path):
    class Fails(transformers.TrainerCallback):
        on = True

        def on_substep_end(self, args, state, control, **given):
            if self.on:
                raise KeyError("mine")

    callback = Fails()
    trainer = made(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [callback]})
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    callback.on = False
    trainer.train()
    assert in_cpp(trainer) and losses(trainer) == losses(trained(qlorapp.Trainer, folder, tmp_path / "whole"))


# --- checkpoints


@pytest.mark.parametrize("skip", [True, False])
def test_a_resumed_run_sees_the_rows_that_transformers_sees(folder, tmp_path, skip):
    options = {"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": not skip, "data_seed": 11}
    whole, _ = both(folder, tmp_path, **options)
    mine, theirs = (
        trained(kind, folder, tmp_path, resume=str(tmp_path / kind.__module__ / "checkpoint-2"), **options) for kind in KINDS
    )
    assert in_cpp(mine) and losses(mine) == pytest.approx(losses(theirs), rel=1e-5)
    assert (losses(whole) == losses(mine)) == skip


def test_states_of_callbacks_travel_with_a_checkpoint(folder, tmp_path):
    class Counts(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self, patience=1):
            self.patience, self.seen = patience, 0

        def on_step_end(self, args, state, control, **given):
            self.seen += 1

        def state(self):
            return {"args": {"patience": self.patience}, "attributes": {"seen": self.seen}}

    options = {"save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    trained(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Counts(7)]}, **options)
    again = trained(
        qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Counts()]}, resume=str(tmp_path / "checkpoint-3"), **options
    )
    (restored,) = [callback for callback in again.callback_handler.callbacks if isinstance(callback, Counts)]
    assert in_cpp(again) and (restored.patience, restored.seen) == (7, 6)


def test_a_checkpoint_of_the_model_alone_says_that_the_run_is_not_in_it(folder, tmp_path, caplog):
    trained(qlorapp.Trainer, folder, tmp_path, save_strategy="epoch", save_only_model=True)
    trained(qlorapp.Trainer, folder, tmp_path / "again", resume=str(tmp_path / "checkpoint-3"))
    assert "has no optimizer.pt (save_only_model): the optimizer's moments and the schedule begin anew" in caplog.text


@pytest.mark.parametrize("name", ["save_model", "_save"])
def test_a_save_of_ones_own_is_called_for_each_checkpoint_which_can_be_resumed_from(folder, tmp_path, name):
    def save(self, output_dir=None, *args, **given):
        getattr(super(kind, self), name)(output_dir, *args, **given)
        with open(f"{output_dir}/mine.json", "w") as file:
            json.dump({"step": self.state.global_step}, file)

    kind = type("Saves", (qlorapp.Trainer,), {name: save})
    whole = trained(kind, folder, tmp_path, save_strategy="steps", save_steps=2)
    for step in (2, 4, 6):
        assert json.loads((tmp_path / f"checkpoint-{step}" / "mine.json").read_text()) == {"step": step}
    resumed = trained(kind, folder, tmp_path / "again", resume=str(tmp_path / "checkpoint-4"))
    assert in_cpp(whole) and in_cpp(resumed) and losses(resumed) == losses(whole)


def test_a_checkpoint_in_the_middle_of_a_step_goes_on_with_the_whole_step(folder, tmp_path):
    """enable_jit_checkpoint saves before the optimizer's step, when the process is told to end."""

    class IsTold(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **given):
            if state.global_step == 1:
                (jit,) = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == "JITCheckpointCallback"]
                jit.jit_manager.is_checkpoint_requested = True  # what SIGTERM leads to after three seconds

    whole = trained(qlorapp.Trainer, folder, tmp_path / "whole")
    trainer = made(qlorapp.Trainer, folder, tmp_path, enable_jit_checkpoint=True, more={"callbacks": [IsTold()]})
    trainer.train()
    assert in_cpp(trainer) and trainer.state.global_step == 2 and (tmp_path / "checkpoint-1" / "optimizer.pt").is_file()
    resumed = trained(qlorapp.Trainer, folder, tmp_path / "again", resume=str(tmp_path / "checkpoint-1"))
    assert in_cpp(resumed) and losses(resumed) == losses(whole)
    for name, value in adapters(whole).items():
        assert torch.equal(adapters(resumed)[name], value), name


# --- data sets


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(26))


def test_a_data_set_of_torch_has_as_many_rows_as_it_says(folder, tmp_path):
    plain, wrapped = (
        trained(qlorapp.Trainer, folder, tmp_path, data=data, max_steps=3) for data in (rows(10), Computed(rows(10)))
    )
    assert in_cpp(wrapped) and losses(wrapped) == losses(plain)


def test_a_stream_is_read_as_transformers_reads_it(folder, tmp_path):
    mine, theirs = (trained(kind, folder, tmp_path, data=Stream(), max_steps=2) for kind in KINDS)
    assert in_cpp(mine)
    assert_same_run(mine, theirs)
