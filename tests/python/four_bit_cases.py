# SPDX-License-Identifier: Apache-2.0
"""The weights that four-bit quantization is judged by: one table, for bitsandbytes, each instruction set and each device.

As a program: prints a digest of each case's codes, scales and values, for a process with another instruction set (QLORAPP_CPU_ISA).
"""

import hashlib
import json
from collections.abc import Iterator

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPES = ["nf4", "fp4"]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
#: The value of each code. NF4: arXiv:2305.14314, appendix E.
BOOKS = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    "fp4": [sign * value for sign in (1, -1) for value in (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)],
}  # fmt: skip
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]

ops = torch.ops.qlorapp
#: (weight, block_size)
Weights = Iterator[tuple[torch.Tensor, int]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also the sign of a zero and the bits of a NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def _lengths(quant_type: str, dtype: torch.dtype) -> Weights:
    for block in BLOCKS:
        for shape in (
            (1,), (2,), (31,), (33, 7), (block - 1,), (block + 1,), (3, block), (40, 352), (5, 3, 77), (257, 300), (3 * block + 17,),
        ):  # fmt: skip
            yield torch.randn(shape) * 0.02, block


def _short(quant_type: str, dtype: torch.dtype) -> Weights:
    """Short last blocks divide where full ones multiply."""
    for n in (63, 100, 4095):
        for _ in range(20):
            yield torch.randn(n) * 0.7, 64 if n < 4000 else 4096


def _sixteen_bits(quant_type: str, dtype: torch.dtype) -> Weights:
    """Every finite value of a 16-bit dtype below several largest ones; and blocks of neighbors, down to all-subnormal ones."""
    if dtype == torch.float32:
        return
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    values = torch.cat([values, values.new_zeros(-values.numel() % 63)]).view(-1, 63)
    limits = torch.finfo(dtype)
    for anchor in (
        limits.max,
        1.0,
        0.0173,
        3e-4,
        limits.smallest_normal * 2,
        limits.smallest_normal,
        limits.smallest_normal / 64,
    ):
        largest = torch.full((values.shape[0], 1), anchor, dtype=dtype)
        yield torch.cat([torch.where(values.abs() <= largest, values, torch.zeros_like(values)), largest], 1), 64
    yield values.flatten()[: values.numel() // 64 * 64 - 64], 64


def _midpoints(quant_type: str, dtype: torch.dtype) -> Weights:
    """Ties between neighboring entries at many scales, and one ulp to either side."""
    if dtype != torch.float32:
        return
    book = torch.tensor(BOOKS[quant_type]).sort().values
    absmax = torch.cat([torch.tensor([1, 2, 0.5, 2**-30, 3e38, 3e37, 1.1754944e-38, 1.2e-38]), torch.rand(3000) * 10 + 1e-3])[
        :, None
    ]
    infinity, ties = torch.tensor(float("inf")), (book[1:] + book[:-1]) / 2 * absmax
    rows = torch.stack([ties, ties.nextafter(infinity), ties.nextafter(-infinity)], 2).flatten(1)
    yield torch.cat([absmax, rows, torch.zeros(len(absmax), 63 - rows.shape[1])], 1), 64
    for row in torch.cat([absmax, rows], 1)[:40]:  # short blocks
        yield row, 64


def _strides(quant_type: str, dtype: torch.dtype) -> Weights:
    base = torch.randn(96, 130).to(dtype)
    for weight in (base.t(), base[:, 3:99], base[::2, 1::3], base[0].expand(7, 130), base.flip(0), base.flatten()[1:]):
        yield weight, 64


def _magnitudes(quant_type: str, dtype: torch.dtype) -> Weights:
    """From subnormal to the largest, and far apart within a block."""
    if dtype == torch.float32:
        for scale in (1e-44, 1e-40, 1e-38, 1e-37, 2.0**-126, 1e-20, 1.0, 1e20, 2.0**126, 3.4e38):
            weight = torch.randn(64, 64)
            yield weight / weight.abs().amax(1, keepdim=True) * scale, 64
    mixed = torch.randn(64, 64)
    mixed[::3] *= 1e-30
    mixed[:, 0] *= 1e4
    yield mixed, 64
    spread = torch.randn(20000) * torch.randn(20000).exp()
    spread[torch.randint(20000, (2500,))] = 0
    yield spread, 4096


#: {name: the weights for a type and a dtype}. None of them is a block of zeros, where bitsandbytes keeps another scale.
CASES = {
    "lengths around a block": _lengths, "short last blocks": _short, "every 16-bit value": _sixteen_bits, "all midpoints": _midpoints,
    "any strides": _strides, "magnitudes": _magnitudes,
}  # fmt: skip


def weights(case: str, quant_type: str, dtype: torch.dtype) -> Weights:
    """The same in every process."""
    torch.manual_seed(len(case))
    for weight, block_size in CASES[case](quant_type, dtype):
        yield weight.to(dtype), block_size


def codes_at_every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """(packed, absmax) of blocks of 32: 256 bytes hold every pair of codes, and a block takes 16 of them."""
    scales = [
        0.0,
        1.0,
        -1.0,
        0.0371,
        1e-38,
        1e-45,
        1e-30,
        3.4e38,
        65504.0,
        65520.0,
        7e-8,
        5.9e-8,
        1.2e-5,
        3.1e-5,
        *NOT_FINITE[:2],
    ]
    torch.manual_seed(3)
    absmax = torch.cat([torch.tensor(scales), torch.randn(2000).exp()])
    return torch.arange(256, dtype=torch.uint8).repeat(len(absmax) // 16 + 1)[: 16 * len(absmax)][:, None], absmax


def results(case: str, quant_type: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Codes, scales and values of the case on the CPU."""
    for weight, block_size in weights(case, quant_type, dtype):
        packed, absmax = ops.quantize_4bit(weight, block_size, quant_type)
        yield from (packed, absmax)
        for out in (*DTYPES, torch.float64):
            yield ops.dequantize_4bit(packed, absmax, list(weight.shape), block_size, quant_type, out)


def digests() -> dict[str, str]:
    made = {}
    for quant_type in TYPES:
        for dtype in DTYPES:
            for case in CASES:
                digest = hashlib.sha256()
                for tensor in results(case, quant_type, dtype):
                    digest.update(bits(tensor).numpy())
                made[f"{case}, {quant_type}, {dtype}"] = digest.hexdigest()
        packed, absmax = codes_at_every_scale()
        for out in (*DTYPES, torch.float64):
            values = ops.dequantize_4bit(packed, absmax, [len(absmax), 32], 32, quant_type, out)
            made[f"values, {quant_type}, {out}"] = hashlib.sha256(bits(values).numpy()).hexdigest()
    return made


if __name__ == "__main__":
    import qlorapp  # noqa: F401  (the operators)

    print(json.dumps(digests()))
