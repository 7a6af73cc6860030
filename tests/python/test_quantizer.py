# SPDX-License-Identifier: Apache-2.0
"""qlorapp.Quantizer and the installed bitsandbytes make the same bytes."""

import bitsandbytes.functional as bnb
import pytest
import qlorapp
import torch


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, block_size", [((64, 256), 64), ((7, 33), 128), ((130, 64), 32)])
def test_codes_scales_and_values_are_bitsandbytes(quant_type, dtype, shape, block_size):
    torch.manual_seed(1)
    weight = torch.randn(shape).to(dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type=quant_type)
    ours = qlorapp.Quantizer(quant_type, block_size, double_quant=False)
    q = ours.quantize(weight)
    assert torch.equal(q.packed, packed) and torch.equal(q.absmax, state.absmax)
    assert torch.equal(ours.dequantize(q), bnb.dequantize_4bit(packed, state))
    assert (q.shape, q.dtype, q.block_size, q.quant_type) == (tuple(shape), dtype, block_size, quant_type)
    assert q.nested_absmax is None and not q.double_quant
    assert q.nbytes == packed.numel() + 4 * state.absmax.numel()


def test_nested_codes_are_bitsandbytes_when_asked():
    torch.manual_seed(2)
    weight = torch.randn(256, 320)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    q = qlorapp.Quantizer(compat="bnb").quantize(weight)
    assert torch.equal(q.packed, packed) and torch.equal(q.absmax, state.absmax)
    assert torch.equal(q.nested_absmax, state.state2.absmax)
    assert torch.allclose(q.nested_offset, state.offset, rtol=1e-6)
    nearest = qlorapp.Quantizer().quantize(weight)
    assert torch.equal(nearest.packed, packed)
    assert (nearest.absmax != state.absmax).sum() < 0.05 * state.absmax.numel()


def test_what_is_not_finite_is_refused():
    weight = torch.ones(64, 64)
    weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        qlorapp.Quantizer().quantize(weight)
    with pytest.raises(ValueError, match="compat"):
        qlorapp.Quantizer(compat="peft")
    assert "nf4" in repr(qlorapp.Quantizer().quantize(torch.ones(64, 64)))


def test_a_four_bit_product_has_the_gradient_of_the_dense_one():
    torch.manual_seed(3)
    quantizer = qlorapp.Quantizer()
    q = quantizer.quantize(torch.randn(48, 64))
    dense = quantizer.dequantize(q, torch.float64)
    x = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
    y = q.linear(x)
    assert torch.allclose(y, x @ dense.T)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(gradient, 2 * (x @ dense.T) @ dense)
