# SPDX-License-Identifier: Apache-2.0
"""What scripts for TRL, for its older versions and for unsloth pass to the same names."""

import logging

import datasets
import peft
import pytest
import qlorapp
import torch
import transformers
import trl
from qlorapp.hf.forward import engine_of
from tiny_trainer import TINY, adapted, base_model, in_cpp, made, tokenizer, trained

ROWS = datasets.Dataset.from_list([{"written": f"Item {i} of the list. " + "Good. " * (i % 4)} for i in range(8)])
FEW = {
    "max_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "disable_tqdm": True,
}


def model(four_bit=True):
    return adapted((base_model if four_bit else qlorapp.AutoModelForCausalLM.from_pretrained)(TINY, dtype=torch.float32))


# --- TRL


def test_get_peft_config_is_that_of_the_library_whose_config_it_gets():
    model_config = trl.ModelConfig(use_peft=True, lora_r=5, lora_target_modules=["k_proj"])
    assert qlorapp.get_peft_config(model_config) == trl.get_peft_config(model_config)
    fields = {"peft_type": "LORA", "r": 3, "task_type": "CAUSAL_LM"}
    assert qlorapp.get_peft_config(fields) == peft.get_peft_config(dict(fields))
    assert qlorapp.get_peft_config(trl.ModelConfig(use_peft=False)) is None


@pytest.mark.parametrize(
    ("init", "dtype"),
    [
        (None, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "auto"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
    ],
    ids=str,
)
def test_a_model_by_name_has_the_dtype_that_trl_gives_it(tmp_path, init, dtype):
    stored = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = qlorapp.SFTConfig(tmp_path / "out", model_init_kwargs=init, bf16=False, dataset_text_field="written", **FEW)
    trainer = qlorapp.SFTTrainer(str(tmp_path / "model"), args, train_dataset=ROWS)
    assert trainer.model.dtype == getattr(torch, dtype)
    if init is None or "dtype" in init:
        assert trl.SFTTrainer(str(tmp_path / "model"), args, train_dataset=ROWS).model.dtype == trainer.model.dtype
    four_bit = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    assert qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=four_bit).dtype == torch.float16


def test_a_model_of_a_config_is_transformers_own():
    config = transformers.AutoConfig.from_pretrained(TINY)
    torch.manual_seed(1)
    new = qlorapp.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(new) is transformers.LlamaForCausalLM and new.dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(new.parameters(), theirs.parameters(), strict=True))
    head = qlorapp.AutoModelForSequenceClassification.from_config(config)
    assert type(head) is transformers.LlamaForSequenceClassification
    config.auto_map = {"AutoModelForCausalLM": "nowhere/else--modeling.Mine"}  # transformers would ask, or run it
    assert type(qlorapp.AutoModelForCausalLM.from_config(config, trust_remote_code=True)) is transformers.LlamaForCausalLM


# --- older versions of TRL, and unsloth


def old_style(tmp_path, args, **more):
    return qlorapp.SFTTrainer(
        model=model(), tokenizer=tokenizer(), train_dataset=ROWS, dataset_text_field="written",
        max_seq_length=24, packing=False, dataset_num_proc=1, args=args, **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["TrainingArguments", "transformers", "SFTConfig", "trl"])
def test_options_of_the_config_are_arguments_of_the_trainer_too(tmp_path, kind):
    kinds = {"transformers": transformers.TrainingArguments, "trl": trl.SFTConfig}
    args = kinds.get(kind) or getattr(qlorapp, kind)
    options = {**FEW, "learning_rate": 3e-4, "warmup_steps": 0.5, "gradient_checkpointing": True, "seed": 3407, "bf16": False}
    trainer = old_style(tmp_path, args(str(tmp_path), **options))
    del options["report_to"]
    for name, value in {
        **options,
        "max_length": 24,
        "packing": False,
        "dataset_text_field": "written",
        "dataset_num_proc": 1,
    }.items():
        assert getattr(trainer.args, name) == value, name
    trainer.train()
    assert in_cpp(trainer) and max(len(row["input_ids"]) for row in trainer.train_dataset) <= 24


def test_packing_given_to_the_trainer_packs(tmp_path):
    trainer = qlorapp.SFTTrainer(
        model(), qlorapp.TrainingArguments(tmp_path, **FEW), train_dataset=ROWS, processing_class=tokenizer(),
        dataset_text_field="written", packing=True, max_seq_length=64,
    )  # fmt: skip
    assert trainer.args.packing and len(trainer.train_dataset) < len(ROWS)


def test_an_option_that_nothing_has_is_refused(tmp_path):
    with pytest.raises(TypeError, match="dataset_text_fields"):
        qlorapp.SFTTrainer(model(), train_dataset=ROWS, dataset_text_fields="written")
    with pytest.raises(TypeError, match="'max_seq_length' and 'max_length' are the same option"):
        qlorapp.SFTTrainer(model(), train_dataset=ROWS, max_seq_length=3, max_length=4)


@pytest.mark.parametrize("name", ["FastLanguageModel", "FastVisionModel", "UnslothTrainer", "train_on_responses_only"])
def test_a_name_of_unsloth_says_what_replaces_it(name):
    with pytest.raises(ImportError, match=rf"{name} is a name of unsloth. Use .*: docs/migration.md"):
        exec(f"from qlorapp import {name}")
    page = (TINY.parents[2] / "docs" / "migration.md").read_text()
    assert "## From unsloth" in page and name in page


# --- one model, several trainers


@pytest.mark.parametrize("bf16", [False, True])
def test_every_trainer_over_one_model_trains_in_cpp(tmp_path, bf16, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    one = adapted(base_model(TINY, dtype=torch.bfloat16 if bf16 else torch.float32))
    args = qlorapp.SFTConfig(tmp_path, bf16=bf16, dataset_text_field="written", **FEW)
    for _ in range(3):
        trainer = qlorapp.SFTTrainer(one, args, train_dataset=ROWS, processing_class=tokenizer())
        trainer.train()
        assert in_cpp(trainer)
        one = trainer.model
    assert "multiple devices" not in caplog.text


def test_a_replaced_forward_is_seen_below_the_trainers(tmp_path, caplog):
    changed = model()
    own = changed.get_base_model().forward
    changed.get_base_model().forward = lambda *given, **options: own(*given, **options)
    args = qlorapp.SFTConfig(tmp_path, bf16=False, dataset_text_field="written", **FEW)
    for _ in range(2):
        trainer = qlorapp.SFTTrainer(changed, args, train_dataset=ROWS, processing_class=tokenizer())
        trainer.train()
        assert not in_cpp(trainer)
    assert "the forward of LlamaForCausalLM was replaced" in caplog.text


@pytest.mark.parametrize("quiet", [False, True])
def test_a_streamed_data_set_trains(tmp_path, quiet):
    args = qlorapp.SFTConfig(tmp_path, bf16=False, dataset_text_field="written", **{**FEW, "disable_tqdm": quiet})
    values = []
    for kind in (qlorapp.SFTTrainer, trl.SFTTrainer):
        trainer = kind(model(four_bit=False), args, train_dataset=ROWS.to_iterable_dataset(), processing_class=tokenizer())
        values.append(trainer.train().training_loss)
    assert values[0] == pytest.approx(values[1], abs=1e-5)


# --- rows without a collator


def uneven(as_tensors=False):
    rows = [{"input_ids": list(range(3, 9 + i)), "labels": [-100, *range(4, 9 + i)]} for i in (5, 0, 3, 1)]
    return datasets.Dataset.from_list(rows).with_format("torch") if as_tensors else rows


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_labels_of_several_lengths_are_padded_without_a_collator(tmp_path, tensors, with_tokenizer):
    more = {"eval_dataset": uneven(tensors), **({"processing_class": tokenizer()} if with_tokenizer else {})}
    options = {"data": uneven(tensors), "max_steps": 2, "num_train_epochs": 1}
    mine = trained(qlorapp.Trainer, TINY, tmp_path, model=model(), more={**more, "data_collator": None}, **options)
    seq2seq = transformers.DataCollatorForSeq2Seq(tokenizer())
    theirs = trained(transformers.Trainer, TINY, tmp_path, model=model(), more={**more, "data_collator": seq2seq}, **options)
    assert in_cpp(mine) and mine.output.training_loss == pytest.approx(theirs.output.training_loss, abs=1e-5)
    assert mine.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)


def test_other_rows_are_collated_as_by_transformers(tmp_path):
    rows = [{"x": float(i), "labels": 2.0 * i} for i in range(3)]
    trainer = made(qlorapp.Trainer, TINY, tmp_path, data=uneven(), more={"data_collator": None})
    assert {key: value.tolist() for key, value in trainer.data_collator(rows).items()} == {"x": [0, 1, 2], "labels": [0, 2, 4]}
    padded = [
        {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": [5, 6, -100]},
        {"input_ids": [5], "attention_mask": [1], "labels": [5]},
    ]
    with pytest.raises(ValueError, match="expected sequence of length"):
        trainer.data_collator(padded)  # whose padding is unknown
    packed = [{**row, "position_ids": [0, 1, *range(len(row["input_ids"]) - 2)]} for row in uneven()]
    with pytest.raises(ValueError, match="expected sequence of length"):
        trainer.data_collator(packed)  # two rows in each, which padding would join


def test_rows_with_one_label_are_padded_by_the_tokenizer(tmp_path):
    more = {"data_collator": None, "processing_class": tokenizer()}
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": len(ids)} for ids in ([5, 6, 7], [8])]
    mine, theirs = (
        made(kind, TINY, tmp_path, data=uneven(), more=more).data_collator([dict(row) for row in rows])
        for kind in (qlorapp.Trainer, transformers.Trainer)
    )
    assert mine["labels"].tolist() == [3, 1] and {k: v.tolist() for k, v in mine.items()} == {
        k: v.tolist() for k, v in theirs.items()
    }


# --- labels on padding


def test_padding_with_labels_counts_as_in_transformers(tmp_path):
    """Of every kind of loss over the engine: forward, and the loss of a trainer in transformers' loop."""
    ids = torch.tensor([[5, 17, 99, 240, 33, 695, 695, 695], [400, 3, 250, 77, 91, 12, 13, 14]])
    right = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    for mask in (right, right.flip(1)):
        for labels in (ids, ids.where((ids != 695).cumprod(1) == 1, 694)):
            found = []
            for enabled in (True, False):
                adapted_model = model().train()
                engine_of(adapted_model.get_base_model()).enabled = enabled
                output = adapted_model(input_ids=ids, attention_mask=mask, labels=labels)
                output.loss.backward()
                found.append((output.loss, *(p.grad for p in adapted_model.parameters() if p.grad is not None)))
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer", "smoothed"])
def test_a_trainer_whose_padding_has_labels_has_transformers_loss(tmp_path, kind):
    rows = [{"input_ids": list(range(3, 9 + i))} for i in (5, 0, 3, 1)]

    def collate(some):
        longest = max(len(row["input_ids"]) for row in some)
        ids = torch.tensor([list(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in some])
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in some])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    losses = []
    for enabled in (True, False):
        trained_model = model()
        engine_of(trained_model.get_base_model()).enabled = enabled
        more = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer(), "data_collator": collate}
        if kind == "SFTTrainer":
            trainer = qlorapp.SFTTrainer(
                trained_model, qlorapp.SFTConfig(tmp_path, bf16=False, **{**FEW, "per_device_train_batch_size": 4}), **more
            )
        else:
            smoothing = 0.1 if kind == "smoothed" else 0.0
            args = qlorapp.TrainingArguments(
                tmp_path, label_smoothing_factor=smoothing, **{**FEW, "per_device_train_batch_size": 4}
            )
            trainer = qlorapp.Trainer(trained_model, args, **more)
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# --- what is logged


def test_a_run_logs_what_transformers_logs_at_the_beginning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    names = []
    for kind in (qlorapp.Trainer, transformers.Trainer):
        caplog.clear()
        with caplog.at_level(logging.INFO, "transformers"):
            trained(kind, TINY, tmp_path, max_steps=1, log_level="info")
        lines = [record.getMessage() for record in caplog.records]
        begin = lines.index("***** Running training *****")
        names.append([line for line in lines[begin:] if line.startswith("  ")][:8])
    assert names[0] == names[1] and len(names[0]) == 8
