# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights against the installed bitsandbytes (its CPU build), bit for bit."""

import numpy as np
import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes import functional as peer  # noqa: E402

ops = torch.ops.qlorapp
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPES = ["nf4", "fp4"]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]


def peer_quantize(weight, block_size, quant_type):
    return torch.ops.bitsandbytes.quantize_4bit.default(weight, block_size, quant_type, torch.uint8)


def assert_same_codes(weight, block_size=64, quant_type="nf4", op=ops.quantize_4bit):
    packed, absmax = op(weight, block_size, quant_type)
    peer_packed, peer_absmax = peer_quantize(weight, block_size, quant_type)
    assert torch.equal(packed, peer_packed), f"{(packed != peer_packed).sum()} bytes differ"
    assert torch.equal(absmax.view(torch.int32), peer_absmax.view(torch.int32))
    return packed, absmax


def expected_values(packed, scales, shape, block_size, quant_type, dtype):
    """round(fp32 code * fp32 scale) over the flattened blocks: the definition, not the peer's kernel."""
    n = int(np.prod(shape))
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[:n].long()
    book = peer.get_4bit_type(quant_type, device="cpu")
    return (book[codes] * scales.repeat_interleave(block_size)[:n]).to(dtype).view(shape)


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_absmax_and_values_at_awkward_shapes(dtype, block_size, quant_type):
    generator = torch.Generator().manual_seed(block_size)
    shapes = [(1,), (2,), (31,), (33, 7), (block_size - 1,), (block_size + 1,), (3, block_size), (40, 352), (5, 3, 77)]
    for shape in shapes:
        weight = (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        packed, absmax = assert_same_codes(weight, block_size, quant_type)
        assert packed.shape == ((weight.numel() + 1) // 2, 1)
        for out in (*DTYPES, torch.float64):
            got = ops.dequantize_4bit(packed, absmax, list(shape), block_size, quant_type, out)
            assert torch.equal(got, expected_values(packed, absmax, shape, block_size, quant_type, out))


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_16_bit_value_against_several_absmax(dtype, quant_type):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    values = values[values.isfinite()]
    values = torch.cat([values, values.new_zeros(-values.numel() % 63)]).view(-1, 63)
    limits = torch.finfo(dtype)
    for anchor in (limits.max, 1.0, 0.0173, 3e-4, limits.smallest_normal * 2, limits.smallest_normal / 64):
        largest = torch.full((values.shape[0], 1), anchor, dtype=dtype)
        below = torch.where(values.abs() <= largest, values, torch.zeros_like(values))
        assert_same_codes(torch.cat([below, largest], 1), 64, quant_type)
    assert_same_codes(
        values.flatten()[: values.numel() // 64 * 64 - 64], 64, quant_type
    )  # blocks of neighbors, down to all-subnormal ones


@pytest.mark.parametrize("quant_type", TYPES)
def test_ties_at_all_midpoints_and_their_neighbors(quant_type):
    book = np.sort(peer.get_4bit_type(quant_type, device="cpu").numpy())
    midpoints = (book[1:] + book[:-1]) / np.float32(2)
    generator = np.random.default_rng(0)
    absmax = np.concatenate([[1, 2, 0.5, 2**-30, 3e38, 1.1754944e-38], generator.uniform(1e-3, 10, 3000)]).astype(np.float32)
    columns = [absmax]
    with np.errstate(over="ignore"):
        for midpoint in midpoints:
            tie = midpoint * absmax
            columns += [tie, np.nextafter(tie, np.float32(np.inf)), np.nextafter(tie, np.float32(-np.inf))]
    rows = np.stack(columns, 1)
    weight = torch.from_numpy(np.concatenate([rows, np.zeros((rows.shape[0], 64 - rows.shape[1]), np.float32)], 1))
    packed, _ = assert_same_codes(weight, 64, quant_type)
    # The rule itself, at absmax 1: a tie goes to the lower entry, one ulp above it to the upper one.
    first = packed[:32].flatten()
    codes = torch.stack([first >> 4, first & 15], 1).flatten()
    values = peer.get_4bit_type(quant_type, device="cpu")[codes.long()].numpy()
    np.testing.assert_array_equal(values[1:46:3], book[:-1])
    np.testing.assert_array_equal(values[2:46:3], book[1:])
    np.testing.assert_array_equal(values[3:46:3], book[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_last_blocks_divide_where_full_ones_multiply(dtype):
    generator = torch.Generator().manual_seed(3)
    for n in (63, 100, 4095):
        for _ in range(20):
            assert_same_codes((torch.randn(n, generator=generator) * 0.7).to(dtype), 64 if n < 4000 else 4096)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_are_read(dtype):
    base = torch.randn(96, 130).to(dtype)
    for weight in (base.t(), base[:, 3:99], base[::2, 1::3], base[0].expand(7, 130), base.flip(0), base.flatten()[1:]):
        assert_same_codes(weight, 64)


@pytest.mark.parametrize("quant_type", TYPES)
def test_magnitudes_from_subnormal_to_the_largest(quant_type):
    generator = torch.Generator().manual_seed(5)
    for scale in (1e-44, 1e-40, 1e-38, 1e-37, 2.0**-126, 1e-20, 1e20, 2.0**126, 3.4e38):
        weight = torch.randn(4, 64, generator=generator)
        weight = weight / weight.abs().amax(1, keepdim=True) * scale
        packed, absmax = assert_same_codes(weight, 64, quant_type)
        assert ops.dequantize_4bit(packed, absmax, [4, 64], 64, quant_type, torch.float32).isfinite().all()
    mixed = torch.randn(64, 64, generator=generator)
    mixed[::3] *= 1e-30
    mixed[:, 0] *= 1e8
    assert_same_codes(mixed, 64, quant_type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (17, 352), (512, 300), (3, 5)])
def test_double_quantization_equals_the_peer_in_compat(dtype, shape):
    weight = (torch.randn(shape) * 0.02).to(dtype)
    peer_packed, state = peer.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    packed, absmax = ops.quantize_4bit_bnb(weight)
    offset = absmax.mean()
    codes, nested_absmax = ops.quantize_blockwise_bnb(absmax - offset)
    assert torch.equal(packed, peer_packed)
    assert torch.equal(codes, state.absmax)
    assert torch.equal(nested_absmax, state.state2.absmax)
    assert torch.equal(offset, state.offset)
    scales = peer.dequantize_blockwise(state.absmax, state.state2) + state.offset
    for out in DTYPES:
        got = ops.dequantize_4bit_nested(packed, codes, nested_absmax, offset, list(shape), 64, 256, "nf4", out)
        assert torch.equal(got, expected_values(packed, scales, shape, 64, "nf4", out))
        if shape[1] % 64 == 0:  # elsewhere its AVX-512 kernel reads another block's scale
            state.dtype = out
            assert torch.equal(got, peer.dequantize_4bit(peer_packed, state))


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_compat_follows_the_peer_where_it_is_unsound(value, quant_type):
    for n, at in ((256, 70), (200, 199), (65, 64), (1, 0)):
        weight = torch.randn(n)
        weight[at] = value
        packed, absmax = ops.quantize_4bit_bnb(weight, 64, quant_type)
        peer_packed, peer_absmax = peer_quantize(weight, 64, quant_type)
        assert torch.equal(packed, peer_packed)
        assert torch.equal(absmax.nan_to_num(7.0, 8.0, 9.0), peer_absmax.nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("quant_type,byte", [("nf4", 0x77), ("fp4", 0x00)])
def test_zero_blocks(quant_type, byte):
    weight = torch.zeros(64 * 2 + 10)
    weight[64:128] = -0.0
    packed, absmax = ops.quantize_4bit(weight, 64, quant_type)
    assert (packed == byte).all()
    assert torch.equal(absmax, torch.zeros(3))
    compat_packed, compat_absmax = ops.quantize_4bit_bnb(weight, 64, quant_type)
    peer_packed, peer_absmax = peer_quantize(weight, 64, quant_type)
    assert torch.equal(compat_packed, peer_packed) and torch.equal(compat_absmax, peer_absmax)
    assert compat_absmax[2] > 0  # 1e-38, which only the compat form keeps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_default_refuses_what_is_not_finite_and_names_the_first(dtype, value):
    weight = torch.randn(300, 70).to(dtype)
    weight[291, 3] = value
    weight[20, 69] = value
    with pytest.raises(
        ValueError, match=rf"quantize_4bit\] weight must be finite; got -?(nan|inf) at flat index {20 * 70 + 69}\."
    ):
        ops.quantize_4bit(weight)


def test_empty_weights_have_no_bytes():
    packed, absmax = ops.quantize_4bit(torch.empty(0, 8))
    assert packed.shape == (0, 1) and absmax.shape == (0,)
    assert ops.dequantize_4bit(packed, absmax, [0, 8], 64, "nf4", torch.float32).shape == (0, 8)
    packed, absmax = ops.quantize_4bit(torch.tensor(-3.0))
    assert ops.dequantize_4bit(packed, absmax, [], 64, "nf4", torch.float32) == -3.0
