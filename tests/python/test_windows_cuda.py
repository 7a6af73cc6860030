# SPDX-License-Identifier: Apache-2.0
"""Windows on a GPU: float16 with a loss scale, paged moments, a base on the host."""

import math

import pytest
import qlorapp
import torch
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import ByAutograd, adapted, adapters, assert_same_run, base_model, losses, trained

pytestmark = pytest.mark.usefixtures("cuda")


def on_gpu(folder, dtype=torch.float32):
    return {"model": adapted(base_model(folder, device_map="cuda", dtype=dtype)), "use_cpu": False, "max_steps": 6}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"max_grad_norm": 0.0}], ids=["kept", "checkpointed", "unclipped"]
)
def test_float32_learns_what_a_backward_pass_of_torch_gives(folder, tmp_path, options):
    theirs = trained(ByAutograd, folder, tmp_path / "theirs", **on_gpu(folder), **options)
    assert_same_run(trained(qlorapp.Trainer, folder, tmp_path / "ours", **on_gpu(folder), **options), theirs, 1e-4)


@pytest.mark.parametrize(
    "options",
    [{"base_on_host": True}, {"optim": "paged_adamw_32bit"}, {"worst_case_first": False}],
    ids=["base on host", "paged moments", "no worst case"],
)
def test_where_things_lie_changes_no_number(folder, tmp_path, options):
    plain = trained(qlorapp.Trainer, folder, tmp_path / "plain", **on_gpu(folder))
    other = trained(qlorapp.Trainer, folder, tmp_path / "other", **on_gpu(folder), **options)
    assert losses(other) == losses(plain)
    for name, value in adapters(plain).items():
        assert torch.equal(adapters(other)[name], value), name


def test_float16_steps_over_an_overflow_and_a_checkpoint_has_the_scale(folder, tmp_path):
    """The same overflows, scales and losses as torch's GradScaler under autograd."""

    def run(kind, output):
        options = {"fp16": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 2, "learning_rate": 1e-3}
        given = on_gpu(folder, torch.float16) | options
        for name, value in given["model"].named_parameters():
            if name.endswith("norm.weight"):
                value.data.mul_(40)  # gradients of the loss times 65,536 overflow
        return trained(kind, folder, tmp_path / output, **given)

    theirs, ours = run(ByAutograd, "theirs"), run(qlorapp.Trainer, "ours")
    scale = torch.load(tmp_path / "ours" / "checkpoint-2" / "scaler.pt")["scale"]
    assert scale == torch.load(tmp_path / "theirs" / "checkpoint-2" / "scaler.pt")["scale"] and scale < 65536
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-3)
    norms = [[entry["grad_norm"] for entry in trainer.state.log_history[:2]] for trainer in (ours, theirs)]
    assert all(math.isnan(first) for first, _ in norms) and norms[0][1] == pytest.approx(norms[1][1], rel=2e-2)
