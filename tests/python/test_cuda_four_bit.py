# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights on a GPU: stacks, products and sizes beyond 32 bits. The rule itself: test_four_bit_rule.py."""

import pytest
import torch
from four_bit_cases import DTYPES, same

ops = torch.ops.qlorapp
EVERYWHERE = ["cpu", "cuda"]


@pytest.fixture(autouse=True)
def _gpu(request):
    needs = request.node.callspec.params.get("device", "cuda") if hasattr(request.node, "callspec") else "cuda"
    if needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")


def nest(absmax, block_size=256):
    offset = absmax.mean()
    codes, nested_absmax = ops.quantize_blockwise(absmax - offset, block_size)
    return codes, nested_absmax, offset


def to(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spare", [0, 16, 3])
@pytest.mark.parametrize(
    "columns,rows", [(64, [5]), (352, [17, 40, 1]), (6145, [1, 2]), (7, [3, 5]), (24, [300, 5, 1, 1, 9, 2, 3, 4, 8, 2])]
)
def test_a_stack_holds_every_weight_and_leaves_the_spare_columns(device, nested, spare, columns, rows):
    for block_size, quant_type in ((64, "nf4"), (32, "fp4"), (4096, "nf4")):
        weights = [ops.quantize_4bit(torch.randn(count, columns) * 0.1, block_size, quant_type) for count in rows]
        nested_parts = [nest(absmax) for _, absmax in weights] if nested else []
        packed = [weight[0].to(device) for weight in weights]
        absmax = [part[0].to(device) for part in nested_parts] if nested else [weight[1].to(device) for weight in weights]
        for dtype in DTYPES:
            workspace = torch.full((sum(rows), columns + spare), -77.0, dtype=dtype, device=device)
            ops.dequantize_4bit_stack_(
                workspace[:, :columns],
                packed,
                absmax,
                [part[1].to(device) for part in nested_parts],
                [part[2].to(device) for part in nested_parts],
                rows,
                block_size,
                256,
                quant_type,
            )
            expected = []
            for i, count in enumerate(rows):
                arguments = ([count, columns], block_size)
                if nested:
                    expected.append(
                        ops.dequantize_4bit_nested(weights[i][0], *nested_parts[i], *arguments, 256, quant_type, dtype)
                    )
                else:
                    expected.append(ops.dequantize_4bit(*weights[i], *arguments, quant_type, dtype))
            assert same(workspace[:, :columns], torch.cat(expected))
            assert (workspace[:, columns:] == -77).all()


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spare", [64, 8, 40, 37])
@pytest.mark.parametrize("offset", [0, 1])  # in elements: a workspace that is not aligned
@pytest.mark.parametrize(
    "columns,rows,ranks", [(64, [5], [4]), (352, [17, 40, 1], [16, 0, 17]), (7, [3, 5], [1, 2]), (2056, [300], [8])]
)
def test_the_borders_of_a_workspace_hold_the_adapters(device, nested, spare, offset, columns, rows, ranks):
    total, height = sum(ranks), sum(rows)
    if total > spare:
        return
    weights = [ops.quantize_4bit(torch.randn(count, columns) * 0.1) for count in rows]
    nested_parts = [nest(absmax) for _, absmax in weights] if nested else []
    packed = [weight[0].to(device) for weight in weights]
    absmax = [part[0].to(device) for part in nested_parts] if nested else [weight[1].to(device) for weight in weights]
    scales = [part[1].to(device) for part in nested_parts], [part[2].to(device) for part in nested_parts]
    a = [torch.randn(rank, columns) for rank in ranks]
    b = [torch.randn(count, rank) for count, rank in zip(rows, ranks, strict=True)]
    scaling = [2.0, 0.3, 1.0][: len(rows)]
    right, first = torch.zeros(height, spare), 0
    for i, rank in enumerate(ranks):
        begin = sum(rows[:i])
        right[begin : begin + rows[i], first : first + rank] = b[i] * scaling[i]
        first += rank
    below = torch.cat([*a, torch.zeros(spare - total, columns)])
    for dtype in DTYPES:
        memory = torch.full(((height + spare) * (columns + spare) + 8,), -77.0, dtype=dtype, device=device)

        def workspace(memory=memory):
            return memory[offset : offset + (height + spare) * (columns + spare)].view(height + spare, columns + spare)

        ops.dequantize_4bit_stack_(workspace()[:height, :columns], packed, absmax, *scales, rows, 64, 256, "nf4")
        dense = workspace()[:height, :columns].clone()
        lists = to(device, *a), to(device, *b), scaling
        for together in (False, True):
            if together:
                memory.fill_(-77)
                ops.dequantize_4bit_augmented_(workspace(), packed, absmax, *scales, rows, 64, 256, "nf4", *lists)
            else:
                ops.lora_augment_(workspace(), *lists)
            assert same(workspace()[:height, :columns], dense)
            assert same(workspace()[:height, columns:], right.to(dtype))
            assert same(workspace()[height:, :columns], below.to(dtype))
            assert (workspace()[height:, columns:] == -77).all()
            assert (memory[:offset] == -77).all() and (memory[offset + workspace().numel() :] == -77).all()
    with pytest.raises(ValueError, match="rows must be those of b"):
        ops.dequantize_4bit_augmented_(
            workspace(), packed, absmax, *scales, [count + 1 for count in rows], 64, 256, "nf4", *lists
        )


@pytest.mark.parametrize("device", EVERYWHERE)
def test_a_stack_that_does_not_fit_is_refused(device):
    packed, absmax = to(device, *ops.quantize_4bit(torch.randn(4, 64)))
    out = torch.empty(5, 64, device=device)
    with pytest.raises(ValueError, match="out must have 4 rows"):
        ops.dequantize_4bit_stack_(out, [packed], [absmax], [], [], [4], 64, 256, "nf4")
    with pytest.raises(ValueError, match="lists of one length"):
        ops.dequantize_4bit_stack_(out, [packed], [absmax], [], [], [4, 1], 64, 256, "nf4")
    with pytest.raises(ValueError, match="side by side"):
        ops.dequantize_4bit_stack_(out.t(), [packed], [absmax], [], [], [4], 64, 256, "nf4")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64), (17, 192), (100, 4096), (512, 2048), (48, 352), (33, 31),
        (2200, 64), (8256, 64), (9664, 64), (16100, 64), (4096, 8192),  # every kernel of cuda/gemm_4bit.cu's launch_tokens()
    ],
)  # fmt: skip
def test_linear_equals_the_product_with_the_dense_weight(shape, dtype, nested):
    out_features, in_features = shape
    packed, absmax = ops.quantize_4bit(torch.randn(shape).cuda() * 0.1)
    scales = nest(absmax) if nested else (absmax, None, None)
    arguments = (packed, *scales, list(shape), 64, 256, "nf4")
    dense = (
        ops.dequantize_4bit_nested(packed, *scales, list(shape), 64, 256, "nf4", torch.float64)
        if nested
        else ops.dequantize_4bit(packed, absmax, list(shape), 64, "nf4", torch.float64)
    )
    epsilon = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for transpose in (False, True) if out_features < 1000 else (False,):
        other = dense if transpose else dense.t()
        for tokens in (1, 2, 7, 8, 9, 16, 31, 64, 100):
            x = torch.randn(tokens, out_features if transpose else in_features, device="cuda").to(dtype)
            exact = x.double() @ other
            limit = epsilon * (x.double().abs() @ other.abs() + exact.abs()) + 1e-6
            got = ops.linear_4bit(x, *arguments, transpose)
            assert got.dtype == dtype and ((got.double() - exact).abs() <= limit).all()
            before = torch.randn_like(got)
            y = before.clone()
            ops.linear_4bit_out(y, x, *arguments, transpose, True)
            assert ((y.double() - exact - before.double()).abs() <= limit + epsilon * y.double().abs()).all()
            y.fill_(float("nan"))
            ops.linear_4bit_out(y, x, *arguments, transpose, False)
            assert torch.equal(y, got), "two runs differ"


def test_linear_gives_the_gradient_to_x():
    packed, absmax = ops.quantize_4bit(torch.randn(96, 128).cuda())
    x = torch.randn(5, 128, device="cuda", requires_grad=True)
    y = ops.linear_4bit(x, packed, absmax, None, None, [96, 128], 64, 256, "nf4")
    dy = torch.randn_like(y)
    y.backward(dy)
    dense = ops.dequantize_4bit(packed, absmax, [96, 128], 64, "nf4", torch.float32)
    assert torch.allclose(x.grad, dy @ dense, rtol=1e-4, atol=1e-4)


def test_products_and_stacks_are_captured_in_a_graph():
    packed, absmax = ops.quantize_4bit(torch.randn(256, 256).cuda())
    codes, nested_absmax, offset = nest(absmax)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    y, few = (
        torch.empty(300, 256, device="cuda", dtype=torch.bfloat16),
        torch.empty(3, 256, device="cuda", dtype=torch.bfloat16),
    )
    arguments = (packed, codes, nested_absmax, offset, [256, 256], 64, 256, "nf4")
    ops.linear_4bit_out(y, x, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.linear_4bit_out(y, x, *arguments)
        ops.linear_4bit_out(few, x[:3], *arguments)
    x.normal_()
    graph.replay()
    assert torch.equal(y, ops.linear_4bit(x, *arguments)) and torch.equal(few, ops.linear_4bit(x[:3], *arguments))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 30e9, reason="needs a GPU of 30 GB"
)
def test_beyond_two_to_the_31_elements():
    n = 2**31 + 64 * 5000 + 6
    weight = torch.empty(n, dtype=torch.float16, device="cuda").normal_(0, 0.02)
    packed, absmax = ops.quantize_4bit(weight)
    begin = n // 64 * 64 - 64 * 100
    expected = ops.quantize_4bit(weight[begin:].cpu())
    assert same(packed[begin // 2 :], expected[0]) and same(absmax[begin // 64 :], expected[1])
    values = ops.dequantize_4bit(packed, absmax, [n], 64, "nf4", torch.bfloat16)[begin:]
    assert same(values, ops.dequantize_4bit(*expected, [n - begin], 64, "nf4", torch.bfloat16))
    offset = absmax.mean()
    codes, nested_absmax = ops.quantize_blockwise(absmax - offset)
    nested = ops.dequantize_4bit_nested(packed, codes, nested_absmax, offset, [n], 64, 256, "nf4", torch.bfloat16)
    last = n // (64 * 256) * (64 * 256)  # where a nested block begins
    parts = packed[last // 2 :], codes[last // 64 :], nested_absmax[last // (64 * 256) :], offset
    assert same(
        nested[last:], ops.dequantize_4bit_nested(*(p.cpu() for p in parts), [n - last], 64, 256, "nf4", torch.bfloat16)
    )
    del values, nested
    compat = ops.quantize_4bit_bnb(weight, 64, "fp4")
    of_the_end = ops.quantize_4bit_bnb(
        weight[begin:].clone(), 64, "fp4"
    )  # its CUDA form, whose small sizes are bitsandbytes' own
    assert same(compat[0][begin // 2 :], of_the_end[0]) and same(compat[1][begin // 64 :], of_the_end[1])
