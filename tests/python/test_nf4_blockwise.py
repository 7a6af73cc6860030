# SPDX-License-Identifier: Apache-2.0
"""Eight-bit blocks over the dynamic map: exactly nearest by default, the peer's codes on request."""

import numpy as np
import pytest
import torch
from four_bit_cases import DTYPES, same

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes import functional as peer  # noqa: E402

ops = torch.ops.qlorapp


def codes_of_all_entries(signed):
    return ops.dequantize_blockwise(torch.arange(256, dtype=torch.uint8), torch.ones(1), 256, signed)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_equals_the_peers_bit_for_bit(signed):
    assert torch.equal(codes_of_all_entries(signed).view(torch.int32), peer.create_dynamic_map(signed=signed).view(torch.int32))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 256, 4096])
def test_codes_are_exactly_nearest(signed, block_size):
    generator = torch.Generator().manual_seed(block_size)
    x = torch.randn(3001, generator=generator) * torch.logspace(-6, 3, 3001)
    x = x if signed else x.abs()
    codes, absmax = ops.quantize_blockwise(x, block_size, signed)
    blocks = -(-x.numel() // block_size)
    padded = torch.nn.functional.pad(x, (0, blocks * block_size - x.numel())).view(blocks, block_size)
    assert torch.equal(absmax, padded.abs().amax(1))
    table = peer.create_dynamic_map(signed=signed).double().numpy()
    scaled = x.double().numpy() / absmax.double().repeat_interleave(block_size)[: x.numel()].numpy()
    distance = np.abs(scaled[:, None] - table[None, :])
    assert (np.take_along_axis(distance, codes.long().numpy()[:, None], 1)[:, 0] == distance.min(1)).all()


def test_ties_go_to_the_lower_code_and_an_ulp_decides():
    table = peer.create_dynamic_map().numpy().astype(np.float64)
    exact = [k for k in range(255) if np.float32((table[k] + table[k + 1]) / 2) == (table[k] + table[k + 1]) / 2]
    assert len(exact) > 50  # midpoints that fp32 holds
    ties = np.array([(table[k] + table[k + 1]) / 2 for k in exact], np.float32)
    for step, expected in ((None, 0), (np.float32(2), 1), (np.float32(-2), 0)):
        x = ties if step is None else np.nextafter(ties, step)
        block = torch.from_numpy(np.concatenate([x, [np.float32(1)]]))
        codes, _ = ops.quantize_blockwise(block, 256)
        np.testing.assert_array_equal(codes[:-1].numpy(), np.array(exact) + expected)


def test_zero_is_zero():
    codes, absmax = ops.quantize_blockwise(torch.tensor([0.0, -0.0, 1.0] + [0.0] * 4), 3)
    assert codes.tolist() == [127, 127, 255, 127, 127, 127, 127]
    assert absmax.tolist() == [1.0, 0.0, 0.0]
    assert ops.quantize_blockwise(torch.zeros(5), 4, False)[0].tolist() == [0] * 5


def test_refuses_what_is_not_finite():
    x = torch.ones(1000)
    x[777] = float("inf")
    with pytest.raises(ValueError, match="x must be finite; got inf at flat index 777"):
        ops.quantize_blockwise(x, 256)


@pytest.mark.parametrize("scale", [1e-42, 1e-39, 1e-30, 0.02, 1.0, 1e30, 1e38])
def test_compat_codes_equal_the_peers(scale):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(256 * 500 + 17, generator=generator) * scale).clamp(-3.4e38, 3.4e38)
    x[256:512] = 0
    x[600:700] = 0
    codes, absmax = ops.quantize_blockwise_bnb(x, 256)
    peer_codes, peer_absmax = torch.ops.bitsandbytes.quantize_blockwise.default(x, peer.create_dynamic_map(), 256)
    assert torch.equal(codes, peer_codes)
    assert torch.equal(absmax, peer_absmax)


def test_compat_codes_equal_the_peers_over_the_whole_range_and_at_the_edges_of_its_grid():
    edges = ((np.arange(65536) + 0.5) / 32767.5 - 1).astype(np.float32)
    around = np.concatenate([edges, np.nextafter(edges, np.float32(2)), np.nextafter(edges, np.float32(-2))])
    x = np.clip(np.concatenate([around, np.linspace(-1, 1, 300_001, dtype=np.float32)]), -1, 1)
    x = np.concatenate([x, np.zeros(-x.size % 255, np.float32)]).reshape(-1, 255)
    x = torch.from_numpy(np.concatenate([x, np.ones((x.shape[0], 1), np.float32)], 1).reshape(-1))
    codes, _ = ops.quantize_blockwise_bnb(x, 256)
    peer_codes, _ = torch.ops.bitsandbytes.quantize_blockwise.default(x, peer.create_dynamic_map(), 256)
    assert torch.equal(codes, peer_codes)


@pytest.mark.parametrize("values", [[float("nan"), -3, 1], [0, -3, float("inf"), 1], [0, 2, float("-inf")], [float("nan")] * 4])
def test_compat_codes_of_nan_and_infinity(values):
    x = torch.tensor(values, dtype=torch.float32)
    codes, absmax = ops.quantize_blockwise_bnb(x, 256)
    peer_codes, peer_absmax = torch.ops.bitsandbytes.quantize_blockwise.default(x, peer.create_dynamic_map(), 256)
    assert torch.equal(codes, peer_codes) and torch.equal(absmax, peer_absmax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_come_back_as_entry_times_absmax(dtype):
    codes = torch.randint(0, 256, (37, 41), dtype=torch.uint8)
    absmax = torch.rand(-(-codes.numel() // 100)) * 5
    table = peer.create_dynamic_map()
    expected = (table[codes.flatten().long()] * absmax.repeat_interleave(100)[: codes.numel()]).view(37, 41).to(dtype)
    assert torch.equal(ops.dequantize_blockwise(codes, absmax, 100, True, dtype), expected)


# --- on a GPU

of_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@of_gpu
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 256, 4096])
def test_a_gpu_gives_the_bits_of_the_cpu(signed, block_size):
    x = torch.randn(30_011) * torch.logspace(-6, 3, 30_011)
    x[500:900] = 0
    x = x if signed else x.abs()
    codes, absmax = ops.quantize_blockwise(x, block_size, signed)
    got = ops.quantize_blockwise(x.cuda(), block_size, signed)
    assert same(got[0], codes) and same(got[1], absmax)
    for dtype in DTYPES:
        expected = ops.dequantize_blockwise(codes, absmax, block_size, signed, dtype)
        assert same(ops.dequantize_blockwise(codes.cuda(), absmax.cuda(), block_size, signed, dtype), expected)


@of_gpu
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 0.02, 1e30, 1e38])
def test_compat_codes_on_a_gpu_are_those_of_the_peers_cuda_build(scale, signed):
    x = (torch.randn(256 * 300 + 17, device="cuda") * scale).clamp(-3.4e38, 3.4e38)
    x = x if signed else x.abs()
    x[:4096] = 0
    x[5000] = float("nan")
    table = peer.create_dynamic_map(signed=signed).cuda()
    for block_size in (64, 256, 4096):
        got = ops.quantize_blockwise_bnb(x, block_size, signed)
        expected = torch.ops.bitsandbytes.quantize_blockwise.default(x, table, block_size)
        assert same(got[0], expected[0]) and same(got[1], expected[1])
