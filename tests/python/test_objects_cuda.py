# SPDX-License-Identifier: Apache-2.0
"""Models, trainers and pictures of memory on a GPU, as a notebook makes them and lets them go."""

import gc

import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import adapted, base_model, in_cpp, losses, rows, trained


def run(folder, output, device, kind=qlorapp.Trainer, callbacks=(), **options):
    model = adapted(base_model(folder, device_map=device, dtype=torch.float32))
    return trained(
        kind,
        folder,
        output,
        model=model,
        more={"eval_dataset": rows(5), "callbacks": list(callbacks)},
        use_cpu=False,
        **options,
    )


def in_use():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


class InPython(qlorapp.Trainer):
    def compute_loss(self, *args, **given):
        return super().compute_loss(*args, **given)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(qlorapp.Trainer, {}), (qlorapp.Trainer, {"optim": "paged_adamw_8bit", "gradient_checkpointing": True}), (InPython, {})],
    ids=["kept", "checkpointed", "in Python"],
)
def test_what_is_deleted_gives_its_memory_back(folder, tmp_path, cuda, kind, options):
    def once():
        trainer = run(folder, tmp_path, cuda, kind, max_steps=2, eval_strategy="epoch", **options)
        assert in_cpp(trainer) == (kind is qlorapp.Trainer)
        held = torch.cuda.memory_allocated()
        trainer.model.generate(input_ids=torch.arange(3, 9).view(1, 6).to(cuda), max_new_tokens=4)
        del trainer
        return held

    once()  # libraries take their workspaces
    before = in_use()
    held = once()
    assert held > before and in_use() == before


def test_a_foreign_model_learns_on_a_gpu_what_it_learns_on_a_cpu(tmp_path, cuda):
    """One of a family that C++ does not know: transformers' loop over four-bit layers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    transformers.PhiForCausalLM(transformers.PhiConfig(**sizes)).save_pretrained(tmp_path / "phi")
    found = {}
    for device in ("cpu", "cuda:0"):
        model = adapted(base_model(tmp_path / "phi", device_map=device, dtype=torch.float32))
        assert next(model.parameters()).device.type == torch.device(device).type
        options = {"use_cpu": device == "cpu", "learning_rate": 1e-3}
        found[device] = losses(trained(qlorapp.Trainer, tmp_path, tmp_path / "run", model=model, **options))
    assert len(found["cpu"]) == 6 and found["cuda:0"] == pytest.approx(found["cpu"], rel=1e-3)


def test_a_measured_picture_of_memory(folder, tmp_path, cuda):
    torch._C._cuda_clearCublasWorkspaces()  # of other threads of this process, which stay in it and would be in the picture
    model = adapted(base_model(folder, device_map=cuda, dtype=torch.bfloat16))
    args = qlorapp.SFTConfig(str(tmp_path), per_device_train_batch_size=4, max_length=128, report_to="none")
    qlorapp.plan(model, args=args, measure=True)  # rotary tables grow to the longest row, and stay
    before = in_use()
    plan = qlorapp.plan(model, args=args, measure=True)
    assert in_use() == before
    planned = max(phase["allocated"] for name, phase in plan.phases.items() if name not in ("load", "merge"))
    assert 0.97 * plan.measured <= planned <= 1.05 * plan.measured
    assert "polyline" in plan.svg()


class Watch(transformers.TrainerCallback):
    """What the allocator has handed out and holds at the end of each step. Before it, 64 MiB are taken and given back."""

    def __init__(self):
        self.allocated, self.reserved = [], []

    def on_step_begin(self, args, state, control, **others):
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def on_step_end(self, args, state, control, **others):
        self.allocated.append(torch.cuda.memory_allocated())
        self.reserved.append(torch.cuda.memory_reserved())


def watched(folder, output, **options):
    in_use()  # nothing is cached
    watch = Watch()
    trainer = run(folder, output, "cuda", max_steps=3, callbacks=[watch], **options)
    assert in_cpp(trainer) and len(watch.reserved) == 3
    return watch, losses(trainer), next(trainer.model.parameters()).device.type


def test_an_embedding_on_the_host_leaves_the_gpu_and_changes_no_loss(folder, tmp_path, cuda):
    watched(folder, tmp_path)  # libraries take their workspaces
    held, expected, _ = watched(folder, tmp_path)
    less, found, after = watched(folder, tmp_path, embedding_on_host=True)
    assert len(expected) == 3 and found == expected and max(less.allocated) < min(held.allocated)
    assert after == "cuda"  # where scripts put what they generate from


def test_a_base_on_the_host_leaves_the_gpu_and_changes_no_loss(folder, tmp_path, cuda):
    watched(folder, tmp_path)
    held, expected, _ = watched(folder, tmp_path)
    less, found, after = watched(folder, tmp_path, base_on_host=True)
    assert len(expected) == 3 and found == expected and max(less.allocated) < min(held.allocated)
    assert after == "cuda"


def test_layers_that_a_device_map_leaves_on_the_host_compute_on_the_gpu(folder, tmp_path, cuda):
    """The same bits before, in and after two trainers."""
    ids = torch.arange(3, 19, device=cuda).view(2, 8)
    found = {}
    for place, device_map in (("gpu", {"": 0}), ("host", {"": 0, "model.layers": "cpu"})):
        model = adapted(base_model(folder, device_map=device_map, dtype=torch.float32))
        with torch.no_grad():
            tensors = [model(ids).logits for _ in range(2)]
        curves = []
        for number in range(2):
            options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "use_cpu": False}
            more = {"eval_dataset": rows(5)}
            trainer = trained(qlorapp.Trainer, folder, tmp_path / f"{place}-{number}", model=model, more=more, **options)
            assert in_cpp(trainer)
            curves.append(losses(trainer) + [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
        tensors.append(trainer.model.generate(input_ids=ids, max_new_tokens=4))
        found[place] = tensors, curves
    assert found["host"][1] == found["gpu"][1] and len(found["gpu"][1][0]) > 3
    assert all(torch.equal(mine, other) for mine, other in zip(found["host"][0], found["gpu"][0], strict=True))


def test_the_cache_is_given_back_as_often_as_asked(folder, tmp_path, cuda):
    kept, *_ = watched(folder, tmp_path)
    emptied, *_ = watched(folder, tmp_path, torch_empty_cache_steps=1)
    assert max(emptied.reserved) + (60 << 20) <= min(kept.reserved)
