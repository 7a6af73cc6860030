# SPDX-License-Identifier: Apache-2.0
"""What a script changes of a Trainer after it is made, and a second train(): beside transformers' Trainer, run live."""

import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from test_trainer_semantics import COMMON, setting  # noqa: F401  (setting is a fixture)
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import adapters, arguments, losses, rows, trained

SIDES = {"theirs": transformers, "ours": qlorapp}


def model_of(side, setting):
    root, _, _ = setting
    if side == "theirs":
        base = transformers.LlamaForCausalLM.from_pretrained(root / "float")
        return peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True)
    base = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float", dtype=torch.float32)
    return qlorapp.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True)


def made(side, setting, output, model=None, more=None, mixin=None, **options):
    """A trainer of either side that has not run."""
    _, train, held_out = setting
    library = SIDES[side]
    options = {**COMMON, "warmup_steps": 0, "num_train_epochs": 1, "use_cpu": True, "label_names": ["labels"], **options}
    collator = {"data_collator": peer.collate} if side == "theirs" else {}
    kind = type("Mine", (mixin, library.Trainer), {}) if mixin else library.Trainer
    return kind(
        model if model is not None else model_of(side, setting), library.TrainingArguments(str(output), **options),
        **{"train_dataset": train, "eval_dataset": held_out, **collator, **(more or {})},
    )  # fmt: skip


def both(setting, tmp_path, change, **options):
    """(transformers' trainer, ours), each after `change`, which may return what is to be compared."""
    trainers = [made(side, setting, tmp_path / side, **options) for side in SIDES]
    return [change(trainer) or trainer for trainer in trainers]


# --- objects that are exchanged


def test_another_train_dataset_is_trained_on(setting, tmp_path):
    other = setting[2] * 3

    def change(trainer):
        assert trainer.train_dataset is setting[1]
        trainer.train_dataset = other
        trainer.train()

    reference, mine = both(setting, tmp_path, change)
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    assert mine.state.max_steps == reference.state.max_steps and not mine._autograd_reasons
    assert losses(mine) != pytest.approx(losses(trained_as_made(setting, tmp_path)), rel=1e-3)


def trained_as_made(setting, tmp_path):
    trainer = made("ours", setting, tmp_path / "as made")
    trainer.train()
    return trainer


def test_another_eval_dataset_is_evaluated_before_in_and_after_a_run(setting, tmp_path):
    other = [{**row, "labels": [-100] * (len(row["labels"]) - 3) + row["labels"][-3:]} for row in setting[2][:4]]

    def change(trainer):
        first = trainer.evaluate()["eval_loss"]
        trainer.eval_dataset = other
        found = [first, trainer.evaluate()["eval_loss"]]
        trainer.train()
        found += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.eval_dataset = setting[2]
        return [*found, trainer.evaluate()["eval_loss"]]

    reference, mine = both(setting, tmp_path, change, eval_strategy="epoch")
    assert mine == pytest.approx(reference, rel=1e-5) and len(mine) == 4
    assert mine[0] != pytest.approx(mine[1], rel=1e-3)


def test_a_collator_that_is_set_later_is_called(setting, tmp_path):
    calls = []

    def collate(batch):
        calls.append(len(batch))
        batch = peer.collate(batch)
        batch["labels"][:, ::2] = -100
        return batch

    def change(trainer):
        trainer.data_collator = collate
        trainer.train()
        trainer.evaluate()

    reference, mine = both(setting, tmp_path, change)
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5) and len(calls) % 2 == 0
    evals = [one.state.log_history[-1]["eval_loss"] for one in (mine, reference)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)


def test_another_model_is_evaluated_and_trained(setting, tmp_path):
    trainer = made("ours", setting, tmp_path)
    first, second = trainer.model, model_of("ours", setting)
    with torch.no_grad():
        for parameter in second.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    plain = made("ours", setting, tmp_path / "plain", model=second).evaluate()["eval_loss"]
    before = [p.detach().clone() for p in first.parameters() if p.requires_grad]
    assert trainer.evaluate()["eval_loss"] != pytest.approx(plain, rel=1e-4)
    trainer.model = second
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-5)
    moved = {name: value.clone() for name, value in adapters(trainer).items()}
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, [p for p in first.parameters() if p.requires_grad], strict=True))
    assert any(not torch.equal(value, adapters(trainer)[name]) for name, value in moved.items())
    assert not trainer._autograd_reasons


def test_a_base_is_evaluated_and_what_is_saved_is_the_model_that_is_there(setting, tmp_path):
    trainer = made("ours", setting, tmp_path)
    trainer.train()
    other = model_of("ours", setting)
    trainer.model = other
    trainer.save_model(tmp_path / "saved")
    base = qlorapp.AutoModelForCausalLM.from_pretrained(setting[0] / "float", dtype=torch.float32)
    saved = qlorapp.get_peft_model_state_dict(qlorapp.PeftModel.from_pretrained(base, tmp_path / "saved"))
    assert trainer.model is other and all(
        torch.equal(saved[name], value) for name, value in qlorapp.get_peft_model_state_dict(other).items()
    )
    trainer.model = qlorapp.AutoModelForCausalLM.from_pretrained(setting[0] / "float", dtype=torch.float32)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="there is nothing to train"):
        trainer.train()


def test_rows_that_are_refused_are_refused_again(setting, tmp_path):
    trainer = made("ours", setting, tmp_path)
    trainer.train_dataset = [{"input_ids": [1, 10**6]}]
    for _ in range(2):
        with pytest.raises(ValueError, match="token ids must be from 0 to 127"):
            trainer.train()


def test_an_eos_that_was_masked_is_learnt_from_rows_and_from_batches(setting, tmp_path):
    """Rows that are padded by EOS, with input_ids.ne(pad_token_id) as their mask: beside transformers."""
    ids = [[5, 6, 7, 2, 2, 2], [5, 9, 2, 2, 2, 2], [8, 6, 7, 5, 9, 2], [5, 6, 7, 8, 4, 4]]
    labels = [[-100, 6, 7, 2, -100, -100], [5, 9, 2, -100, -100, -100], [8, 6, 7, 5, 9, 2], [5, 6, 7, 8, 4, 4]]
    padded = [
        {"input_ids": i, "labels": t, "attention_mask": [int(x != 2) for x in i]} for i, t in zip(ids, labels, strict=True)
    ]

    def change(trainer):
        trainer.train_dataset = padded
        trainer.train()

    reference, mine = both(setting, tmp_path, change, per_device_train_batch_size=2)
    batches = made(
        "ours",
        setting,
        tmp_path / "batches",
        more={"train_dataset": padded, "data_collator": own_collator},
        per_device_train_batch_size=2,
    )
    batches.train()
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    assert losses(batches) == pytest.approx(losses(reference), rel=1e-5)


def own_collator(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels", "attention_mask")}


def test_what_torch_compile_has_wrapped_is_trained(folder, tmp_path):
    plain = trained(folder, tmp_path / "plain", max_steps=2)
    model = load(folder)
    trainer = qlorapp.Trainer(torch.compile(model), arguments(tmp_path, max_steps=2), train_dataset=rows(26))
    trainer.train()
    assert losses(trainer) == losses(plain) and trainer.model is model
    assert all(torch.equal(value, adapters(trainer)[name]) for name, value in adapters(plain).items())


# --- a second train()


def test_a_second_run_begins_anew_with_the_adapters_as_they_are(setting, tmp_path):
    def change(trainer):
        first = trainer.train()
        second = trainer.train()
        assert second.global_step == first.global_step == trainer.state.global_step == len(losses(trainer))
        return trainer, second

    (reference, their_output), (mine, output) = both(
        setting, tmp_path, change, more={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.2})}
    )
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    assert output.training_loss == pytest.approx(their_output.training_loss, rel=1e-5)
    rates = [[entry["learning_rate"] for entry in one.state.log_history if "loss" in entry] for one in (mine, reference)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)


@pytest.mark.parametrize("steps", ["native", "in Python", "of a model of transformers"])
def test_a_second_run_is_that_of_a_new_trainer(setting, tmp_path, steps):
    """transformers' own second run keeps the moments of AdamW, its new trainer does not: neither does this one."""

    class InPython:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    found = {}
    for side in SIDES:
        model = model_of("theirs" if steps == "of a model of transformers" else side, setting)
        trainer = made(side, setting, tmp_path / side, model, mixin=InPython if steps == "in Python" else None)
        trainer.train()
        again = trainer if side == "ours" else made(side, setting, tmp_path / side, trainer.model)
        again.train()
        found[side] = again
    assert losses(found["ours"]) == pytest.approx(losses(found["theirs"]), rel=1e-5)
    assert bool(found["ours"]._autograd_reasons) == (steps != "native")


@pytest.mark.parametrize("kind", [qlorapp.Trainer, type("InPython", (qlorapp.Trainer,), {"get_train_dataloader": lambda self: super(type(self), self).get_train_dataloader()})])  # fmt: skip
def test_a_run_after_an_exception_begins_anew(folder, tmp_path, kind):
    class Fails(qlorapp.TrainerCallback):
        on = True

        def on_substep_end(self, args, state, control, **kwargs):
            if self.on:
                raise KeyError("mine")

    callback = Fails()
    trainer = kind(load(folder), arguments(tmp_path), train_dataset=rows(26), callbacks=[callback])
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    callback.on = False
    trainer.train()
    assert losses(trainer) == losses(trained(folder, tmp_path / "whole", kind))


def test_each_run_of_a_model_init_has_a_model_of_its_own(folder, tmp_path):
    trainer = qlorapp.Trainer(args=arguments(tmp_path), train_dataset=rows(26), model_init=lambda: load(folder))
    trainer.train()
    first, before = trainer.model, losses(trainer)
    trainer.train()
    assert trainer.model is not first and losses(trainer) == before


# --- optimizers that are given later


def test_an_optimizer_that_is_set_later_is_used(setting, tmp_path):
    def change(trainer):
        wanted = [p for p in trainer.model.parameters() if p.requires_grad]
        trainer.optimizer = torch.optim.SGD(wanted, lr=0.2)
        trainer.train()

    reference, mine = both(setting, tmp_path, change)
    assert type(mine.optimizer) is torch.optim.SGD
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    mine.train()
    assert type(mine.optimizer) is torch.optim.SGD


def test_a_schedule_that_is_set_later_is_used(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(26))
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5**step)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01 * 0.5**step for step in range(6)], rel=1e-12)


@pytest.mark.parametrize("rate", [0.0, 2e-3])
def test_the_rate_of_an_optimizer_that_was_made_before_train_may_be_edited(setting, tmp_path, rate):
    def change(trainer):
        trainer.create_optimizer_and_scheduler(3)
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate
        trainer.train()

    reference, mine = both(setting, tmp_path, change)
    rates = [[entry["learning_rate"] for entry in one.state.log_history if "loss" in entry] for one in (mine, reference)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12) and rates[0][0] == rate
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)


def test_an_optimizer_that_was_made_before_train_and_left_alone_is_no_reason_to_leave_the_native_loop(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(26))
    trainer.create_optimizer_and_scheduler(6)
    trainer.train()
    assert not trainer._autograd_reasons and losses(trainer) == losses(trained(folder, tmp_path / "plain"))


@pytest.mark.parametrize("edit", ["eps", "a group"])
def test_edits_that_the_native_optimizer_would_not_read_are_refused(folder, tmp_path, edit):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(26))
    optimizer = trainer.create_optimizer()
    if edit == "eps":
        optimizer.param_groups[0]["eps"] = 1e-3
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=rf"optimizer.param_groups were changed \({edit}.*reads the rate alone"):
        trainer.train()


# --- hooks, and a forward of one's own


HOOKS = {
    "parameter": lambda model: [
        p.register_hook(lambda gradient: gradient * 0.5) for name, p in model.named_parameters() if "lora_B" in name
    ],
    "accumulated": lambda model: [
        p.register_post_accumulate_grad_hook(halve_gradient) for name, p in model.named_parameters() if "lora_B" in name
    ],
    "forward": lambda model: model.register_forward_hook(halved),
    "base_model": lambda model: model.base_model.register_forward_hook(halved),
    "before": lambda model: model.register_forward_pre_hook(every_second_label, with_kwargs=True),
    "patched": lambda model: setattr(model, "forward", PatchedForward(model.forward)),
}  # fmt: skip


def halve_gradient(parameter):
    parameter.grad.mul_(0.5)


def halved(module, args, output):
    output.loss = output.loss * 0.5
    return output


def every_second_label(module, args, kwargs):
    labels = kwargs["labels"].clone()
    labels[:, ::2] = -100
    return args, {**kwargs, "labels": labels}


class PatchedForward:
    def __init__(self, plain):
        self.plain = plain

    def __call__(self, *args, **kwargs):
        return halved(None, args, self.plain(*args, **kwargs))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_and_a_patched_forward_run_in_steps_and_evaluations(setting, tmp_path, name, when, caplog):
    found = {}
    for side in SIDES:
        model = model_of(side, setting)
        if when == "before":
            HOOKS[name](model)
        trainer = found[side] = made(side, setting, tmp_path / side, model, max_grad_norm=0.0, eval_strategy="epoch")
        if when == "after":
            HOOKS[name](model)
        trainer.train()
    mine, reference = found["ours"], found["theirs"]
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    norms = [[entry["grad_norm"] for entry in one.state.log_history if "loss" in entry] for one in (mine, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    evals = [[entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry] for one in (mine, reference)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    assert caplog.text.count("steps are computed by torch's autograd in Python") == 1


def test_a_hook_that_was_removed_is_no_reason_to_leave_the_native_loop(folder, tmp_path):
    model = load(folder)
    model.register_forward_hook(halved).remove()
    next(p for p in model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient).remove()
    model.forward = model.forward  # what was there, put back
    trainer = qlorapp.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows(26))
    trainer.train()
    assert not trainer._autograd_reasons


# --- what a subclass needs


def test_what_a_subclass_sets_after_its_base_is_made_is_there_when_its_loader_is_asked_for(setting, tmp_path):
    class Late:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.order = list(range(12))

        def _get_train_sampler(self, train_dataset=None):
            return self.order

    reference, mine = both(setting, tmp_path, lambda trainer: trainer.train() and None, mixin=Late)
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)


def test_there_is_a_collator_for_a_loader_of_ones_own(folder, tmp_path):
    class Tokenizer:
        pad_token_id = 3

    class Loads(qlorapp.Trainer):
        def get_train_dataloader(self):
            sampler = self._get_train_sampler(self.train_dataset)
            size = self.args.per_device_train_batch_size
            return torch.utils.data.DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)

    mine = trained(folder, tmp_path, Loads, more={"processing_class": Tokenizer()})
    plain = trained(folder, tmp_path / "plain")
    assert losses(mine) == pytest.approx(losses(plain), rel=1e-5) and not plain._autograd_reasons
    assert mine.data_collator([{"input_ids": [5]}, {"input_ids": [6, 7]}])["input_ids"].tolist() == [[5, 3], [6, 7]]


def test_group_by_length_reads_the_column_of_lengths_where_rows_are_raw(folder, tmp_path):
    import datasets

    def tokens(row):
        return {"input_ids": [3 + int(word) for word in row["text"].split()]}

    def collate(batch):
        return peer.collate([{**tokens(row), "labels": tokens(row)["input_ids"]} for row in batch])

    texts = [" ".join(str(j) for j in range(i % 7 + 2)) for i in range(20)]
    raw = datasets.Dataset.from_dict({"text": texts, "words": [len(text.split()) for text in texts]})
    plain = {"remove_unused_columns": False, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    options = {**plain, "length_column_name": "words", "group_by_length": True}
    more = {"data_collator": collate}
    found = trained(folder, tmp_path, data=raw, more=more, **options)
    assert losses(found) == pytest.approx(losses(trained(folder, tmp_path, data=raw.map(tokens), **options)), rel=1e-5)
    assert losses(found) != pytest.approx(losses(trained(folder, tmp_path, data=raw, more=more, **plain)), rel=1e-3)
    with pytest.raises(ValueError, match=r"row 0 of train_dataset has \['text'\]. Add a column 'words' .* or tokenize"):
        trained(folder, tmp_path, data=raw.remove_columns("words"), more=more, **options)
