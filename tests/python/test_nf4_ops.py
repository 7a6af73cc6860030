# SPDX-License-Identifier: Apache-2.0
"""The four-bit operators as PyTorch sees them: registration, derivatives, what is kept for backward, and what is refused."""

import numpy
import pytest
import torch

ops = torch.ops.qlorapp


class Weight:
    """A quantized weight and its dense values, which come from elementwise arithmetic in the test."""

    def __init__(self, out_features, in_features, nested, quant_type="nf4", block_size=64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.shape = [out_features, in_features]
        self.block_size, self.quant_type, self.nested = block_size, quant_type, nested
        weight = torch.randn(self.shape, generator=generator) * 0.1
        self.packed, self.absmax = ops.quantize_4bit(weight, block_size, quant_type)
        self.nested_absmax = self.offset = None
        scales = self.absmax
        if nested:
            self.offset = self.absmax.mean()
            self.absmax, self.nested_absmax = ops.quantize_blockwise(self.absmax - self.offset, 4)
            table = ops.dequantize_blockwise(torch.arange(256, dtype=torch.uint8), torch.ones(1))
            scales = table[self.absmax.long()] * self.nested_absmax.repeat_interleave(4)[: self.absmax.numel()] + self.offset
        n = weight.numel()
        codes = torch.stack([self.packed.flatten() >> 4, self.packed.flatten() & 15], 1).flatten()[:n].long()
        entries = ops.dequantize_4bit(
            torch.tensor([[2 * k * 16 + 2 * k + 1] for k in range(8)], dtype=torch.uint8),
            torch.ones(1),
            [16],
            64,
            quant_type,
            torch.float32,
        )
        self.dense = (entries[codes] * scales.repeat_interleave(block_size)[:n]).view(self.shape)

    def arguments(self, transpose=False):
        return (
            self.packed,
            self.absmax,
            self.nested_absmax,
            self.offset,
            self.shape,
            self.block_size,
            4,
            self.quant_type,
            transpose,
        )


def both(function):
    function = pytest.mark.parametrize("nested", [False, True])(function)
    return pytest.mark.parametrize("transpose", [False, True])(function)


@both
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(48, 64), (33, 31), (130, 352), (1, 5), (700, 2048)])
def test_linear_equals_the_product_with_the_dense_values(nested, transpose, quant_type, shape):
    weight = Weight(*shape, nested, quant_type)
    x = torch.randn(2, 3, shape[0 if transpose else 1], dtype=torch.float64)
    expected = x @ (weight.dense.double() if transpose else weight.dense.double().t())
    assert torch.allclose(ops.linear_4bit(x, *weight.arguments(transpose)), expected, rtol=1e-12, atol=1e-12)
    got = ops.linear_4bit(x.float(), *weight.arguments(transpose))
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert (got - expected).norm() <= 2e-6 * expected.norm()
    for dtype in (torch.float16, torch.bfloat16):
        got = ops.linear_4bit(x.to(dtype), *weight.arguments(transpose))
        rounded = weight.dense.to(dtype).double()
        exact = x.to(dtype).double() @ (rounded if transpose else rounded.t())
        # one rounding of the result, plus fp32 summation
        limit = torch.finfo(dtype).eps * 0.51 * exact.abs() + 1e-5 * exact.abs().max()
        assert got.dtype == dtype and ((got.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 16])
def test_few_rows_are_as_exact_as_bitsandbytes(tokens, dtype, nested, quant_type):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(tokens)
    weight, x = torch.randn(131, 2048, dtype=dtype) * 0.1, torch.randn(tokens, 2048, dtype=dtype)
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
    theirs = bitsandbytes.matmul_4bit(x, packed.t(), state).double()
    nested_scales = (state.state2.absmax, state.offset) if nested else (None, None)
    ours = ops.linear_4bit(x, packed, state.absmax, *nested_scales, [131, 2048], 64, 256, quant_type).double()
    values = ops.dequantize_4bit_nested if nested else ops.dequantize_4bit
    arguments = (*nested_scales, [131, 2048], 64, 256) if nested else ([131, 2048], 64)
    exact = x.double() @ values(packed, state.absmax, *arguments, quant_type, torch.float64).t()
    eps = torch.finfo(dtype).eps
    assert (ours - exact).norm() <= max(1.1 * (theirs - exact).norm(), eps * exact.norm())
    assert (ours - theirs).norm() <= 16 * eps * exact.norm()


@both
def test_out_form_writes_into_columns_and_accumulates(nested, transpose):
    torch.manual_seed(0)
    weight = Weight(130, 352, nested)
    x = torch.randn(9, 130 if transpose else 352)
    y = ops.linear_4bit(x, *weight.arguments(transpose))
    wide = torch.full((9, y.shape[1] + 20), 3.0)
    ops.linear_4bit_out(wide[:, 7 : 7 + y.shape[1]], x, *weight.arguments(transpose))
    assert torch.allclose(wide[:, 7 : 7 + y.shape[1]], y, rtol=1e-5, atol=1e-5)  # a GEMM's sums depend on strides
    assert (wide[:, :7] == 3).all() and (wide[:, 7 + y.shape[1] :] == 3).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        start = torch.randn_like(y).to(dtype)
        total = start.clone()
        ops.linear_4bit_out(total, x.to(dtype), *weight.arguments(transpose), True)
        rounded = weight.dense.to(dtype).double()
        expected = start.double() + x.to(dtype).double() @ (rounded if transpose else rounded.t())
        limit = torch.finfo(dtype).eps * 0.51 * expected.abs() + 1e-5 * expected.abs().max()
        assert ((total.double() - expected).abs() <= limit).all()


@both
def test_gradcheck(nested, transpose):
    weight = Weight(12, 40, nested, block_size=32)
    x = torch.randn(2, 3, 12 if transpose else 40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ops.linear_4bit(t, *weight.arguments(transpose)), (x,))
    assert torch.autograd.gradgradcheck(lambda t: ops.linear_4bit(t, *weight.arguments(transpose)), (x,))


def test_backward_keeps_the_packed_weight_only():
    weight = Weight(512, 256, nested=True)
    x = torch.randn(4, 256, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ops.linear_4bit(x, *weight.arguments())
    parts = [weight.packed, weight.absmax, weight.nested_absmax, weight.offset]
    # Nothing of its own: four references to what exists already, a seventh of the dense weight's bytes.
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in parts)
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in parts) < 512 * 256 * 4 / 7
    y.sum().backward()
    assert torch.allclose(x.grad, weight.dense.sum(0).expand(4, -1), atol=1e-5)
    assert weight.packed.grad is None


def test_opcheck():
    x = torch.randn(3, 96)
    for op in (ops.quantize_4bit, ops.quantize_4bit_bnb):
        torch.library.opcheck(op.default, (x, 32, "fp4"))
    for op in (ops.quantize_blockwise, ops.quantize_blockwise_bnb):
        torch.library.opcheck(op.default, (x, 7, True))
    packed, absmax = ops.quantize_4bit(x)
    torch.library.opcheck(ops.dequantize_4bit.default, (packed, absmax, [3, 96], 64, "nf4", torch.bfloat16))
    codes, scales = ops.quantize_blockwise(x, 7)
    torch.library.opcheck(ops.dequantize_blockwise.default, (codes, scales, 7, True, torch.float16))
    for nested in (False, True):
        weight = Weight(33, 40, nested)
        for transpose in (False, True):
            t = torch.randn(2, 3, 33 if transpose else 40)
            for requires_grad in (False, True):
                torch.library.opcheck(
                    ops.linear_4bit.default, (t.clone().requires_grad_(requires_grad), *weight.arguments(transpose))
                )
            y = torch.randn(2, 3, 40 if transpose else 33)
            torch.library.opcheck(ops.linear_4bit_out.default, (y, t, *weight.arguments(transpose), True))
        if nested:
            torch.library.opcheck(
                ops.dequantize_4bit_nested.default,
                (weight.packed, weight.absmax, weight.nested_absmax, weight.offset, weight.shape, 64, 4, "nf4", torch.float32),
            )


def test_meta_tensors_have_the_shapes_of_real_ones():
    for shape in ((7, 9), (64, 64), (0,), ()):
        for real, meta in zip(
            ops.quantize_4bit(torch.ones(shape)), ops.quantize_4bit(torch.ones(shape, device="meta")), strict=True
        ):
            assert (real.shape, real.dtype) == (meta.shape, meta.dtype) and meta.is_meta


GOOD = Weight(8, 64, nested=True)


@pytest.mark.parametrize(
    "call,error,match",
    [
        (
            lambda: ops.quantize_4bit(torch.ones(64), 48),
            ValueError,
            r"\[quantize_4bit\] block_size must be one of \[32, 64, 128",
        ),
        (lambda: ops.quantize_4bit(torch.ones(64), -64), ValueError, "block_size must be one of"),
        (lambda: ops.quantize_4bit(torch.ones(64), 64, "int4"), ValueError, "quant_type must be nf4 or fp4; got int4"),
        (
            lambda: ops.quantize_4bit(torch.ones(64).double()),
            TypeError,
            "weight must be float32, float16 or bfloat16; got Double",
        ),
        (lambda: ops.quantize_4bit(torch.ones(64).int()), TypeError, "got Int"),
        (lambda: ops.quantize_4bit(torch.ones(64, requires_grad=True)), ValueError, "must not require a gradient"),
        (
            lambda: ops.dequantize_4bit(GOOD.packed, torch.ones(7), [8, 64], 64, "nf4", torch.float32),
            ValueError,
            "absmax must hold 8 elements",
        ),
        (
            lambda: ops.dequantize_4bit(GOOD.packed, GOOD.absmax, [8, 64], 64, "nf4", torch.float32),
            TypeError,
            "absmax must be Float",
        ),
        (
            lambda: ops.dequantize_4bit(GOOD.packed[:-1], torch.ones(8), [8, 64], 64, "nf4", torch.float32),
            ValueError,
            "packed must hold 256 elements",
        ),
        (lambda: ops.dequantize_4bit(GOOD.packed, torch.ones(8), [-8, -64], 64, "nf4", torch.float32), ValueError, "negative"),
        (
            lambda: ops.dequantize_4bit(GOOD.packed, torch.ones(8), [2**32, 2**32], 64, "nf4", torch.float32),
            ValueError,
            "2\\^63",
        ),
        (
            lambda: ops.dequantize_4bit(GOOD.packed, torch.ones(8), [8, 64], 64, "nf4", torch.int8),
            TypeError,
            "dtype must be float32",
        ),
        (
            lambda: ops.dequantize_4bit_nested(
                GOOD.packed, GOOD.absmax, GOOD.nested_absmax, GOOD.offset, [8, 64], 64, 0, "nf4", torch.float32
            ),
            ValueError,
            "nested_block_size must be above 0",
        ),
        (
            lambda: ops.dequantize_4bit_nested(
                GOOD.packed, GOOD.absmax, GOOD.nested_absmax, GOOD.offset, [8, 64], 64, 3, "nf4", torch.float32
            ),
            ValueError,
            "nested_absmax must hold 3 elements",
        ),
        (lambda: ops.linear_4bit(torch.ones(2, 63), *GOOD.arguments()), ValueError, "last dimension of x must be 64"),
        (lambda: ops.linear_4bit(torch.ones(2, 64).int(), *GOOD.arguments()), TypeError, "x must be float32"),
        (lambda: ops.linear_4bit(torch.ones(()), *GOOD.arguments()), ValueError, "last dimension of x"),
        (
            lambda: ops.linear_4bit_out(torch.ones(2, 9), torch.ones(2, 64), *GOOD.arguments()),
            ValueError,
            r"y must be \[2, 8\]",
        ),
        (lambda: ops.linear_4bit_out(torch.ones(2, 8).half(), torch.ones(2, 64), *GOOD.arguments()), TypeError, "dtype of x"),
        (lambda: ops.quantize_blockwise(torch.ones(4), 0), ValueError, "block_size must be above 0"),
        (
            lambda: ops.dequantize_blockwise(torch.zeros(4, dtype=torch.uint8), torch.ones(2), 4),
            ValueError,
            "absmax must hold 1",
        ),
    ],
)
def test_refusals_name_the_argument(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_gradient_may_be_wanted_elsewhere():
    weight = torch.ones(64, requires_grad=True)
    with torch.no_grad():
        ops.quantize_4bit(weight)


@both
def test_no_tokens_and_no_features(nested, transpose):
    weight = Weight(8, 64, nested)
    x = torch.empty(0, 8 if transpose else 64)
    assert ops.linear_4bit(x, *weight.arguments(transpose)).shape == (0, 64 if transpose else 8)
    empty = ops.quantize_4bit(torch.empty(5, 0))
    assert torch.equal(ops.linear_4bit(torch.empty(3, 0), *empty, None, None, [5, 0], 64, 256, "nf4"), torch.zeros(3, 5))


def test_offsets_beyond_two_to_the_31():
    rows, columns = 2**21 + 2, 1024  # 2^31 + 2,048 elements
    # Untouched pages of zeros cost no memory: only the last two rows hold anything.
    packed = torch.from_numpy(numpy.zeros((rows * columns // 2, 1), numpy.uint8))
    absmax = torch.from_numpy(numpy.zeros(rows * columns // 64, numpy.float32))
    packed[-columns:] = 0xF0  # 1, -1, 1, -1, …
    absmax[-32:-16] = 0.5
    absmax[-16:] = 2.0
    x = torch.zeros(1, columns)
    x[:, ::2] = 1.0
    y = ops.linear_4bit(x, packed, absmax, None, None, [rows, columns], 64, 256, "nf4")
    assert y[0, -2:].tolist() == [256.0, 1024.0]
    assert (y[0, :-2] == 0).all()
