# SPDX-License-Identifier: Apache-2.0
"""What a trainer takes for rows: torch's data sets, streams, and what it refuses."""

import itertools
import pathlib
from types import SimpleNamespace

import datasets
import pytest
import qlorapp
import torch
import transformers
from qlorapp import batches
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import arguments, losses, rows, trained

DATA = pathlib.Path(__file__).parents[2] / "examples" / "data"


class Computed(torch.utils.data.Dataset):
    """Rows that are computed from any number: an index beyond the end is no error."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        return self.source[i % len(self.source)]


class Named(Computed):
    """Rows in a dict: an index beyond the end is a KeyError."""

    def __init__(self, source):
        super().__init__(dict(enumerate(source)))

    def __getitem__(self, i):
        return self.source[i]


class Endless(torch.utils.data.IterableDataset):
    def __init__(self, source):
        self.source, self.drawn = source, 0

    def __iter__(self):
        for row in itertools.cycle(self.source):
            self.drawn += 1
            yield row


@pytest.mark.parametrize("kind", [Computed, Named])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_data_set_of_torch_has_as_many_rows_as_it_says(folder, tmp_path, kind, strategy):
    given = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "train_sampling_strategy": strategy}
    plain = trained(folder, tmp_path / "a", data=rows(10), more={"eval_dataset": rows(6)}, **given)
    wrapped = trained(folder, tmp_path / "b", data=kind(rows(10)), more={"eval_dataset": kind(rows(6))}, **given)
    assert losses(wrapped) == losses(plain)
    assert wrapped.evaluate(kind(rows(5)))["eval_loss"] == plain.evaluate(rows(5))["eval_loss"]


def test_group_by_length_reads_a_data_set_of_torch_to_its_end_in_python_too(folder, tmp_path):
    class Own(qlorapp.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    trainer = trained(folder, tmp_path, Own, data=Computed(rows(10)), max_steps=2, train_sampling_strategy="group_by_length")
    assert len(losses(trainer)) == 2


def test_of_a_stream_a_run_takes_what_max_steps_need_in_its_order(folder, tmp_path):
    stream = Endless(rows(50))
    given = {"max_steps": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
    streamed = trained(folder, tmp_path / "a", data=stream, **given)
    assert stream.drawn == 24
    in_order = trained(folder, tmp_path / "b", data=rows(50)[:24], train_sampling_strategy="sequential", **given)
    assert losses(streamed) == losses(in_order)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"max_steps must be set where train_dataset is a stream \(Endless\), which has no length; got -1"),
        ({"max_steps": 2, "packing": True}, r"packing=True needs all rows, and train_dataset is a stream \(Endless\)"),
        ({"max_steps": 2, "group_by_length": True}, "needs the length of every row, and train_dataset is a stream"),
    ],
)
def test_a_stream_that_cannot_be_used_is_refused_before_it_is_read(folder, tmp_path, options, message):
    stream = Endless(rows(5))
    with pytest.raises(ValueError, match=message):
        qlorapp.Trainer(load(folder), arguments(tmp_path, **options), train_dataset=stream)
    assert stream.drawn == 0


def test_several_data_sets_and_columns_are_no_rows(folder, tmp_path):
    table = datasets.Dataset.from_list(rows(6))
    both = datasets.DatasetDict({"train": table, "test": table})
    with pytest.raises(TypeError, match=r"train_dataset holds several data sets: \['train', 'test'\]. Give one of them."):
        qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=both)
    with pytest.raises(TypeError, match=r"train_dataset must be rows; got columns \(input_ids, labels\)"):
        qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset={"input_ids": [[1]], "labels": [[1]]})


def test_sft_takes_a_data_set_of_torch(tmp_path):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(DATA / "tiny-llama")
    trainer = qlorapp.SFTTrainer(
        model,
        qlorapp.SFTConfig(str(tmp_path), max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no"),
        train_dataset=Computed([{"text": f"row number {i}"} for i in range(7)]),
        eval_dataset=Named([{"text": f"row number {i}"} for i in range(3)]),
        peft_config=qlorapp.LoraConfig(r=2),
    )
    assert len(trainer.train_dataset) == 7 and len(trainer.eval_dataset) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"position_ids": [0, 1, 2, 0, 1]}, r"position_ids must count the row's tokens from 0; got 0 at 3\. .*packing=True"),
        ({"position_ids": torch.arange(1, 6)}, "position_ids must count .* got 1 at 0"),
        ({"seq_lengths": [3, 2]}, r"seq_lengths must be the length of one row; got \[3, 2\]"),
        ({"attention_mask": [1, 1, 0, 1, 1]}, "attention_mask must be 1 .* got 0 at 2"),
        ({"attention_mask": [1, 1, 1, 2, 2]}, "attention_mask must be 1 .* got 2 at 3"),
        ({"attention_mask": [1, 1]}, "attention_mask must be as long as input_ids, 5; got 2"),
        (
            {"input_ids": torch.arange(5, 10)[None]},
            r"input_ids must be one row of numbers; got shape \(1, 5\)\. .*return_tensors",
        ),
        ({"labels": [[5, 6, 7, 8, 9]]}, "labels must be one row of numbers; got a list of list"),
    ],
)
@pytest.mark.parametrize("way", ["C++", "padded"])
def test_a_row_that_holds_several_is_refused(way, more, message):
    read = (lambda data: batches.rows_of(data, "train_dataset")) if way == "C++" else batches.PadRight(0)
    with pytest.raises(ValueError, match=r"\[Trainer\] \w+, row 1: " + message):
        read([{"input_ids": [5, 6]}, {"input_ids": [5, 6, 7, 8, 9], **more}])


def test_positions_and_masks_of_one_row_say_nothing_new():
    row = {"input_ids": torch.arange(5), "position_ids": [0, 0, 1, 2, 0], "attention_mask": [False, True, True, True, False]}
    assert batches.rows_of([row], "train_dataset") == [([1, 2, 3], [1, 2, 3])]
    assert batches.rows_of([{**row, "attention_mask": [0] * 5, "seq_lengths": [0]}], "train_dataset") == [([], [])]


def test_sft_refuses_packed_rows_that_it_is_not_to_prepare(folder, tmp_path):
    config = qlorapp.SFTConfig(output_dir=str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, report_to="none")
    row = {"input_ids": [5, 6, 7, 5, 6], "labels": [5, 6, 7, 5, 6], "position_ids": [0, 1, 2, 0, 1]}
    with pytest.raises(ValueError, match="position_ids must count"):
        qlorapp.SFTTrainer(load(folder), config, train_dataset=[row])


def test_a_script_s_collator_is_called_whatever_its_name_is(folder, tmp_path):
    called = []

    class DataCollatorForSeq2Seq:
        def __call__(self, some):
            called.append(len(some))
            return batches.PadRight(0)(some)

    trained(folder, tmp_path, more={"data_collator": DataCollatorForSeq2Seq()}, data=rows(4), max_steps=1)
    assert called
    assert batches.is_default_collator(transformers.default_data_collator)
    assert batches.is_default_collator(transformers.DefaultDataCollator()) and batches.is_default_collator(None)


def test_labels_that_transformers_would_rewrite_are_kept_and_that_is_said(folder, tmp_path, caplog):
    collator = transformers.DataCollatorForLanguageModeling(SimpleNamespace(mask_token=None, pad_token="x"), mlm=False)
    more = {"train_dataset": [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}], "data_collator": collator}
    qlorapp.Trainer(load(folder), arguments(tmp_path), **more)
    qlorapp.Trainer(load(folder), arguments(tmp_path), **{**more, "train_dataset": [{"input_ids": [5, 6, 7]}]})
    assert "labels are kept" not in caplog.text
    for _ in range(2):
        qlorapp.Trainer(load(folder), arguments(tmp_path), **{**more, "train_dataset": rows(4)})
    assert caplog.text.count("DataCollatorForLanguageModeling: the rows' labels are kept") == 1
