# SPDX-License-Identifier: Apache-2.0
"""qlorapp.CheckpointedBlock around torch modules: bit-equal gradients, one recompute, random state restored."""

import pytest
import qlorapp
import torch


class Counting(torch.nn.Module):
    """A block with dropout that counts its calls."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 16))
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + scale * self.net(x)


def gradients(module, block, x, **kwargs):
    torch.manual_seed(11)
    module.zero_grad()
    y = block(x, **kwargs)
    y.square().sum().backward()
    after = torch.rand(3)
    found = [p.grad.clone() for p in module.parameters()]
    return y.detach(), found, x.grad.clone() if x.requires_grad else None, after


@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_gradients_are_bit_equal_with_dropout(input_needs_gradient):
    module = Counting()
    x = torch.randn(5, 16, requires_grad=input_needs_gradient)
    plain = gradients(module, module, x, scale=0.5)
    assert module.calls == 1
    if input_needs_gradient:
        x.grad = None
    checked = gradients(module, qlorapp.CheckpointedBlock(module), x, scale=0.5)
    assert module.calls == 3  # once forward, once again in backward
    assert torch.equal(plain[0], checked[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], checked[1], strict=True))
    if input_needs_gradient:
        assert torch.equal(plain[2], checked[2])
    assert torch.equal(plain[3], checked[3])  # the recompute leaves the generator where it was


def test_nested_blocks_and_several_outputs():
    first, second = Counting(1), Counting(2)

    class Pair(torch.nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.first, self.second = wrap(first), wrap(second)

        def forward(self, x):
            y = self.second(self.first(x))  # not `first`'s output itself: sums of three gradients depend on their order
            return y.tanh(), y

    def run(module):
        torch.manual_seed(12)
        module.zero_grad()
        bounded, y = module(x)
        (bounded.sum() + y.square().sum()).backward()
        return [p.grad.clone() for p in (*first.parameters(), *second.parameters())]

    x = torch.randn(4, 16)
    plain = run(Pair(lambda block: block))
    nested = run(qlorapp.CheckpointedBlock(Pair(qlorapp.CheckpointedBlock)))
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))


def test_a_function_with_its_parameters_and_without_a_graph():
    weight = torch.randn(16, 16, requires_grad=True)
    calls = []

    def block(x):
        calls.append(1)
        return torch.tanh(x @ weight)

    checked = qlorapp.CheckpointedBlock(block, parameters=[weight])
    x = torch.randn(3, 16)
    checked(x).sum().backward()
    got, weight.grad = weight.grad, None
    block(x).sum().backward()
    assert torch.equal(got, weight.grad) and len(calls) == 3
    with torch.no_grad():
        assert not checked(x).requires_grad
    assert len(calls) == 4


def test_an_error_in_the_recompute_reaches_the_caller():
    module = Counting()

    class Once(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            if module.calls:
                raise LookupError("second time")
            return module(x)

    loss = qlorapp.CheckpointedBlock(Once())(torch.randn(2, 16)).sum()
    with pytest.raises(LookupError, match="second time"):
        loss.backward()


def test_the_graph_frees_the_block():
    import gc
    import weakref

    module = Counting()
    seen = weakref.ref(module)
    loss = qlorapp.CheckpointedBlock(module)(torch.randn(2, 16)).sum()
    loss.backward()
    del module, loss
    gc.collect()
    assert seen() is None
