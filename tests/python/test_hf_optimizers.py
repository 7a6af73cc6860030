# SPDX-License-Identifier: Apache-2.0
"""AdamW8bit as a torch optimizer: bitsandbytes' rule and state dict, and transformers' loop with optim=adamw_8bit."""

import copy
import pickle
import sys

import pytest
import qlorapp
import torch
import transformers
from qlorapp.optim import AdamW8bit, PagedAdamW8bit, PagedAdamW32bit
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import in_cpp, losses, trained

SHAPES = [(64, 96), (33,), (300, 20)]


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def run(optimizer, held, steps, seed=4):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in held:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW8bit])
def test_it_follows_bitsandbytes(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    mine, others = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    run(kind(mine, **options), mine, 20)
    run(bitsandbytes.optim.AdamW8bit(others, **options), others, 20)
    for one, other in zip(
        mine, others, strict=True
    ):  # 0.2 from the start; codes of values between two are rounded otherwise there
        assert float((one - other).abs().mean()) < 1e-4 and float((one - other).abs().max()) < 1e-2


def test_states_go_both_ways():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    mine, others = parameters(), parameters()
    own, theirs = AdamW8bit(mine, lr=1e-2), bitsandbytes.optim.AdamW8bit(others, lr=1e-2)
    run(own, mine, 5)
    theirs.load_state_dict(own.state_dict())
    with torch.no_grad():
        for one, other in zip(mine, others, strict=True):
            other.copy_(one)
    run(own, mine, 3, seed=5)
    run(theirs, others, 3, seed=5)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
    again = parameters()
    back = AdamW8bit(again, lr=1e-2)
    back.load_state_dict(theirs.state_dict())
    assert back.state[again[0]]["state1"].dtype == torch.uint8 and back.state[again[1]]["state1"].dtype == torch.float32


@pytest.mark.parametrize("through", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_bits(through):
    mine = parameters()
    own = AdamW8bit(mine, lr=1e-2, in_float32=mine[:1])
    run(own, mine, 5)
    other, copies = through((own, mine))
    copies.append(torch.nn.Parameter(torch.zeros(64, 96)))  # new ones begin as in the first
    other.add_param_group({"params": copies[-1:]})
    run(own, mine, 3, seed=5)
    run(other, copies[:3], 3, seed=5)
    assert all(torch.equal(*pair) for pair in zip(mine, copies, strict=False))
    run(other, copies[3:], 1)
    assert [other.state[one]["state1"].dtype for one in copies] == [torch.float32, torch.float32, torch.uint8, torch.uint8]
    assert other.state_dict()["state"].keys() == {0, 1, 2, 3}


def test_a_loaded_state_goes_on_with_the_same_bits():
    mine, again = parameters(), parameters()
    own = AdamW8bit(mine, lr=1e-2)
    run(own, mine, 5)
    other = AdamW8bit(again, lr=1e-2)
    other.load_state_dict(own.state_dict())
    with torch.no_grad():
        for one, other_one in zip(mine, again, strict=True):
            other_one.copy_(one)
    run(own, mine, 3, seed=5)
    run(other, again, 3, seed=5)
    assert all(torch.equal(*pair) for pair in zip(mine, again, strict=True))


def test_transformers_loop_needs_no_bitsandbytes(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    options = {"optim": "paged_adamw_8bit", "max_steps": 3}
    cpp = trained(qlorapp.Trainer, folder, tmp_path, **options)
    own = trained(
        type("Mine", (qlorapp.Trainer,), {"training_step": lambda *a, **k: transformers.Trainer.training_step(*a, **k)}),
        folder,
        tmp_path,
        **options,
    )
    assert in_cpp(cpp) and not in_cpp(own) and isinstance(own.optimizer.optimizer, PagedAdamW8bit)
    torch.testing.assert_close(torch.tensor(losses(cpp)), torch.tensor(losses(own)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_the_state_of_each_parameter_has_the_dtype_that_bitsandbytes_gives_it(folder, tmp_path, optim):
    """Embeddings and small parameters keep float32."""
    pytest.importorskip("bitsandbytes")
    kinds = []
    for kind in (qlorapp.Trainer, transformers.Trainer):
        lora = {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "down_proj"], "r": 32}
        trainer = trained(kind, folder, tmp_path, lora=lora, optim=optim, max_steps=1)
        assert kind is transformers.Trainer or not in_cpp(trainer)
        state = trainer.optimizer.optimizer.state
        kinds.append({
            name: [state[p][moment].dtype for moment in ("state1", "state2")] for name, p in trainer.model.named_parameters() if p in state
        })  # fmt: skip
    assert kinds[0] == kinds[1]
    (table,) = (dtypes for name, dtypes in kinds[0].items() if "embed_tokens" in name)
    assert table == [torch.float32] * 2
    assert any(torch.uint8 in dtypes for dtypes in kinds[0].values()) == (optim != "paged_adamw_32bit")


@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW32bit])
def test_parameters_of_16_bits_are_computed_in_float32_and_rounded_once(kind):
    half = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    whole = [torch.nn.Parameter(p.detach().float()) for p in half]
    generator = torch.Generator().manual_seed(4)
    for one, other in zip(whole, half, strict=True):
        other.grad = torch.randn(other.shape, generator=generator).bfloat16()
        one.grad = other.grad.float()
    kind(whole, lr=1e-2).step()
    kind(half, lr=1e-2).step()
    assert all(torch.equal(one.bfloat16(), other) for one, other in zip(whole, half, strict=True))


def test_adamw_in_32_bits_is_torchs():
    mine, others = parameters(), parameters()
    run(PagedAdamW32bit(mine, lr=1e-2, weight_decay=0.1), mine, 5)
    run(torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1, foreach=False), others, 5)
    assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))


@pytest.mark.parametrize("given", [{"is_paged": True}, {"optim_bits": 8}, {"amsgrad": True}])
def test_what_it_does_not_do_is_refused(given):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        AdamW8bit(parameters(), **given)
