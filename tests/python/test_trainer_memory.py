# SPDX-License-Identifier: Apache-2.0
"""Options about memory: they change what a step holds, and no number."""

import logging

import datasets
import pytest
import qlorapp
import torch
import transformers
from qlorapp.hf import longest_rows
from qlorapp.hf.forward import engine_of
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_run import write_model
from tiny_trainer import ByRows, Computed, adapted, assert_same_run, base_model, in_cpp, losses, rows, trained

OPTIONS = {
    "blocks keep their attention": {"gradient_checkpointing": True, "checkpoint_keep": "attention_only"},
    "in pieces": {"loss_chunk_rows": 3, "mlp_tile_rows": 4, "gradient_checkpointing": True, "weight_workspace": "stack"},
    "elsewhere, or given back": {"embedding_on_host": True, "torch_empty_cache_steps": 1, "worst_case_first": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return trained(qlorapp.Trainer, folder, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("case", OPTIONS)
def test_a_run_that_holds_less_is_the_same_run(folder, tmp_path, plain, case):
    trainer = trained(qlorapp.Trainer, folder, tmp_path, **OPTIONS[case])
    assert in_cpp(trainer)
    assert_same_run(trainer, plain)


def test_auto_find_batch_size_shrinks_a_micro_batch_that_cannot_fit(folder, tmp_path, plain):
    """The plan shrinks it before the first step; accumulation grows, and the effective batch stays."""
    options = {"auto_find_batch_size": True, "max_steps": 1}
    trainer = trained(
        qlorapp.Trainer, folder, tmp_path, per_device_train_batch_size=1 << 20, gradient_accumulation_steps=2, **options
    )
    batch, windows = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    assert in_cpp(trainer) and batch < 1 << 20 and batch * windows == 1 << 21
    assert trained(qlorapp.Trainer, folder, tmp_path, **options).args.per_device_train_batch_size == 4  # there is room
    whole = trained(
        qlorapp.Trainer, folder, tmp_path, max_steps=1, per_device_train_batch_size=26, gradient_accumulation_steps=1
    )
    assert losses(trainer) == pytest.approx(losses(whole), rel=1e-5)


def test_a_budget_that_keeps_everything_leaves_no_recompute_behind(folder, tmp_path):
    """Also of a model that was made ready for checkpointing: the budget decides, in C++ and in the modules that evaluate."""

    class Kept(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **others):
            seen.append({keep for _, _, keep in engine_of(model.get_base_model()).core.segments})

    for more in ({}, {"gradient_checkpointing": True}):
        seen = []
        base = qlorapp.prepare_model_for_kbit_training(base_model(folder))
        model = adapted(base)
        options = {"memory_budget": "4GiB", "max_steps": 2, **more}
        trainer = trained(qlorapp.Trainer, folder, tmp_path, model=model, more={"callbacks": [Kept()]}, **options)
        assert in_cpp(trainer) and trainer.args.checkpoint_keep == ["everything"]
        assert seen == [{"everything"}] * 2


def test_a_budget_that_nothing_fits_names_the_ways_out(folder, tmp_path):
    with pytest.raises(ValueError, match=r"\[memory_budget\] 64.0 KiB are not enough: .* Ways out: a larger memory_budget"):
        trained(qlorapp.Trainer, folder, tmp_path, memory_budget="64KiB")


def test_a_budget_plans_for_the_longest_row_of_each_kind_of_data(folder, tmp_path):
    made = rows(26)
    arrow = datasets.Dataset.from_list(
        [*made, {**made[0], "input_ids": [5] * 90, "labels": [5] * 90, "attention_mask": [1] * 90}]
    )
    assert longest_rows.lengths(arrow, may_read=False) == [len(row["input_ids"]) for row in arrow]
    assert longest_rows.lengths(arrow.select([26, 3]), may_read=False) == [90, len(made[3]["input_ids"])]
    assert longest_rows.lengths(made, may_read=True) == [len(row["input_ids"]) for row in made]
    computed = Computed(made)
    assert longest_rows.lengths(computed, may_read=True) == longest_rows.lengths(made, may_read=False)
    assert longest_rows.lengths(computed, may_read=False) is None  # reading them may cost as much as training
    assert longest_rows.lengths(arrow.to_iterable_dataset(), may_read=True) is None
    with pytest.raises(ValueError, match="the rows are not known before they come. Train on a data set that has a length"):
        trained(qlorapp.Trainer, folder, tmp_path, data=arrow.to_iterable_dataset(), max_steps=1, memory_budget="2GiB")


@pytest.mark.parametrize("options", [{"memory_budget": "120MiB"}, {"auto_find_batch_size": True}], ids=["budget", "batch size"])
def test_a_run_whose_batch_was_chosen_is_resumed(folder, tmp_path, options):
    options |= {
        "per_device_train_batch_size": 1 << 14,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = trained(qlorapp.Trainer, folder, tmp_path, max_steps=2, **options)
    assert "memory_budget" not in options or whole.args.per_device_train_batch_size < 1 << 14
    again = trained(qlorapp.Trainer, folder, tmp_path, max_steps=2, resume=str(tmp_path / "checkpoint-1"), **options)
    assert losses(again) == losses(whole)


def test_auto_find_batch_size_over_a_stream_is_transformers(folder, tmp_path, caplog):
    stream = datasets.Dataset.from_list(rows(26)).to_iterable_dataset()
    trained(qlorapp.Trainer, folder, tmp_path, data=stream, max_steps=1, auto_find_batch_size=True)
    assert "steps are slower" in caplog.text


def test_the_largest_micro_batch_draws_no_random_numbers(folder, tmp_path):
    class Masks(ByRows):
        def __call__(self, given):
            batch = super().__call__(given)
            batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = -100
            return batch

    arrow = datasets.Dataset.from_list(rows(26))
    found = [
        losses(trained(qlorapp.Trainer, folder, tmp_path, data=arrow, more={"data_collator": Masks()}, worst_case_first=first))
        for first in (False, True)
    ]
    assert found[0] == found[1]


def test_the_largest_micro_batch_runs_first(folder, tmp_path, caplog):
    arrow = datasets.Dataset.from_list(rows(26))
    longest = sum(sorted(map(len, arrow["input_ids"]))[-4:])
    with caplog.at_level(logging.INFO, logger="qlorapp"):
        trained(qlorapp.Trainer, folder, tmp_path, data=arrow, max_steps=1, worst_case_first=True)
    assert f"ran the largest micro-batch of the data: 4 rows with {longest} tokens" in caplog.text
    trained(qlorapp.Trainer, folder, tmp_path, data=Computed(rows(26)), max_steps=1, worst_case_first=True)
    assert "worst_case_first has no effect: the lengths of the rows are not known before they are read" in caplog.text


def test_fp8_trains_in_eight_bits_and_says_where_it_cannot(tmp_path):
    place = write_model(tmp_path / "model", hidden_size=128)

    def run(lora=None, **more):
        model = adapted(base_model(place, dtype=torch.bfloat16), **(lora or {}))
        sizes = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 2}
        return trained(qlorapp.Trainer, place, tmp_path, model=model, bf16=True, **sizes, **more)

    plain, eight = run(), run(fp8=True)
    assert in_cpp(eight) and losses(eight) == pytest.approx(losses(plain), rel=2e-2) and losses(eight) != losses(plain)
    with pytest.raises(ValueError, match="Set lora_dropout=0"):
        run(fp8=True, lora={"lora_dropout": 0.1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="models go to the GPU")
def test_a_cpu_says_that_cuda_graphs_have_no_effect(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="qlorapp"):
        assert in_cpp(trained(qlorapp.Trainer, folder, tmp_path, max_steps=1, cuda_graphs=True))
    assert "cuda_graphs has no effect: it records steps on a GPU" in caplog.text
    with pytest.raises(ValueError, match="which memory_budget and auto_find_batch_size do not plan"):
        qlorapp.TrainingArguments(output_dir=str(tmp_path), cuda_graphs=True, memory_budget="auto")
