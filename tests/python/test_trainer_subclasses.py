# SPDX-License-Identifier: Apache-2.0
"""Trainers of which a part is overridden: steps move to Python, are said to, and give the losses of the C++ loop."""

import logging

import peer
import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import adapters, arguments, losses, rows, trained

EVAL = {"eval_strategy": "epoch"}


@pytest.fixture(scope="module")
def native(folder, tmp_path_factory):
    """Six steps of the C++ loop, the third and the sixth of one short micro-batch."""
    trainer = trained(folder, tmp_path_factory.mktemp("native"), more={"eval_dataset": rows(5)}, **EVAL)
    assert len(losses(trainer)) == 6 and not trainer._autograd_reasons
    return trainer


def assert_same_run(trainer, native, tolerance=1e-5):
    assert losses(trainer) == pytest.approx(losses(native), rel=tolerance)
    ours, theirs = trainer.state.log_history, native.state.log_history
    assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for key in ("learning_rate", "epoch", "step"):
            assert a.get(key) == pytest.approx(b.get(key), rel=1e-12) if key in b else True
        for key in ("grad_norm", "eval_loss", "eval_loss_token_weighted"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-3 if key == "grad_norm" else tolerance)
    for name, value in adapters(native).items():
        difference = torch.linalg.norm(adapters(trainer)[name] - value)
        assert difference <= 1e-3 * torch.linalg.norm(value) + 1e-6, name


class OwnLoss(qlorapp.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class OwnLossOfFourFortySix(qlorapp.Trainer):
    """As people wrote it before num_items_in_batch: the mean of a micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnStep(qlorapp.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class OwnLoader(qlorapp.Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnOptimizer(qlorapp.Trainer):
    def create_optimizer(self):
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(wanted, lr=self.args.learning_rate, eps=1e-8, weight_decay=0.0)
        return self.optimizer


class OwnSchedule(qlorapp.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        share = lambda step: max(0.0, (num_training_steps - step) / num_training_steps)  # noqa: E731
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler


class OwnBoth(qlorapp.Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        super().create_optimizer_and_scheduler(num_training_steps)


@pytest.mark.parametrize("kind", [OwnLoss, OwnStep, OwnLoader, OwnOptimizer, OwnSchedule, OwnBoth])
def test_an_overridden_part_gives_the_losses_of_the_native_loop(folder, tmp_path, native, kind, caplog):
    caplog.set_level(logging.WARNING, logger="qlorapp")
    trainer = trained(folder, tmp_path, kind, more={"eval_dataset": rows(5)}, **EVAL)
    assert_same_run(trainer, native)
    assert caplog.text.count("steps are computed by torch's autograd in Python") == 1


def test_a_loss_function_of_ones_own(folder, tmp_path, native):
    def shifted(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    trainer = trained(folder, tmp_path, more={"compute_loss_func": shifted, "eval_dataset": rows(5)}, **EVAL)
    assert_same_run(trainer, native, 1e-4)


def test_a_mean_loss_is_averaged_over_the_micro_batches_of_a_step_and_this_is_said(folder, tmp_path, caplog):
    trainer = trained(folder, tmp_path, OwnLossOfFourFortySix, per_device_train_batch_size=4)
    assert caplog.text.count("its loss is taken for the mean of a micro-batch") == 1
    means = trained(folder, tmp_path / "b", type("Scaled", (OwnLossOfFourFortySix,), {"loss_is_scaled_for_ga": True}))
    assert losses(means)[0] == pytest.approx(3 * losses(trainer)[0], rel=1e-5)  # what loss_is_scaled_for_ga is for


def test_optimizers_that_are_given(folder, tmp_path, native):
    model = load(folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (6 - step) / 6))
    trainer = qlorapp.Trainer(
        model, arguments(tmp_path, **EVAL), train_dataset=rows(26), eval_dataset=rows(5), optimizers=(optimizer, schedule)
    )
    trainer.train()
    assert_same_run(trainer, native)


def test_an_optimizer_class_that_is_given(folder, tmp_path):
    trainer = trained(
        folder, tmp_path, more={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})}, lr_scheduler_type="constant"
    )
    assert type(trainer.optimizer) is torch.optim.SGD and losses(trainer)[-1] < losses(trainer)[0]
    assert {entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry} == {0.5}


def test_a_plateau_schedule_moves_with_evaluations(folder, tmp_path):
    model = load(folder)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)  # nothing is better
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=4)
    trainer = qlorapp.Trainer(model, args, train_dataset=rows(26), eval_dataset=rows(5), optimizers=(optimizer, schedule))
    trainer.train()
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == [1e-3, 1e-3, 5e-4, 2.5e-4]


@pytest.mark.parametrize("remove", [True, False])
def test_a_collator_of_ones_own_sees_the_columns_of_remove_unused_columns(folder, tmp_path, native, remove):
    seen = set()

    def collate(batch):
        seen.update(*batch)
        return peer.collate(batch)

    data = [{**row, "note": "x"} for row in rows(26)]
    trainer = trained(
        folder,
        tmp_path,
        data=data,
        more={"data_collator": collate, "eval_dataset": rows(5)},
        remove_unused_columns=remove,
        **EVAL,
    )
    assert_same_run(trainer, native)
    assert ("note" in seen) == (not remove)


def test_log_and_evaluate_are_heard_by_the_native_loop(folder, tmp_path, native):
    class Listens(qlorapp.Trainer):
        def log(self, logs, *args, **kwargs):
            logs["doubled"] = 2 * logs.get("loss", 0.0)
            super().log(logs, *args, **kwargs)

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            return {**metrics, "eval_mine": 1.5}

    trainer = trained(folder, tmp_path, Listens, more={"eval_dataset": rows(5)}, metric_for_best_model="mine", **EVAL)
    assert not trainer._autograd_reasons and losses(trainer) == losses(native)
    assert all(entry["doubled"] == 2 * entry.get("loss", 0) for entry in trainer.state.log_history)
    assert trainer.state.best_metric == 1.5


def test_a_method_set_on_the_object_counts_as_overridden(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path, max_steps=1), train_dataset=rows(26))
    calls = []
    plain = trainer.compute_loss

    def counted(model, inputs, return_outputs=False, num_items_in_batch=None):
        calls.append(1)
        return plain(model, inputs, return_outputs, num_items_in_batch)

    trainer.compute_loss = counted
    trainer.train()
    assert len(calls) == 3


def test_a_step_with_an_overflow_is_skipped_and_counted_and_the_schedule_waits(folder, tmp_path):
    class Overflows(qlorapp.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss * (float("inf") if self.state.global_step == 1 else 1.0)

    before = {}

    class Watch(qlorapp.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            before[state.global_step] = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    trainer = trained(folder, tmp_path, Overflows, fp16=True, more={"callbacks": [Watch]}, logging_nan_inf_filter=False)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.output.global_step == 6 and rates[1] == rates[2] == pytest.approx(rates[0] * 5 / 6)
    assert all(torch.equal(a, b) for a, b in zip(before[1], before[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[2], before[3], strict=True))
    assert trainer._scaler.get_scale() == 32768.0


@pytest.mark.parametrize("kind", [OwnLoss, OwnOptimizer])
@pytest.mark.parametrize("at", [2, 3])  # in the middle of an epoch, and at its end, before its evaluation
def test_a_run_of_steps_in_python_resumes_with_the_same_bits(folder, tmp_path, kind, at):
    options = {"lora": {"lora_dropout": 0.2}, "more": {"eval_dataset": rows(5)}, **EVAL}
    torch.manual_seed(1)
    whole = trained(folder, tmp_path, kind, save_strategy="steps", save_steps=1, **options)
    resumed = trained(folder, tmp_path, kind, resume=tmp_path / f"checkpoint-{at}", **options)
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(value, adapters(resumed)[name]) for name, value in adapters(whole).items())


def test_a_native_run_may_go_on_with_steps_in_python(folder, tmp_path, native):
    trained(folder, tmp_path, save_strategy="steps", save_steps=2)
    resumed = trained(folder, tmp_path, OwnLoss, resume=tmp_path / "checkpoint-2")
    assert losses(resumed) == pytest.approx(losses(native), rel=1e-5)
    with pytest.raises(ValueError, match="Resume with the optimizer of that run"):
        trained(folder, tmp_path, OwnOptimizer, resume=tmp_path / "checkpoint-2")


def test_a_loader_without_a_length_needs_max_steps(folder, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows(26))

    class Streams(qlorapp.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=self._collate())

    with pytest.raises(ValueError, match="max_steps must be set"):
        trained(folder, tmp_path, Streams)
    assert len(losses(trained(folder, tmp_path, Streams, max_steps=2))) == 2


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_what_is_frozen_by_hand_stays_as_it_is(folder, tmp_path, caplog, weight_decay):
    """As in transformers: requires_grad=False on a part of the adapter takes it out of the training."""

    class Freezes(qlorapp.Trainer):
        def __init__(self, model, *args, **kwargs):
            for name, parameter in model.named_parameters():
                if ".layers.0." in name:
                    parameter.requires_grad_(False)
            super().__init__(model, *args, **kwargs)

    before = {name: p.detach().clone() for name, p in load(folder).named_parameters() if "lora_" in name}
    trainer = trained(folder, tmp_path, kind=Freezes, weight_decay=weight_decay)
    assert "requires_grad=False: steps are computed by torch's autograd in Python" in caplog.text
    after = {name: p for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert {name for name in after if not torch.equal(before[name], after[name])} == {
        name for name in after if ".layers.0." not in name
    }


def test_an_adapter_that_is_frozen_as_a_whole_is_nothing_to_train(folder, tmp_path):
    model = load(folder)
    model.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"there is nothing to train: every tensor of the adapter 'default' is frozen.*is_trainable=True"
    ):
        qlorapp.Trainer(model, arguments(tmp_path), train_dataset=rows(4))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_a_schedule_is_as_long_as_create_scheduler_is_told(folder, tmp_path, schedule):
    """Warm-up given as a share is a share of that, too: transformers' get_scheduler is the oracle."""

    class Longer(qlorapp.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            return super().create_scheduler(3 * num_training_steps, optimizer)

    trainer = trained(folder, tmp_path, Longer, lr_scheduler_type=schedule, warmup_ratio=0.2)
    reference = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    theirs = transformers.get_scheduler(schedule, reference, num_warmup_steps=4, num_training_steps=18)
    rates = []
    for _ in range(6):
        rates.append(reference.param_groups[0]["lr"])
        reference.step()
        theirs.step()
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(rates, rel=1e-12)


def test_create_scheduler_alone_is_as_long_as_it_is_told_and_refuses_no_length(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(24))
    optimizer = trainer.create_optimizer()
    with pytest.raises(ValueError, match=r"num_training_steps of a schedule must be an integer > 0; got 0"):
        trainer.create_scheduler(0, optimizer)
    trainer.lr_scheduler = None
    trainer.create_scheduler(20, optimizer)
    optimizer.step()
    trainer.lr_scheduler.step()
    assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(1e-2 * 19 / 20)]
    assert trainer.train().global_step == trainer.state.max_steps != 20  # a run has a schedule of its own length
