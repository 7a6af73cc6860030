# SPDX-License-Identifier: Apache-2.0
"""qlorapp.LoraLinear as a torch module, against dense double precision."""

import pytest
import qlorapp
import torch


def dense_twin(layer, dense, x, dy):
    """y and the gradients of x, A and B in double precision by autograd."""
    x, a, b = (t.detach().double().requires_grad_() for t in (x, layer.lora_A, layer.lora_B))
    y = x @ dense.double().T + layer.scaling * (x @ a.T) @ b.T
    return y, torch.autograd.grad(y, (x, a, b), dy.double())


@pytest.mark.parametrize("four_bit", [True, False])
@pytest.mark.parametrize("use_rslora", [True, False])
def test_values_and_gradients_are_the_dense_ones(four_bit, use_rslora):
    torch.manual_seed(1)
    weight = torch.randn(48, 64) / 8
    quantizer = qlorapp.Quantizer()
    base = quantizer.quantize(weight) if four_bit else torch.nn.Linear(64, 48, bias=False)
    if not four_bit:
        base.weight.data = weight
    layer = qlorapp.LoraLinear(base, r=4, lora_alpha=8, use_rslora=use_rslora)
    assert layer.scaling == (8 / 2 if use_rslora else 8 / 4)
    with torch.no_grad():
        layer.lora_B.normal_()
    dense = quantizer.dequantize(base) if four_bit else weight
    x, dy = torch.randn(3, 5, 64, requires_grad=True), torch.randn(3, 5, 48)
    y = layer(x)
    y.backward(dy)
    expected, gradients = dense_twin(layer, dense, x, dy)
    assert torch.allclose(y.double(), expected, atol=1e-5)
    for got, wanted in zip((x.grad, layer.lora_A.grad, layer.lora_B.grad), gradients, strict=True):
        assert torch.linalg.norm(got - wanted) <= 2e-6 * torch.linalg.norm(wanted)


def test_it_is_a_module_that_trains_with_any_torch_optimizer():
    torch.manual_seed(2)
    layer = qlorapp.LoraLinear(qlorapp.Quantizer().quantize(torch.randn(32, 64)), r=8, lora_alpha=16)
    assert [name for name, _ in layer.named_parameters()] == ["lora_A", "lora_B"]
    assert layer.lora_A.abs().max() <= 1 / 8 and layer.lora_B.abs().max() == 0
    x, target = torch.randn(40, 64), torch.randn(40, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_dropout_follows_the_modules_mode_and_torchs_seed():
    layer = qlorapp.LoraLinear(torch.zeros(16, 64), r=4, lora_dropout=0.5)
    with torch.no_grad():
        layer.lora_B.fill_(1)
    x = torch.randn(6, 64)

    def run(seed):
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


def test_unmerging_gives_back_the_very_codes():
    torch.manual_seed(4)
    quantizer = qlorapp.Quantizer()
    q = quantizer.quantize(torch.randn(64, 64))
    layer = qlorapp.LoraLinear(q, r=4, seed=7)
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(9, 64)
    before = layer(x)
    layer.merge()
    assert layer.merged and torch.allclose(layer(x), before, atol=1e-4)
    layer.unmerge()
    assert not layer.merged and torch.equal(layer(x), before)
    with pytest.raises(ValueError, match="not merged"):
        layer.unmerge()


@pytest.mark.parametrize("wrong", [{"r": 0}, {"lora_alpha": -1}, {"lora_dropout": 1.0}, {"init_lora_weights": "pissa"}])
def test_options_outside_their_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        qlorapp.LoraLinear(torch.zeros(8, 8), **wrong)


@pytest.mark.parametrize(
    ("base", "bias", "message"),
    [
        (torch.zeros(8), None, r"shape \(out, in\), both at least 1; got \[8\]"),
        (torch.zeros(2, 4, 8), None, r"got \[2, 4, 8\]"),
        (torch.zeros(8, 16, dtype=torch.uint8), None, "dense base must be floating; got Byte"),
        (torch.zeros(8, 16), torch.zeros(16), r"bias must have the shape \[8\]; got \[16\]"),
    ],
)
def test_a_base_or_bias_of_another_kind_is_refused_at_construction(base, bias, message):
    with pytest.raises(ValueError, match=message):
        qlorapp.LoraLinear(base, r=2, bias=bias)


def test_an_input_of_another_dtype_than_the_dense_base_is_refused_by_name():
    layer = qlorapp.LoraLinear(torch.zeros(8, 16, dtype=torch.bfloat16), r=2)
    with pytest.raises(ValueError, match="dtype of the dense weight, BFloat16; got Float"):
        layer(torch.zeros(3, 16))
