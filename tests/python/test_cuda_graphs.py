# SPDX-License-Identifier: Apache-2.0
"""cuda_graphs=True: the same bits as without, and a word where it has no effect."""

import logging

import pytest
import qlorapp
import torch
from tiny_run import write_model
from tiny_trainer import losses, rows, trained


@pytest.mark.skipif(torch.cuda.is_available(), reason="models go to the GPU")
def test_a_cpu_says_that_it_has_no_effect(tmp_path, caplog):
    folder = write_model(tmp_path / "model")
    with caplog.at_level(logging.WARNING, logger="qlorapp"):
        trained(folder, tmp_path / "out", data=rows(8), max_steps=1, cuda_graphs=True)
    assert "cuda_graphs has no effect: it records steps that are computed here, on a GPU" in caplog.text


def test_a_budget_does_not_know_its_memory(tmp_path):
    with pytest.raises(ValueError, match="which the plan of memory_budget and auto_find_batch_size does not know"):
        qlorapp.TrainingArguments(output_dir=str(tmp_path), cuda_graphs=True, memory_budget="auto")


@pytest.mark.usefixtures("cuda")
def test_rows_of_one_length_train_with_the_same_bits(tmp_path):
    folder = write_model(tmp_path / "model")
    data = [
        {"input_ids": [(7 * i + j) % 90 for j in range(32)], "labels": [(7 * i + j) % 90 for j in range(32)]} for i in range(40)
    ]
    options = {"data": data, "bf16": True, "max_steps": 10, "full_determinism": True}
    plain = losses(trained(folder, tmp_path / "plain", **options))
    assert losses(trained(folder, tmp_path / "graphs", cuda_graphs=True, **options)) == plain
