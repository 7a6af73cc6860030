# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers' loop whose steps C++ computes a window at a time, beside transformers' own steps."""

import copy
import os
import pickle

import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import ByAutograd, ByRows, adapters, assert_same_run, in_cpp, losses, made, rows, trained

KINDS = (qlorapp.Trainer, transformers.Trainer)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count=26):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


OPTIONS = {
    "plain": {},
    "one batch a step": {"gradient_accumulation_steps": 1, "max_steps": 6, "learning_rate": 3e-3},
    "of AdamW": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.3},
    "a schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "warmup_steps": 0.3},
    "no clipping": {"max_grad_norm": 0.0},
    "much clipping": {"max_grad_norm": 0.01},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "more": {"eval_dataset": rows(9, seed=3)}},
    "counts": {"include_num_input_tokens_seen": "all", "logging_steps": 2},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_steps_are_those_of_transformers(folder, tmp_path, case):
    options = OPTIONS[case]
    mine = trained(qlorapp.Trainer, folder, tmp_path / "mine", **options)
    assert_same_run(mine, trained(transformers.Trainer, folder, tmp_path / "theirs", **options))


def test_a_stream_is_trained(folder, tmp_path):
    mine, theirs = (trained(kind, folder, tmp_path, data=Stream(), max_steps=5) for kind in KINDS)
    assert_same_run(mine, theirs)


# --- what C++ does not compute


class Odd(ByRows):
    """Some batches have labels on padding, which transformers counts."""

    calls = 0

    def __call__(self, given):
        batch = super().__call__(given)
        Odd.calls += 1
        if Odd.calls % 3 == 0 and bool((batch["attention_mask"] == 0).any()):
            batch["labels"][batch["attention_mask"] == 0] = 7
        return batch


def test_windows_that_cpp_does_not_compute_are_transformers_in_the_same_run(folder, tmp_path, caplog):
    found = []
    for kind in KINDS:
        Odd.calls = 0
        with caplog.at_level("INFO"):
            found.append(trained(kind, folder, tmp_path, more={"data_collator": Odd()}))
    assert "labels are predicted from padding" in caplog.text
    assert_same_run(*found)


def test_the_log_says_once_who_computes(folder, tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer = made(qlorapp.Trainer, folder, tmp_path)
        trainer.train()
        trainer.train()
    (line,) = [r for r in caplog.records if "computes the steps" in r.message]
    assert line.levelname == "INFO" and line.message == "[Trainer] C++ computes the steps of this training."


WITHOUT = {
    "an optimizer of the user's": lambda model: {
        "optimizers": (torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), None)
    },
    "another loss": lambda model: {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.float().square().mean()},
}


@pytest.mark.parametrize("case", WITHOUT)
def test_a_run_that_needs_more_than_windows_has_none(folder, tmp_path, case):
    trainer = made(qlorapp.Trainer, folder, tmp_path, more={"data_collator": ByRows()})
    for name, value in WITHOUT[case](trainer.model).items():
        if name == "optimizers":
            trainer.optimizer, trainer.lr_scheduler = value
        else:
            setattr(trainer, name, value)
    called = []
    trainer.windows_of_run = lambda: called.append(1)
    trainer.train()
    assert not called


def test_gradients_that_are_not_finite_end_the_run(folder, tmp_path):
    class Breaks(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **others):
            if state.global_step == 2:
                next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))

    with pytest.raises(RuntimeError, match="the norm of the gradients must be finite"):
        trained(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Breaks()]})


def test_a_callback_may_set_the_learning_rate(folder, tmp_path):
    class Slower(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **others):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3

    options = {"more": {"callbacks": [Slower()]}}
    assert_same_run(
        trained(qlorapp.Trainer, folder, tmp_path / "mine", **options),
        trained(transformers.Trainer, folder, tmp_path / "theirs", **options),
    )


class AtSteps(transformers.TrainerCallback):
    """Does something with the model behind each step."""

    def __init__(self, work):
        self.work = work

    def on_step_end(self, args, state, control, model=None, **others):
        self.work(model)


def without_adapter(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), model.disable_adapter():
        model(input_ids=ids)


def with_a_copy(model):
    copied = copy.deepcopy(model)
    parameter = next(p for p in copied.parameters() if p.requires_grad)
    parameter.grad = torch.ones_like(parameter)
    copied.zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize("work", [without_adapter, with_a_copy])
def test_a_callback_may_use_the_model(folder, tmp_path, work):
    options = {"more": {"callbacks": [AtSteps(work)]}, "max_steps": 3}
    mine = trained(qlorapp.Trainer, folder, tmp_path / "mine", **options)
    assert "zero_grad" not in vars(mine.model)
    assert_same_run(mine, trained(transformers.Trainer, folder, tmp_path / "theirs", **options))


def test_a_callback_that_changes_the_adapter_ends_the_run(folder, tmp_path):
    def change(model):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] *= 2

    with pytest.raises(ValueError, match="a run trains one adapter"):
        trained(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [AtSteps(change)]})


def test_the_arguments_are_the_users_and_as_given_in_checkpoints(folder, tmp_path):
    trainer = made(
        qlorapp.Trainer, folder, tmp_path, more={"data_collator": ByRows()}, save_strategy="steps", save_steps=2, max_steps=2
    )
    given = trainer.args
    trainer.train()
    assert trainer.args is given and given.logging_nan_inf_filter
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter


def test_a_loss_that_is_not_of_a_windows_targets_is_transformers(folder, tmp_path, caplog):
    trainer = made(qlorapp.Trainer, folder, tmp_path, more={"data_collator": ByRows()}, max_steps=2)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert "steps are slower" in caplog.text


def test_the_optimizer_is_neither_copied_nor_stepped_without_gradients(folder, tmp_path):
    optimizer = trained(qlorapp.Trainer, folder, tmp_path, max_steps=1).optimizer
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Use its state_dict"):
            copied(optimizer)
    with pytest.raises(ValueError, match="must follow the gradients of a window"):
        optimizer.step()


# --- checkpoints


def resumed(kind, folder, output, checkpoint, **options):
    return trained(kind, folder, output, resume=str(checkpoint), **options)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_resumed_run_ends_in_the_same_bits(folder, tmp_path, optim, step):
    options = {"optim": optim, "save_strategy": "steps", "save_steps": 1, "lora": {"lora_dropout": 0.1}}
    whole = trained(qlorapp.Trainer, folder, tmp_path / "a", **options)
    again = trained(qlorapp.Trainer, folder, tmp_path / "a", resume=str(tmp_path / "a" / f"checkpoint-{step}"), **options)
    assert losses(again) == losses(whole)
    for name, value in adapters(whole).items():
        assert torch.equal(adapters(again)[name], value), name


def test_transformers_resumes_a_run_with_its_optimizer_and_the_other_way_round(folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    theirs = trained(transformers.Trainer, folder, tmp_path / "theirs", **options)
    mine = trained(qlorapp.Trainer, folder, tmp_path / "mine", **options)
    over = trained(qlorapp.Trainer, folder, tmp_path / "over", resume=str(tmp_path / "theirs" / "checkpoint-3"), **options)
    back = resumed(transformers.Trainer, folder, tmp_path / "back", tmp_path / "mine" / "checkpoint-3", **options)
    for one in (over, back, mine):
        assert losses(one) == pytest.approx(losses(theirs), rel=1e-5)
        for name, value in adapters(theirs).items():
            torch.testing.assert_close(adapters(one)[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit"])
def test_moments_in_bitsandbytes_layout_are_resumed_both_ways(folder, tmp_path, optim):
    """In eight bits, torch's passes keep moments of parameters below 4,096 elements in float32."""

    options = {"save_strategy": "steps", "save_steps": 1, "optim": optim, "more": {"data_collator": ByRows()}}
    theirs = trained(ByAutograd, folder, tmp_path / "theirs", **options)
    mine = trained(qlorapp.Trainer, folder, tmp_path / "mine", **options)
    over = trained(qlorapp.Trainer, folder, tmp_path / "over", resume=str(tmp_path / "theirs" / "checkpoint-3"), **options)
    back = trained(ByAutograd, folder, tmp_path / "back", resume=str(tmp_path / "mine" / "checkpoint-3"), **options)
    for one in (over, back):
        near = 5e-3 if optim == "adamw_8bit" else 1e-5
        assert losses(one) == pytest.approx(losses(theirs), rel=near) and losses(one) == pytest.approx(losses(mine), rel=near)


def test_a_second_run_begins_with_moments_of_its_own_and_transformers_steps_come_after_windows(folder, tmp_path):
    trainer = made(qlorapp.Trainer, folder, tmp_path, more={"data_collator": ByRows()})
    trainer.train()
    first = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is not first and trainer.optimizer.runner.steps == 6
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.float().square().mean()
    before = adapters(trainer)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    assert any(not torch.equal(before[name], value) for name, value in adapters(trainer).items())
    trainer.compute_loss_func = None
    trainer.train()
    assert trainer.optimizer.runner.steps == 6 and in_cpp(trainer)


def test_a_callback_may_save_before_the_first_step(folder, tmp_path):
    class Saves(transformers.TrainerCallback):
        def on_train_begin(self, *given, **more):
            trainer._save_checkpoint(trainer.model, None)

    trainer = made(qlorapp.Trainer, folder, tmp_path, more={"callbacks": [Saves()]}, save_strategy="steps", max_steps=1)
    trainer.train()
    assert (tmp_path / "checkpoint-0" / "loop_state.pth").is_file()


@pytest.mark.parametrize(
    ("optim", "other", "error"),
    [
        ("adamw_8bit", "adamw_torch", r"exp_avg of parameter 0 must be .* torch.float32; got .* torch.uint8. Resume with"),
        ("adamw_torch", "adamw_8bit", "must have state1, state2, absmax1, absmax2; .* is missing.*resume with the optim"),
    ],
)
def test_moments_of_another_optimizer_are_refused(folder, tmp_path, optim, other, error):
    trained(qlorapp.Trainer, folder, tmp_path, optim=optim, max_steps=2, save_strategy="steps", save_steps=1)
    for name in ("run_inputs.json", "MANIFEST.json"):  # which would tell
        os.remove(tmp_path / "checkpoint-2" / name)
    with pytest.raises(ValueError, match=error):
        trained(qlorapp.Trainer, folder, tmp_path / "b", resume=str(tmp_path / "checkpoint-2"), optim=other, max_steps=4)
