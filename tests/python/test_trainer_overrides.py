# SPDX-License-Identifier: Apache-2.0
"""What people override of transformers' Trainer: it is called as there, or refused by name with what to do instead."""

import inspect
import json

import peer
import pytest
import qlorapp
import torch
import transformers
from qlorapp.trainer_overrides import NEVER_CALLED, NEVER_CALLED_BY_SFT, WITHOUT_EFFECT, check_overrides
from test_trainer_semantics import ours, setting, theirs  # noqa: F401  (setting is a fixture)
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import adapters, arguments, losses, rows, trained

#: The loop, an evaluation or predict() calls these.
CALLED = {
    "compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs", "_prepare_inputs", "_prepare_input", "_get_train_sampler", "get_batch_samples",
    "_get_num_items_in_batch", "compute_loss_context_manager", "autocast_smart_context_manager", "prediction_step", "evaluation_loop",
    "get_eval_dataloader", "_get_eval_sampler", "get_test_dataloader", "evaluate", "log", "save_model", "_save",
}  # fmt: skip
#: And these, where there is a collator or a loader of one's own.
COLUMNS = {"_set_signature_columns_if_needed", "_get_collator_with_removed_columns", "_remove_unused_columns"}
#: People call these, or they are asked for where something else is given (a model_init, an optimizer's class).
BY_PEOPLE = {
    "__init__", "train", "predict", "log_metrics", "metrics_format", "save_metrics", "save_state", "push_to_hub", "hyperparameter_search",
    "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "get_decay_parameter_names", "num_examples",
    "add_callback", "pop_callback", "remove_callback", "is_local_process_zero", "is_world_process_zero", "call_model_init", "end",
}  # fmt: skip


def test_every_method_of_transformers_trainer_is_called_or_named():
    methods = {
        name
        for name, value in vars(transformers.Trainer).items()
        if inspect.isfunction(value) or isinstance(value, staticmethod)
    }
    known = [CALLED, COLUMNS, BY_PEOPLE, set(NEVER_CALLED), set(WITHOUT_EFFECT)]
    assert methods - set().union(*known) == set()
    assert sum(map(len, known)) == len(set().union(*known)), "in two tables"
    for name in CALLED | COLUMNS | BY_PEOPLE:
        assert hasattr(qlorapp.Trainer, name), name
    for name in {*NEVER_CALLED_BY_SFT, *WITHOUT_EFFECT}:
        assert not hasattr(qlorapp.SFTTrainer, name), name


@pytest.fixture(scope="module")
def native(folder, tmp_path_factory):
    return trained(
        folder, tmp_path_factory.mktemp("native"), more={"eval_dataset": rows(5)}, eval_strategy="epoch", save_strategy="epoch"
    )


@pytest.mark.parametrize("name", sorted(CALLED))
def test_an_override_is_called_and_changes_no_loss(folder, tmp_path, native, name):
    calls = []

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Mine", (qlorapp.Trainer,), {name: method})
    trainer = trained(folder, tmp_path, kind, more={"eval_dataset": rows(5)}, eval_strategy="epoch", save_strategy="epoch")
    trainer.predict(rows(3))
    assert calls
    assert losses(trainer) == pytest.approx(losses(native), rel=1e-5)
    evals = [[entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry] for one in (trainer, native)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5) and len(evals[0]) == 2


@pytest.mark.parametrize("name", sorted(NEVER_CALLED))
def test_what_would_never_be_called_is_refused_before_anything_is_made(tmp_path, name):
    kind = type("Mine", (qlorapp.Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=rf"\[Trainer\] Mine.{name} would never be called: .{{20,}}\.$") as told:
        check_overrides(kind.__new__(kind), kind._never_called)
    assert "\n" not in str(told.value)


def test_the_refusal_comes_at_construction_or_where_a_method_is_set_later(folder, tmp_path):
    class Saves(qlorapp.Trainer):
        def _save_checkpoint(self, model, trial):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Saves._save_checkpoint would never be called: .*Override save_model"):
        Saves(load(folder), arguments(tmp_path), train_dataset=rows(4))
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(4))
    trainer._clip_grad_norm = lambda model: None
    with pytest.raises(TypeError, match="_clip_grad_norm would never be called: gradients are clipped at max_grad_norm"):
        trainer.train()


def test_trls_preparation_of_rows_is_refused_and_the_card_of_a_model_is_said(folder, tmp_path, caplog):
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "disable_tqdm": True}

    class Prepares(qlorapp.SFTTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            raise AssertionError

    class Cards(qlorapp.SFTTrainer):
        def create_model_card(self, *args, **kwargs):
            raise AssertionError

    with pytest.raises(TypeError, match=r"_prepare_dataset would never be called: .*skip_prepare_dataset"):
        Prepares(load(folder), qlorapp.SFTConfig(str(tmp_path), **options), train_dataset=rows(4))
    Cards(load(folder), qlorapp.SFTConfig(str(tmp_path), **options), train_dataset=rows(4))
    assert caplog.text.count("create_model_card is never called: nothing here uploads") == 1


# --- what overrides see is what they see there


def test_a_sampler_of_ones_own_orders_rows_as_in_transformers(setting, tmp_path):
    class Order:
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _get_eval_sampler(self, eval_dataset):
            return torch.utils.data.SubsetRandomSampler([3, 1], generator=torch.Generator().manual_seed(1))

    found = {}
    for side, run, base in (("theirs", theirs, transformers.Trainer), ("ours", ours, qlorapp.Trainer)):
        found[side], _, _ = run(setting, tmp_path / side, kind=type("Mine", (Order, base), {}), eval_strategy="epoch")
    assert losses(found["ours"]) == pytest.approx(losses(found["theirs"]), rel=1e-5)
    evals = [[entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry] for one in found.values()]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    assert losses(found["ours"]) != pytest.approx(losses(ours(setting, tmp_path / "plain")[0]), rel=1e-5)


def test_a_sampler_for_older_releases_takes_no_data_set_and_packs_have_no_place_for_it(folder, tmp_path):
    class Old(qlorapp.Trainer):
        def _get_train_sampler(self):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    assert len(losses(trained(folder, tmp_path, Old))) == 6
    with pytest.raises(ValueError, match="packing=True packs the rows that _get_train_sampler gives out"):
        trained(folder, tmp_path, Old, packing=True, max_length=32)


def test_inputs_that_are_changed_change_steps_and_evaluations_as_in_transformers(setting, tmp_path):
    class Hides:
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            labels = inputs["labels"].clone()
            labels[:, ::2] = -100
            return {**inputs, "labels": labels}

    found = {}
    for side, run, base in (("theirs", theirs, transformers.Trainer), ("ours", ours, qlorapp.Trainer)):
        found[side], _, _ = run(setting, tmp_path / side, kind=type("Mine", (Hides, base), {}), eval_strategy="epoch")
    assert losses(found["ours"]) == pytest.approx(losses(found["theirs"]), rel=1e-5)
    evals = [[entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry] for one in found.values()]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    assert losses(found["ours"]) != pytest.approx(losses(ours(setting, tmp_path / "plain")[0]), rel=1e-2)


def test_the_count_of_a_window_may_be_ones_own(setting, tmp_path):
    class Twice:
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches, count * 2

    mine, _, _ = ours(setting, tmp_path / "mine", kind=type("Mine", (Twice, qlorapp.Trainer), {}))
    reference, _, _ = theirs(setting, tmp_path / "theirs", kind=type("Mine", (Twice, transformers.Trainer), {}))
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)
    assert losses(mine)[0] == pytest.approx(losses(ours(setting, tmp_path / "plain")[0])[0] / 2, rel=1e-5)


def test_a_loss_function_that_takes_anything_gets_the_count(folder, tmp_path):
    seen = []

    def loss_of(outputs, labels, **kwargs):
        seen.append(kwargs["num_items_in_batch"])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / seen[-1]

    trainer = trained(folder, tmp_path, more={"compute_loss_func": loss_of}, max_steps=1)
    assert losses(trainer) == pytest.approx(losses(trained(folder, tmp_path, max_steps=1)), rel=1e-5) and set(seen) != {None}


@pytest.mark.parametrize("how", ["given", "overridden"])
def test_an_optimizer_class_gets_the_weight_decay_of_the_arguments(setting, tmp_path, how):
    """In transformers' two groups, over an override of what decays."""

    class OnlyB:
        def get_decay_parameter_names(self, model):
            return [name for name, p in model.named_parameters() if "lora_B" in name]

    class Chooses(OnlyB):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            return torch.optim.AdamW, {"lr": args.learning_rate, "eps": 1e-6}

    more = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 5e-3, "eps": 1e-6})} if how == "given" else {}
    part = OnlyB if how == "given" else Chooses
    options = {"weight_decay": 10.0, "max_steps": 3, "more": more}
    mine, _, _ = ours(setting, tmp_path / "mine", kind=type("Mine", (part, qlorapp.Trainer), {}), **options)
    reference, _, _ = theirs(setting, tmp_path / "theirs", kind=type("Mine", (part, transformers.Trainer), {}), **options)
    assert [len(group["params"]) for group in mine.optimizer.param_groups] == [
        len(group["params"]) for group in reference.optimizer.param_groups
    ]
    expected = {name: p for name, p in reference.model.named_parameters() if p.requires_grad}
    for name, value in adapters(mine).items():
        difference = torch.linalg.norm(expected[name] - value)
        assert difference <= 1e-3 * torch.linalg.norm(expected[name]) + 1e-6, name
    a = next(name for name in expected if "lora_B" in name)
    assert mine.get_optimizer_group(dict(mine.model.named_parameters())[a])["weight_decay"] == 10.0


def test_what_decays_can_be_chosen_for_the_optimizer_that_optim_names(setting, tmp_path, caplog):
    class OnlyB:
        def get_decay_parameter_names(self, model):
            return [name for name, p in model.named_parameters() if "lora_B" in name]

    options = {"weight_decay": 10.0, "max_steps": 3}
    mine, _, _ = ours(setting, tmp_path / "mine", kind=type("Mine", (OnlyB, qlorapp.Trainer), {}), **options)
    reference, _, _ = theirs(setting, tmp_path / "theirs", kind=type("Mine", (OnlyB, transformers.Trainer), {}), **options)
    assert "torch.optim.AdamW takes the place of optim=" in caplog.text
    expected = {name: p for name, p in reference.model.named_parameters() if p.requires_grad}
    for name, value in adapters(mine).items():
        difference = torch.linalg.norm(expected[name] - value)
        assert difference <= 1e-3 * torch.linalg.norm(expected[name]) + 1e-6, name


# --- columns, and loaders as they are copied from transformers


@pytest.mark.parametrize("as_dataset", [True, False])
@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_an_override_says_which_columns_a_collator_sees(folder, tmp_path, name, as_dataset):
    import datasets

    seen = set()

    def set_columns(self):
        self._signature_columns = ["input_ids", "labels", "attention_mask", "note"]

    def wrap(self, data_collator, description=None):
        return lambda batch: data_collator([{key: row[key] for key in row if key != "other"} for row in batch])

    def remove(self, dataset, description=None):
        return dataset.remove_columns(["other"]) if hasattr(dataset, "remove_columns") else dataset

    methods = {
        "_set_signature_columns_if_needed": set_columns,
        "_get_collator_with_removed_columns": wrap,
        "_remove_unused_columns": remove,
    }
    kind = type("Mine", (qlorapp.Trainer,), {name: methods[name]})

    def collate(batch):
        seen.update(*batch)
        return peer.collate(batch)

    data = [{**row, "note": "x", "other": "y"} for row in rows(26)]
    data = datasets.Dataset.from_list(data) if as_dataset else data
    assert len(losses(trained(folder, tmp_path, kind, data=data, more={"data_collator": collate}, max_steps=1))) == 1
    expected = {
        "_set_signature_columns_if_needed": {"note"},
        # transformers shows a data set's rows through one of the two, and here both are asked
        "_get_collator_with_removed_columns": set() if as_dataset else {"note"},
        "_remove_unused_columns": set(),
    }
    assert seen - {"input_ids", "labels", "attention_mask"} == expected[name]
    with pytest.raises(TypeError, match=rf"Mine.{name} would never be called: without a data_collator .*Pass one"):
        kind(load(folder), arguments(tmp_path), train_dataset=rows(4))


def test_a_loader_written_for_transformers_works_unchanged(setting, tmp_path):
    class Loads:
        def get_train_dataloader(self):
            dataset = self.train_dataset
            parameters = {
                "batch_size": self._train_batch_size,
                "collate_fn": self._get_collator_with_removed_columns(peer.collate, description="training"),
                "num_workers": self.args.dataloader_num_workers,
                "drop_last": self.args.dataloader_drop_last,
                "sampler": self._get_train_sampler(dataset),
            }
            return self.accelerator.prepare(torch.utils.data.DataLoader(dataset, **parameters))

        def training_step(self, model, inputs, num_items_in_batch=None):
            assert not self.is_deepspeed_enabled and not self.is_fsdp_enabled and self.model_accepts_loss_kwargs
            with self.accelerator.accumulate(model), self.accelerator.autocast():
                return super().training_step(model, inputs, num_items_in_batch)

    mine, _, _ = ours(setting, tmp_path / "mine", kind=type("Mine", (Loads, qlorapp.Trainer), {}))
    reference, _, _ = theirs(setting, tmp_path / "theirs", kind=type("Mine", (Loads, transformers.Trainer), {}))
    assert losses(mine) == pytest.approx(losses(reference), rel=1e-5)


def test_a_model_of_transformers_says_itself_which_columns_it_takes(folder, tmp_path):
    seen = set()

    def collate(batch):
        seen.update(*batch)
        return peer.collate([{key: row[key] for key in ("input_ids", "labels", "attention_mask")} for row in batch])

    model = qlorapp.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), qlorapp.LoraConfig(r=4))
    data = [{**row, "position_ids": list(range(len(row["input_ids"]))), "note": "x"} for row in rows(8)]
    qlorapp.Trainer(model, arguments(tmp_path, max_steps=1), data_collator=collate, train_dataset=data).train()
    assert seen == {"input_ids", "labels", "attention_mask", "position_ids"}


# --- files


@pytest.mark.parametrize("name", ["save_model", "_save"])
def test_a_save_of_ones_own_is_called_for_each_checkpoint_which_can_be_resumed_from(folder, tmp_path, name):
    class Notes:
        def note(self, output_dir):
            with open(f"{output_dir}/mine.json", "w") as file:
                json.dump({"step": self.state.global_step}, file)

    class SavesModel(Notes, qlorapp.Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)
            self.note(output_dir or self.args.output_dir)

    class Saves(Notes, qlorapp.Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            self.note(output_dir)

    kind = SavesModel if name == "save_model" else Saves
    whole = trained(folder, tmp_path / "a", kind, save_strategy="steps", save_steps=2)
    assert not whole._autograd_reasons  # the native loop
    for step in (2, 4, 6):
        assert json.loads((tmp_path / "a" / f"checkpoint-{step}" / "mine.json").read_text()) == {"step": step}
    resumed = trained(folder, tmp_path / "b", kind, resume=tmp_path / "a" / "checkpoint-4")
    assert losses(resumed) == losses(whole)
    whole.save_model(str(tmp_path / "c"))
    assert (tmp_path / "c" / "mine.json").exists() and (tmp_path / "c" / "adapter_model.safetensors").exists()


def test_values_of_ones_own_are_not_saved_unsaid(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(4))
    with pytest.raises(ValueError, match="state_dict= is not supported. Load the values first"):
        trainer._save(str(tmp_path), state_dict={})


def test_a_collator_brings_its_tokenizer_into_the_checkpoint(folder, tmp_path):
    class Tokenizer:
        pad_token_id = 0

        def save_pretrained(self, place):
            with open(f"{place}/tokenizer.json", "w") as file:
                file.write("{}")

    collator = transformers.DataCollatorWithPadding(Tokenizer())
    trained(folder, tmp_path, save_strategy="epoch", more={"data_collator": collator})
    assert (tmp_path / "checkpoint-6" / "tokenizer.json").exists()


# --- and the rest


@pytest.mark.parametrize("takes_trial", [True, False])
def test_a_model_is_made_by_model_init(folder, tmp_path, takes_trial):
    init = (lambda trial: load(folder)) if takes_trial else (lambda: load(folder))
    trainer = qlorapp.Trainer(args=arguments(tmp_path, max_steps=1), train_dataset=rows(4), model_init=init)
    assert trainer.train().global_step == 1


def test_metrics_are_formatted_as_they_are_printed(folder, tmp_path, capsys):
    class Words(qlorapp.Trainer):
        def metrics_format(self, metrics):
            return {key: f"<{value}>" for key, value in super().metrics_format(metrics).items()}

    Words(load(folder), arguments(tmp_path), train_dataset=rows(4)).log_metrics("train", {"train_loss": 1.23456, "epoch": 2})
    assert capsys.readouterr().out == "***** train metrics *****\n  epoch      = <2>\n  train_loss = <1.2346>\n"
