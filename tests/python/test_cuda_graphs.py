# SPDX-License-Identifier: Apache-2.0
"""cuda_graphs=True: the same bits as without."""

import pytest
import qlorapp
import torch
from tiny_run import write_model
from tiny_trainer import adapted, base_model, in_cpp, losses, trained


@pytest.mark.usefixtures("cuda")
def test_rows_of_one_length_train_with_the_same_bits(tmp_path):
    folder = write_model(tmp_path / "model")
    data = [{"input_ids": [(7 * i + j) % 90 for j in range(32)]} for i in range(40)]
    data = [{**row, "labels": row["input_ids"], "attention_mask": [1] * 32} for row in data]

    def run(**options):
        model = adapted(base_model(folder, dtype=torch.bfloat16, device_map="cuda"))
        trainer = trained(
            qlorapp.Trainer, folder, tmp_path, model=model, data=data, bf16=True, max_steps=10, full_determinism=True,
            use_cpu=False, **options,
        )  # fmt: skip
        assert in_cpp(trainer)
        return losses(trainer)

    try:
        assert run(cuda_graphs=True) == run()
    finally:  # transformers sets it for the process
        torch.use_deterministic_algorithms(False)
