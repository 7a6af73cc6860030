# SPDX-License-Identifier: Apache-2.0
"""Rows to train on in a fraction of a second, runs over them, and what two runs have in common."""

import qlorapp
import torch
import transformers
from conftest import ROOT
from qlorapp.hf.arena_optimizer import ArenaAdamW

TINY = ROOT / "examples" / "data" / "tiny-llama"
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def tokenizer():
    made = transformers.AutoTokenizer.from_pretrained(TINY)
    made.pad_token = made.convert_ids_to_tokens(0)
    return made


def rows(count=24, seed=9):
    """Rows of 6 to 13 tokens that count up; the first is never learned."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 14, (), generator=generator))
        start = int(torch.randint(3, 40, (), generator=generator))
        ids = [start + i for i in range(length)]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "attention_mask": [1] * length})
    return made


def base_model(folder, **options):
    return qlorapp.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=qlorapp.BitsAndBytesConfig(**NF4), **options
    )


def adapted(model, **lora):
    """With adapters whose B is random, too."""
    torch.manual_seed(5)
    model = qlorapp.get_peft_model(
        model, qlorapp.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora})
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.02)  # the same numbers on every device
    return model


def arguments(output_dir, **options):
    """Seven micro-batches of four rows an epoch, three a step: the last step of an epoch has one."""
    defaults = {
        "output_dir": str(output_dir), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "use_cpu": True,
    }  # fmt: skip
    return qlorapp.TrainingArguments(**{**defaults, **options})


def made(kind, folder, output_dir, *, lora=None, data=None, more=None, model=None, **options):
    """A trainer before its run."""
    given = {
        "train_dataset": data or rows(26),
        "data_collator": transformers.DataCollatorForSeq2Seq(tokenizer()),
        **(more or {}),
    }
    return kind(model or adapted(base_model(folder), **(lora or {})), arguments(output_dir, **options), **given)


def trained(kind, folder, output_dir, *, resume=None, **options):
    """A trainer after its run."""
    trainer = made(kind, folder, output_dir, **options)
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


class Computed(torch.utils.data.Dataset):
    """Rows that are computed from any number: an index beyond the end is no error."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        return self.source[i % len(self.source)]


class ByAutograd(qlorapp.Trainer):
    """torch computes the steps."""

    def compute_loss(self, *args, **given):
        return super().compute_loss(*args, **given)


class ByRows:
    """A collator of the user's own."""

    def __init__(self):
        self.theirs = transformers.DataCollatorForSeq2Seq(tokenizer())

    def __call__(self, given):
        return self.theirs(given)


def in_cpp(trainer):
    """Did C++ compute the steps of the trainer's last run?"""
    return trainer._told == "" and isinstance(trainer._made[0], ArenaAdamW)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_run(mine, theirs, tolerance=1e-5):
    """The same losses, norms, rates and adapters, under the same keys of the same log entries."""
    assert [list(entry) for entry in mine.state.log_history] == [list(entry) for entry in theirs.state.log_history]
    for one, other in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        for key in one:
            if any(part in key for part in ("runtime", "per_second", "total_flos")):
                continue
            assert abs(one[key] - other[key]) <= tolerance * max(1, abs(other[key])), (key, one, other)
    ours, others = adapters(mine), adapters(theirs)
    assert ours.keys() == others.keys() and ours
    for name, value in others.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=10 * tolerance, msg=lambda m, n=name: f"{n}: {m}")
