# SPDX-License-Identifier: Apache-2.0
"""The four-bit rule, case by case of one table: bitsandbytes' codes and scales, the same bits everywhere."""

import json
import os
import subprocess
import sys

import pytest
import qlorapp
import torch
from conftest import BUILD
from four_bit_cases import (
    BLOCKS,
    BOOKS,
    CASES,
    DTYPES,
    NOT_FINITE,
    TYPES,
    codes_at_every_scale,
    digests,
    results,
    same,
    weights,
)

try:
    from bitsandbytes import functional as peer
except ImportError:
    peer = None
ops = torch.ops.qlorapp

of_peer_too = pytest.mark.skipif(peer is None, reason="bitsandbytes is not installed")
of_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
EVERYWHERE = ["cpu", pytest.param("cuda", marks=of_gpu)]
on_each_device = pytest.mark.parametrize("device", EVERYWHERE)


def of_table(function):
    for name, values in (("dtype", DTYPES), ("quant_type", TYPES), ("case", CASES)):
        function = pytest.mark.parametrize(name, values)(function)
    return function


@pytest.fixture(autouse=True, scope="module")
def _peer_is_not_compiled():
    """Its default backend, of odd shapes, takes ten seconds to compile."""
    with torch.compiler.set_stance("force_eager"):
        yield


def of_peer(weight, block_size, quant_type):
    return torch.ops.bitsandbytes.quantize_4bit.default(weight, block_size, quant_type, torch.uint8)


def values_of(packed, scales, shape, block_size, quant_type, dtype):
    """round(fp32 code * fp32 scale) over the flattened blocks: the definition, not the peer's kernel."""
    n = torch.Size(shape).numel()
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[:n].long()
    book = torch.tensor(BOOKS[quant_type])
    return (book[codes] * scales.repeat_interleave(block_size)[:n]).to(dtype).view(shape)


# --- four bits


@of_peer_too
@of_table
def test_codes_and_scales_are_bitsandbytes_and_values_the_definition(case, quant_type, dtype):
    for weight, block_size in weights(case, quant_type, dtype):
        packed, absmax = of_peer(weight, block_size, quant_type)
        for quantize in (ops.quantize_4bit, ops.quantize_4bit_bnb):
            found = quantize(weight, block_size, quant_type)
            assert same(found[0], packed), f"{(found[0] != packed).sum()} bytes differ"
            assert same(found[1], absmax) and found[0].shape == ((weight.numel() + 1) // 2, 1)
        for out in (*DTYPES, torch.float64):
            got = ops.dequantize_4bit(packed, absmax, list(weight.shape), block_size, quant_type, out)
            assert torch.equal(got, values_of(packed, absmax, weight.shape, block_size, quant_type, out))
            assert got.isfinite().all() or out != torch.float32


def test_every_instruction_set_gives_the_same_bits():
    environment = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "four_bit_cases.py")]
    others = [
        subprocess.Popen(command, env={**environment, "QLORAPP_CPU_ISA": isa}, stdout=subprocess.PIPE, text=True)
        for isa in ("scalar", "avx2")
    ]
    own = digests()
    for other in others:
        assert json.loads(other.communicate(timeout=300)[0]) == own


@of_gpu
@of_table
def test_a_gpu_gives_the_bits_of_the_cpu(case, quant_type, dtype):
    on_cpu = results(case, quant_type, dtype)
    for weight, block_size in weights(case, quant_type, dtype):
        packed, absmax = ops.quantize_4bit(weight.cuda(), block_size, quant_type)
        assert same(packed, next(on_cpu)) and same(absmax, next(on_cpu))
        for out in (*DTYPES, torch.float64):
            got = ops.dequantize_4bit(packed, absmax, list(weight.shape), block_size, quant_type, out)
            assert same(got, next(on_cpu))


@of_peer_too
@of_gpu
@of_table
def test_compat_on_a_gpu_is_bitsandbytes_cuda_build(case, quant_type, dtype):
    """Which differs from its CPU build near midpoints and at zero blocks."""
    for weight, block_size in weights(case, quant_type, dtype):
        weight = weight.cuda().contiguous()
        (packed, absmax), found = of_peer(weight, block_size, quant_type), ops.quantize_4bit_bnb(weight, block_size, quant_type)
        assert same(found[0], packed) and same(found[1], absmax)
        if block_size == 64 and weight.dim() == 2 and weight.shape[1] % 64 == 0:
            _, state = peer.quantize_4bit(weight, blocksize=block_size, quant_type=quant_type)
            values = ops.dequantize_4bit(packed, absmax, list(weight.shape), block_size, quant_type, dtype)
            assert torch.equal(values, peer.dequantize_4bit(packed, state))  # FP4's second zero is -0 there


@pytest.mark.parametrize("quant_type", TYPES)
def test_a_tie_goes_to_the_lower_entry_and_one_ulp_above_it_to_the_upper_one(quant_type):
    full, short = (
        weight for (weight, _), _ in zip(weights("all midpoints", quant_type, torch.float32), range(2), strict=False)
    )
    book = torch.tensor(BOOKS[quant_type]).sort().values
    for weight in (full[:1], short):  # of absmax 1
        packed = ops.quantize_4bit(weight, 64, quant_type)[0].flatten()
        values = torch.tensor(BOOKS[quant_type])[torch.stack([packed >> 4, packed & 15], 1).flatten().long()]
        assert torch.equal(values[1:46:3], book[:-1]) and torch.equal(values[2:46:3], book[1:])
        assert torch.equal(values[3:46:3], book[:-1])


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("out", [*DTYPES, torch.float64])
def test_every_code_has_its_value_at_every_scale(quant_type, out):
    packed, absmax = codes_at_every_scale()
    got = ops.dequantize_4bit(packed, absmax, [len(absmax), 32], 32, quant_type, out)
    expected = values_of(packed, absmax, got.shape, 32, quant_type, out)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(0), expected.nan_to_num(0))


@of_peer_too
@on_each_device
@pytest.mark.parametrize("quant_type,byte", [("nf4", 0x77), ("fp4", 0x00)])
def test_zero_blocks(device, quant_type, byte):
    weight = torch.zeros(64 * 2 + 10, device=device)
    weight[64:128] = -0.0
    packed, absmax = ops.quantize_4bit(weight, 64, quant_type)
    assert (packed == byte).all() and same(absmax, torch.zeros(3))
    compat, (theirs, theirs_absmax) = ops.quantize_4bit_bnb(weight, 64, quant_type), of_peer(weight, 64, quant_type)
    assert same(compat[0], theirs) and same(compat[1], theirs_absmax)
    if device == "cpu":
        assert compat[1][2] > 0  # 1e-38, which only the compat form keeps


@on_each_device
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("block_size", [32, 64, 4096])
def test_the_default_refuses_what_is_not_finite_and_names_the_first(device, value, block_size):
    for dtype in DTYPES:
        weight = torch.randn(300, 70).to(dtype)
        weight[291, 3] = weight[20, 69] = value
        where = rf"must be finite; got -?(nan|inf) at flat index {20 * 70 + 69}\."
        with pytest.raises(ValueError, match=rf"quantize_4bit\] weight {where}"):
            ops.quantize_4bit(weight.to(device), block_size)
        with pytest.raises(ValueError, match=f"x {where}"):
            ops.quantize_blockwise(weight.float().to(device))


@of_peer_too
@on_each_device
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_compat_follows_the_peer_where_it_is_unsound(device, value, quant_type):
    for n, at in ((256, 70), (200, 199), (65, 64), (1, 0), (8192, 5000)):
        weight = torch.randn(n)
        weight[at] = value
        weight = weight.to(device)
        (packed, absmax), found = of_peer(weight, 64, quant_type), ops.quantize_4bit_bnb(weight, 64, quant_type)
        assert same(found[0], packed) and torch.equal(found[1].nan_to_num(7.0, 8.0, 9.0), absmax.nan_to_num(7.0, 8.0, 9.0))


def test_empty_weights_have_no_bytes():
    packed, absmax = ops.quantize_4bit(torch.empty(0, 8))
    assert packed.shape == (0, 1) and absmax.shape == (0,)
    assert ops.dequantize_4bit(packed, absmax, [0, 8], 64, "nf4", torch.float32).shape == (0, 8)
    packed, absmax = ops.quantize_4bit(torch.tensor(-3.0))
    assert ops.dequantize_4bit(packed, absmax, [], 64, "nf4", torch.float32) == -3.0


# --- double quantization


def nested(absmax, block_size=256, quantize=ops.quantize_blockwise):
    offset = absmax.mean()
    codes, nested_absmax = quantize(absmax - offset, block_size)
    return codes, nested_absmax, offset


@of_peer_too
@on_each_device
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (17, 352), (512, 300), (3, 5)])
def test_double_quantization_is_bitsandbytes_in_compat(device, quant_type, dtype, shape):
    weight = (torch.randn(shape) * 0.02).to(device, dtype)
    packed, state = peer.quantize_4bit(weight, compress_statistics=True, quant_type=quant_type)
    found, absmax = ops.quantize_4bit_bnb(weight, 64, quant_type)
    codes, nested_absmax, offset = nested(absmax, quantize=ops.quantize_blockwise_bnb)
    assert same(found, packed) and same(codes, state.absmax) and same(nested_absmax, state.state2.absmax)
    assert same(offset, state.offset)
    scales = (peer.dequantize_blockwise(state.absmax, state.state2) + state.offset).cpu()
    for out in DTYPES:
        got = ops.dequantize_4bit_nested(packed, codes, nested_absmax, offset, list(shape), 64, 256, quant_type, out)
        assert torch.equal(got.cpu(), values_of(packed.cpu(), scales, shape, 64, quant_type, out))
        if shape[1] % 64 == 0:  # elsewhere its AVX-512 kernel reads another block's scale
            state.dtype = out
            assert torch.equal(got, peer.dequantize_4bit(packed, state))


@of_gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_values_of_nested_scales_are_those_of_the_cpu(quant_type, block_size):
    for weight, block in weights("lengths around a block", quant_type, torch.float32):
        if block != block_size:
            continue
        packed, absmax = ops.quantize_4bit(weight, block, quant_type)
        for nested_block in (256, 3):
            parts = packed, *nested(absmax, nested_block)
            for out in DTYPES:
                more = (list(weight.shape), block, nested_block, quant_type, out)
                assert same(
                    ops.dequantize_4bit_nested(*(part.cuda() for part in parts), *more),
                    ops.dequantize_4bit_nested(*parts, *more),
                )


# --- qlorapp.Quantizer


@of_peer_too
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", TYPES)
def test_a_quantizer_makes_bitsandbytes_tensors(quant_type, double_quant):
    for weight, block_size in weights("any strides", quant_type, torch.bfloat16):
        packed, state = peer.quantize_4bit(
            weight.contiguous(), blocksize=block_size, quant_type=quant_type, compress_statistics=double_quant
        )
        ours = qlorapp.Quantizer(quant_type, block_size, double_quant=double_quant, compat="bnb")
        q = ours.quantize(weight)
        assert same(q.packed, packed) and same(q.absmax, state.absmax) and q.double_quant == double_quant
        if double_quant:
            assert same(q.nested_absmax, state.state2.absmax) and torch.allclose(q.nested_offset, state.offset, rtol=1e-6)
            plain = qlorapp.Quantizer(quant_type, block_size).quantize(weight)
            assert same(plain.packed, packed) and (plain.absmax != state.absmax).sum() <= max(1, 0.05 * state.absmax.numel())
        else:
            assert q.nested_absmax is None and q.nbytes == packed.numel() + 4 * state.absmax.numel()
            assert torch.equal(
                ours.dequantize(q), values_of(packed, state.absmax, weight.shape, block_size, quant_type, weight.dtype)
            )
        assert (q.shape, q.dtype, q.block_size, q.quant_type) == (tuple(weight.shape), weight.dtype, block_size, quant_type)


def test_a_quantizer_refuses_what_it_cannot_do():
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
