# SPDX-License-Identifier: Apache-2.0
"""Values of TrainingArguments as transformers takes them: strings of YAML, None and 0 for what is off."""

import numpy as np
import pytest
import qlorapp
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import arguments, losses, rows, trained

KINDS = pytest.mark.parametrize("kind", [qlorapp.TrainingArguments, qlorapp.SFTConfig])


@KINDS
@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({"learning_rate": "2e-4"}, 2e-4),
        ({"num_train_epochs": "2"}, 2.0),
        ({"per_device_train_batch_size": "3"}, 3),
        ({"eval_steps": "5"}, 5.0),
        ({"max_grad_norm": None}, 0.0),
        ({"max_steps": None}, -1),
        ({"max_steps": -1}, -1),
        ({"resume_from_checkpoint": True}, "true"),
        ({"resume_from_checkpoint": False}, None),
        ({"resume_from_checkpoint": "7"}, "7"),
        ({"run_name": "2024"}, "2024"),
    ],
)
def test_a_value_that_transformers_takes_means_the_same(tmp_path, kind, given, settled):
    ((name, _),) = given.items()
    value = getattr(kind(str(tmp_path), report_to="none", **given), name)
    assert value == settled and type(value) is type(settled)


@KINDS
def test_no_steps_are_said_to_be_none_and_epochs_count(tmp_path, kind, caplog):
    assert kind(str(tmp_path), report_to="none", max_steps=0).max_steps == -1
    assert kind(str(tmp_path), report_to="none", max_steps=-7).max_steps == -1
    if kind is qlorapp.TrainingArguments:  # a line is said once in a process
        assert "max_steps=0 is as good as none" in caplog.text and "max_steps=-7 is as good as none" in caplog.text


@KINDS
@pytest.mark.parametrize("epochs", [0, None, "0", -1.5])
def test_no_epochs_are_refused_unless_steps_are_set(tmp_path, kind, epochs):
    with pytest.raises(ValueError, match=r"num_train_epochs must be > 0 unless max_steps is set; got .*To evaluate alone"):
        kind(str(tmp_path), report_to="none", num_train_epochs=epochs)
    assert kind(str(tmp_path), report_to="none", num_train_epochs=epochs, max_steps=4).max_steps == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", "fast"), ("learning_rate", "nan"), ("max_steps", "2.5"), ("per_device_train_batch_size", "")],
)
def test_a_string_that_is_no_number_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(TypeError, match=rf"'{name}' must be .*; got string"):
        qlorapp.TrainingArguments(str(tmp_path), **{name: value})


def test_a_run_without_clipping_is_one_with_zero_and_true_takes_the_newest_checkpoint(folder, tmp_path):
    zero = trained(folder, tmp_path / "a", max_steps="3", max_grad_norm=0.0)
    none = trained(folder, tmp_path / "b", max_steps=3, max_grad_norm=None, save_strategy="steps", save_steps=2)
    assert losses(none) == losses(zero) and len(losses(none)) == 3
    again = qlorapp.Trainer(
        load(folder), arguments(tmp_path / "b", max_steps=3, resume_from_checkpoint=True), train_dataset=rows(26)
    )
    assert again.train().global_step == 3
    assert losses(again)[-1] == losses(none)[-1]


def test_numbers_of_numpy_are_numbers(tmp_path):
    args = qlorapp.SFTConfig(str(tmp_path), max_steps=np.int64(3), learning_rate=np.float32(0.5), save_steps=np.int32(2),
                             seed=np.array(7), bf16=np.bool_(False))  # fmt: skip
    assert (args.max_steps, args.learning_rate, args.save_steps, args.seed, args.bf16) == (3, 0.5, 2, 7, False)
    assert type(args.max_steps) is int and type(args.learning_rate) is float and type(args.bf16) is bool
    lora = qlorapp.LoraConfig(r=np.int64(4), lora_dropout=np.float64(0.5), rank_pattern={"q_proj": np.int64(2)})
    assert lora.r == 4 and type(lora.r) is int and lora.to_dict()["rank_pattern"] == {"q_proj": 2}
    with pytest.raises(TypeError, match="'max_steps' must be"):
        qlorapp.TrainingArguments(str(tmp_path), max_steps=np.array([1, 2]))
