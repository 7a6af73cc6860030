# SPDX-License-Identifier: Apache-2.0
"""Operands of eight-bit products against torch's own float8 type, and a GPU's against the CPU's."""

import math

import pytest
import torch

ops = torch.ops.qlorapp
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(rows, columns, block_size, nested, seed=0):
    """Lists as the operators take them, for weights of as many columns, and the dense stack."""
    lists, dense = ([], [], [], []), []
    for i, height in enumerate(rows):
        weight = randn(height, columns, seed=seed + i) * (0.02 + 0.01 * i)
        packed, absmax = ops.quantize_4bit(weight, block_size, "nf4")
        dense.append(ops.dequantize_4bit(packed, absmax, [height, columns], block_size, "nf4", torch.float32))
        lists[0].append(packed)
        if nested:
            offset = absmax.mean()
            codes, scales = ops.quantize_blockwise(absmax - offset, 256)
            lists[1].append(codes)
            lists[2].append(scales)
            lists[3].append(offset)
            dense[-1] = ops.dequantize_4bit_nested(
                packed, codes, scales, offset, [height, columns], block_size, 256, "nf4", torch.float32
            )
        else:
            lists[1].append(absmax)
    return lists, torch.cat(dense)


def device_of(lists, device):
    return tuple([t.to(device) for t in part] for part in lists)


WEIGHTS = [([64], 64, 32, False), ([128], 192, 64, True), ([192, 64, 64], 320, 64, True), ([256, 64], 1024, 1024, False)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("rows", "columns", "block_size", "nested"), WEIGHTS)
def test_weights_are_rounded_once_as_torch_rounds(rows, columns, block_size, nested, transpose):
    lists, dense = quantized(rows, columns, block_size, nested)
    scale = dense.abs().max() / LARGEST
    got = ops.dequantize_4bit_float8(*lists, rows, columns, block_size, 256, "nf4", scale, transpose)
    want = (dense * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)
    assert got.dtype == E4M3 and got.shape == ((columns, sum(rows)) if transpose else (sum(rows), columns))
    assert torch.equal(got.view(torch.uint8), (want.t().contiguous() if transpose else want).view(torch.uint8))
    error = (got.float() * scale - (dense.t() if transpose else dense)).norm() / dense.norm()
    assert 5e-3 < error < 4e-2  # three mantissa bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_a_scale_each(dtype):
    x = randn(7, 160, dtype=dtype)
    x[2] = 0
    x[3] *= 1e-3
    if dtype != torch.float16:
        x[2, 5] = 1e-37  # as good as zero; 448 / 1e-37 is no float32
    weight_scale = torch.tensor(0.5)
    values, scale = ops.quantize_rows_float8(x, weight_scale)
    assert values.dtype == E4M3 and values.shape == x.shape and scale.shape == (7, 1)
    largest = x.float().abs().amax(1, keepdim=True)
    assert torch.equal(scale[2], torch.tensor([0.5])) and values[2].float().abs().max() == 0
    rest = [0, 1, 3, 4, 5, 6]
    assert torch.equal(scale[rest], largest[rest] / LARGEST * 0.5)
    assert (values.float().abs().amax(1)[rest] == LARGEST).all()
    error = (values.float() * scale * 2 - x.float()).norm(dim=1) / x.float().norm(dim=1).clamp(min=1e-30)
    assert (error < 4e-2).all()
    plain, _ = ops.quantize_rows_float8(x)
    assert torch.equal(plain.view(torch.uint8), values.view(torch.uint8))


def test_the_product_is_scaled_by_rows():
    x, w = randn(33, 128), randn(64, 128, seed=1)
    values, scale = ops.quantize_rows_float8(x, torch.tensor(0.25))
    w8 = (w / w.abs().max() * LARGEST).to(E4M3)
    y = torch.full((33, 80), math.nan, dtype=torch.bfloat16)
    ops.float8_product_out(y[:, :64], values, scale, w8, torch.ones(64))
    want = (values.double() @ w8.double().t()) * scale.double()
    assert (y[:, :64].double() - want).abs().max() <= 2**-8 * want.abs().max()
    assert y[:, 64:].isnan().all()


def test_arguments_that_break_a_rule_are_named():
    lists, _ = quantized([64], 64, 64, False)
    with pytest.raises(ValueError, match=r"columns must be a multiple of 64; got 32"):
        ops.dequantize_4bit_float8(*lists, [128], 32, 64, 256, "nf4", torch.tensor(1.0), False)
    with pytest.raises(ValueError, match=r"rows must be multiples of 64"):
        ops.dequantize_4bit_float8(*lists, [32], 128, 64, 256, "nf4", torch.tensor(1.0), False)
    with pytest.raises(ValueError, match=r"weight_scale must be one float32"):
        ops.dequantize_4bit_float8(*lists, [64], 64, 64, 256, "nf4", torch.ones(2), False)
    with pytest.raises(ValueError, match=r"K a multiple of 16"):
        ops.quantize_rows_float8(torch.zeros(2, 24))
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        ops.float8_product_out(torch.zeros(2, 2), torch.zeros(2, 16), torch.ones(2, 1), torch.zeros(2, 16), torch.ones(2))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("rows", "columns", "block_size", "nested"), [*WEIGHTS, ([4096, 1024, 1024], 4096, 64, True)])
def test_weights_have_the_cpus_bits_on_a_gpu(rows, columns, block_size, nested, transpose):
    lists, dense = quantized(rows, columns, block_size, nested)
    scale = dense.abs().max() / LARGEST
    want = ops.dequantize_4bit_float8(*lists, rows, columns, block_size, 256, "nf4", scale, transpose)
    there = device_of(lists, "cuda")
    got = ops.dequantize_4bit_float8(*there, rows, columns, block_size, 256, "nf4", scale.cuda(), transpose)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "spare"), [(16, 0), (160, 3), (4096, 64), (6144, 0), (14336, 64), (28672, 0), (32768, 1)])
def test_rows_have_the_cpus_bits_on_a_gpu(dtype, width, spare):
    x = randn(9, width, dtype=dtype)
    x[4] = 0
    wide = torch.full((9, width + spare), math.nan, dtype=dtype, device="cuda")
    wide[:, :width] = x.cuda()
    factor = torch.tensor(0.3)
    values, scale = ops.quantize_rows_float8(x, factor)
    there, scale_there = ops.quantize_rows_float8(wide[:, :width], factor.cuda())
    assert torch.equal(there.cpu().view(torch.uint8), values.view(torch.uint8)) and torch.equal(scale_there.cpu(), scale)
    wide[1, 3] = math.nan
    assert ops.quantize_rows_float8(wide[:, :width])[1].isnan().flatten().tolist() == [i == 1 for i in range(9)]


@pytest.mark.usefixtures("cuda")
def test_the_product_writes_rows_that_are_apart_on_a_gpu():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no eight bits")
    x, w = randn(100, 256, dtype=torch.bfloat16).cuda(), randn(192, 256, seed=1).cuda()
    values, scale = ops.quantize_rows_float8(x)
    w8 = (w / w.abs().max() * LARGEST).to(E4M3)
    y = torch.full((100, 256), math.nan, dtype=torch.bfloat16, device="cuda")
    ops.float8_product_out(y[:, :192], values, scale, w8, torch.ones(300, device="cuda"))
    want = (values.double() @ w8.double().t()) * scale.double()
    assert (y[:, :192].double() - want).abs().max() <= 2**-7 * want.abs().max()
    assert y[:, 192:].isnan().all()
