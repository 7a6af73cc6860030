# SPDX-License-Identifier: Apache-2.0
"""Rows to train on in a fraction of a second, and a run over them."""

import qlorapp
import torch
from tiny_llama import load


def rows(count=24, seed=9):
    """Rows of 6 to 13 tokens that count up; the first is never learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 14, (), generator=generator))
        start = int(torch.randint(3, 40, (), generator=generator))
        ids = [start + i for i in range(length)]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "attention_mask": [1] * length})
    return made


def arguments(output_dir, **options):
    """Seven micro-batches of four rows an epoch, three a step: the last step of an epoch has one."""
    defaults = {
        "output_dir": str(output_dir), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    return qlorapp.TrainingArguments(**{**defaults, **options})


def trained(folder, output_dir, kind=qlorapp.Trainer, *, lora=None, data=None, more=None, resume=None, **options):
    """A trainer after its run."""
    trainer = kind(
        load(folder, **(lora or {})), arguments(output_dir, **options), train_dataset=data or rows(26), **(more or {})
    )
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
