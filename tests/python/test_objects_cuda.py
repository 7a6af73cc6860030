# SPDX-License-Identifier: Apache-2.0
"""Models, trainers and pictures of memory on a GPU, as a notebook makes them and lets them go."""

import gc

import pytest
import qlorapp
import test_foreign_trainer
import torch
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import arguments, rows

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def adapted(folder, device, compute="float32"):
    quantization = qlorapp.BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=compute)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map=device)
    return qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear"), seed=5)


def run(folder, output, device, kind=qlorapp.Trainer, **options):
    trainer = kind(adapted(folder, device), arguments(output, **options), train_dataset=rows(26), eval_dataset=rows(5))
    trainer.train()
    return trainer


def in_use():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


class InPython(qlorapp.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(qlorapp.Trainer, {}), (qlorapp.Trainer, {"optim": "paged_adamw_8bit", "gradient_checkpointing": True}), (InPython, {})],
    ids=["kept", "checkpointed", "in Python"],
)
def test_what_is_deleted_gives_its_memory_back(folder, tmp_path, cuda, kind, options):
    def once():
        trainer = run(folder, tmp_path, cuda, kind, max_steps=2, eval_strategy="epoch", **options)
        held = torch.cuda.memory_allocated()
        trainer.model.generate(torch.arange(3, 9).view(1, 6).to(cuda), max_new_tokens=4)
        del trainer
        return held

    once()  # libraries take their workspaces
    before = in_use()
    held = once()
    assert held > before and in_use() == before


def test_a_foreign_model_learns_on_a_gpu_what_it_learns_on_a_cpu(tmp_path, cuda):
    phi = test_foreign_trainer.write(tmp_path / "phi")
    found = {}
    for device in ("cpu", "cuda:0"):
        trainer = run(phi, tmp_path / "run", device, learning_rate=1e-3)
        assert next(trainer.model.parameters()).device.type == torch.device(device).type
        found[device] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found["cpu"]) == 6 and found["cuda:0"] == pytest.approx(found["cpu"], rel=1e-3)


def test_a_measured_picture_of_memory(folder, tmp_path, cuda):
    torch._C._cuda_clearCublasWorkspaces()  # of other threads of this process, which stay in it and would be in the picture
    model = adapted(folder, cuda, "bfloat16")
    args = qlorapp.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_length=128)
    qlorapp.plan(model, args=args, measure=True)  # rotary tables grow to the longest row, and stay
    before = in_use()
    plan = qlorapp.plan(model, args=args, measure=True)
    assert in_use() == before
    planned = max(phase["allocated"] for name, phase in plan.phases.items() if name not in ("load", "merge"))
    assert 0.97 * plan.measured <= planned <= 1.05 * plan.measured
    assert "polyline" in plan.svg()


@pytest.mark.parametrize("kind", [qlorapp.Trainer, InPython], ids=["in C++", "in Python"])
def test_an_embedding_on_the_host_leaves_the_gpu_and_changes_no_loss(folder, tmp_path, cuda, kind):
    def measured(**options):
        before = in_use()
        trainer = run(folder, tmp_path, cuda, kind, max_steps=3, **options)
        return in_use() - before, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    measured()  # libraries take their workspaces
    held, losses = measured()
    less, same = measured(embedding_on_host=True)
    assert len(losses) == 3 and same == losses and less < held


def test_the_cache_is_given_back_as_often_as_asked(folder, tmp_path, cuda):
    def freed(**options):
        before = torch.cuda.memory_stats()["segment.all.freed"]
        run(folder, tmp_path, cuda, **options)
        return torch.cuda.memory_stats()["segment.all.freed"] - before

    assert freed(torch_empty_cache_steps=1) > freed()
