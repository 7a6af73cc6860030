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


def leaves(*shapes):
    torch.manual_seed(21)
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("listed", [True, False])
def test_what_parameters_does_not_list_has_its_gradient(listed):
    w, v = leaves((16, 16), (16, 16))
    x = torch.randn(3, 16)

    def block(x):
        return (x @ w).tanh() @ v

    block(x).square().sum().backward()
    expected = [w.grad, v.grad]
    w.grad = v.grad = None
    checked = qlorapp.CheckpointedBlock(block, parameters=[w]) if listed else qlorapp.CheckpointedBlock(block)
    checked(x).square().sum().backward()
    assert torch.equal(w.grad, expected[0]) and torch.equal(v.grad, expected[1])


def test_hooks_run_once_and_grad_asks_for_any_tensor():
    w, x = leaves((16, 16), (3, 16))
    seen = []
    w.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    outside = x.tanh()  # a result of the outer graph, captured
    checked = qlorapp.CheckpointedBlock(lambda y: (y @ w).sin() + outside)
    y = checked(x * 2) + checked(x)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert w.grad is None and not seen
    y.sum().backward()
    assert len(seen) == 2
    plain_w, plain_x = (t.detach().requires_grad_() for t in (w, x))
    plain = (plain_x * 2 @ plain_w).sin() + (plain_x @ plain_w).sin() + 2 * plain_x.tanh()
    plain.sum().backward()
    assert torch.allclose(w.grad, 2 * plain_w.grad, atol=1e-5) and torch.allclose(dx, plain_x.grad, atol=1e-5)


def test_inside_an_autocast_region_no_gradient_is_lost():
    w, x = leaves((16, 16), (3, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = qlorapp.CheckpointedBlock(lambda y: y @ w)(x).float().sum() + (x @ w).float().sum()
        loss.backward()  # inside: the casts that the region caches are those of the forward pass
    assert torch.allclose(w.grad, 2 * x.detach().sum(0)[:, None].expand(16, 16), atol=0.1)


def test_a_block_that_changes_its_input_is_refused():
    with pytest.raises(ValueError, match="changed input 0 in place"):
        qlorapp.CheckpointedBlock(lambda x: x.add_(1) * torch.ones(4, requires_grad=True))(torch.randn(4))


def test_a_block_of_another_kind_the_second_time_is_refused():
    w, v = leaves((4, 4), (4, 5))
    calls = []
    checked = qlorapp.CheckpointedBlock(lambda x: x @ (v if calls.append(1) or len(calls) > 1 else w))
    with pytest.raises(RuntimeError, match=r"uses a tensor of shape \[4, 5\]"):
        checked(torch.randn(2, 4)).sum().backward()


def test_hooks_of_saved_tensors_see_the_inputs_alone():
    w, x = leaves((16, 16), (3, 16))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        y = qlorapp.CheckpointedBlock(lambda h: (h @ w).tanh())(x)
    assert packed == [x.shape]  # not what the first run saved and dropped
    y.sum().backward()
    got, w.grad, x.grad = w.grad, None, None
    (x @ w).tanh().sum().backward()
    assert torch.equal(got, w.grad)


def test_kept_outputs_of_lora_linear_layers_change_no_bit_and_spare_their_products():
    torch.manual_seed(0)
    layers = [
        qlorapp.LoraLinear(qlorapp.Quantizer().quantize(torch.randn(64, 64) / 8), r=4, lora_dropout=0.2) for _ in range(2)
    ]
    block = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    torch.nn.init.normal_(layers[0].lora_B)
    x = torch.randn(5, 64)

    def run(module):
        with torch.profiler.profile() as profile:
            found = gradients(block, module, x)
        return found, sum(event.count for event in profile.key_averages() if event.key.startswith("qlorapp::linear_4bit"))

    (plain, products), (again, more), (kept, spared) = map(
        run, [block, qlorapp.CheckpointedBlock(block), qlorapp.CheckpointedBlock(block, keep_linear_outputs=True)]
    )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain[1], again[1], kept[1], strict=True))
    assert more == products + 2 and spared == products
