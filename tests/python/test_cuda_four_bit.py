# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights on a GPU: bit-equal to the CPU operators, and in compat mode to bitsandbytes' CUDA build."""

import pytest
import torch

ops = torch.ops.qlorapp
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPES = ["nf4", "fp4"]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
EVERYWHERE = ["cpu", "cuda"]


@pytest.fixture(autouse=True)
def _gpu(request):
    needs = request.node.callspec.params.get("device", "cuda") if hasattr(request.node, "callspec") else "cuda"
    if needs == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")


def bits(tensor):
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def nest(absmax, block_size=256):
    offset = absmax.mean()
    codes, nested_absmax = ops.quantize_blockwise(absmax - offset, block_size)
    return codes, nested_absmax, offset


def to(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_scales_and_values_equal_the_cpu(dtype, block_size, quant_type):
    shapes = [
        (0,),
        (1,),
        (2,),
        (31,),
        (33, 7),
        (block_size - 1,),
        (block_size + 1,),
        (3, block_size),
        (40, 352),
        (5, 3, 77),
        (257, 300),
    ]
    for shape in shapes:
        weight = (torch.randn(shape) * 0.02).to(dtype)
        packed, absmax = ops.quantize_4bit(weight, block_size, quant_type)
        got = ops.quantize_4bit(weight.cuda(), block_size, quant_type)
        assert same(got[0], packed) and same(got[1], absmax)
        for out in (*DTYPES, torch.float64):
            expected = ops.dequantize_4bit(packed, absmax, list(shape), block_size, quant_type, out)
            assert same(ops.dequantize_4bit(packed.cuda(), absmax.cuda(), list(shape), block_size, quant_type, out), expected)
        if weight.numel() == 0:
            continue
        for nested_block in (256, 3):
            nested = nest(absmax, nested_block)
            for out in DTYPES:
                arguments = (list(shape), block_size, nested_block, quant_type, out)
                expected = ops.dequantize_4bit_nested(packed, *nested, *arguments)
                assert same(ops.dequantize_4bit_nested(*to("cuda", packed, *nested), *arguments), expected)


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-38, 2.0**-126, 1e-20, 1.0, 1e20, 2.0**126, 3.4e38])
def test_magnitudes_from_subnormal_to_the_largest(scale, quant_type):
    weight = torch.randn(64, 64)
    weight = weight / weight.abs().amax(1, keepdim=True) * scale
    got, expected = ops.quantize_4bit(weight.cuda(), 64, quant_type), ops.quantize_4bit(weight, 64, quant_type)
    assert same(got[0], expected[0]) and same(got[1], expected[1])


@pytest.mark.parametrize("quant_type", TYPES)
def test_every_16_bit_value_and_ties_at_all_midpoints(quant_type):
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite()][:63488].view(-1, 62)
        for anchor in (torch.finfo(dtype).max, 1.0, 0.0173, torch.finfo(dtype).smallest_normal):
            largest = torch.full((values.shape[0], 2), anchor, dtype=dtype)
            inside = torch.where(values.abs() <= anchor, values, torch.zeros_like(values))
            weight = torch.cat([inside, largest], 1)
            assert same(ops.quantize_4bit(weight.cuda(), 64, quant_type)[0], ops.quantize_4bit(weight, 64, quant_type)[0])
    entries = (
        ops.dequantize_4bit(
            torch.tensor([[2 * k * 16 + 2 * k + 1] for k in range(8)], dtype=torch.uint8),
            torch.ones(1),
            [16],
            64,
            quant_type,
            torch.float32,
        )
        .sort()
        .values
    )
    absmax = torch.cat([torch.tensor([1.0, 0.5, 3e37, 1.2e-38]), torch.rand(2000) * 10 + 1e-3])[:, None]
    ties = (entries[1:] + entries[:-1]) / 2 * absmax
    infinity = torch.tensor(float("inf"))
    weight = torch.cat([absmax, ties, ties.nextafter(infinity), ties.nextafter(-infinity), torch.zeros(len(absmax), 18)], 1)
    assert same(ops.quantize_4bit(weight.cuda(), 64, quant_type)[0], ops.quantize_4bit(weight, 64, quant_type)[0])


def test_zero_blocks_hold_the_code_of_zero():
    packed, absmax = ops.quantize_4bit(torch.zeros(138, device="cuda"))
    assert (packed == 0x77).all() and (absmax == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
def test_what_is_not_finite_is_refused_with_the_words_of_the_cpu(value, block_size):
    weight = torch.randn(300, 70)
    weight[291, 3] = weight[20, 69] = value
    messages = []
    for device in EVERYWHERE:
        with pytest.raises(
            ValueError, match=rf"weight must be finite; got -?(nan|inf) at flat index {20 * 70 + 69}\."
        ) as error:
            ops.quantize_4bit(weight.to(device), block_size)
        messages.append(str(error.value).split("\n")[0])
    assert messages[0] == messages[1]
    with pytest.raises(ValueError, match=f"x must be finite; got .* at flat index {20 * 70 + 69}"):
        ops.quantize_blockwise(weight.cuda())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 256, 4096])
def test_eight_bit_blocks_equal_the_cpu(signed, block_size):
    x = torch.randn(30_011) * torch.logspace(-6, 3, 30_011)
    x[500:900] = 0
    x = x if signed else x.abs()
    codes, absmax = ops.quantize_blockwise(x, block_size, signed)
    got = ops.quantize_blockwise(x.cuda(), block_size, signed)
    assert same(got[0], codes) and same(got[1], absmax)
    for dtype in DTYPES:
        expected = ops.dequantize_blockwise(codes, absmax, block_size, signed, dtype)
        assert same(ops.dequantize_blockwise(*to("cuda", codes, absmax), block_size, signed, dtype), expected)


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


class TestAgainstBitsandbytes:
    """Its CUDA build, not its CPU build: they differ near midpoints and at zero blocks."""

    @pytest.fixture(autouse=True)
    def peer(self):
        pytest.importorskip("bitsandbytes")
        from bitsandbytes import functional

        self.functional = functional

    def assert_same(self, weight, block_size, quant_type):
        packed, absmax = ops.quantize_4bit_bnb(weight, block_size, quant_type)
        peer_packed, peer_absmax = torch.ops.bitsandbytes.quantize_4bit.default(weight, block_size, quant_type, torch.uint8)
        assert same(packed, peer_packed), f"{(packed != peer_packed).sum()} bytes differ"
        assert torch.equal(absmax.nan_to_num(7, 8, 9), peer_absmax.nan_to_num(7, 8, 9))

    @pytest.mark.parametrize("quant_type", TYPES)
    @pytest.mark.parametrize("block_size", BLOCKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_codes(self, dtype, block_size, quant_type):
        for shape in ((1,), (31,), (33, 7), (block_size - 1,), (block_size + 1,), (40, 352), (257, 300)):
            self.assert_same((torch.randn(shape, device="cuda") * 0.02).to(dtype), block_size, quant_type)

    @pytest.mark.parametrize("quant_type", TYPES)
    def test_ties_and_edges(self, quant_type):
        book = self.functional.get_4bit_type(quant_type, device="cuda").sort().values
        absmax = torch.cat([torch.tensor([1.0, 0.5, 2.0**-126, 1e-40, 3e38]), torch.rand(3000) * 10 + 1e-3]).cuda()[:, None]
        ties = (book[1:] + book[:-1]) / 2 * absmax
        infinity = torch.tensor(float("inf"), device="cuda")
        weight = torch.cat(
            [absmax, ties, ties.nextafter(infinity), ties.nextafter(-infinity), torch.zeros(len(absmax), 18, device="cuda")], 1
        )
        self.assert_same(weight, 64, quant_type)
        zeros = torch.zeros(202, device="cuda")
        zeros[64:128] = -0.0
        self.assert_same(zeros, 64, quant_type)
        assert (ops.quantize_4bit_bnb(zeros, 64, quant_type)[0] == 0).all()
        for value in (float("nan"), float("inf"), float("-inf")):
            for n, at in ((256, 70), (200, 199), (8192, 5000)):
                weight = torch.randn(n, device="cuda")
                weight[at] = value
                self.assert_same(weight, 64, quant_type)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("quant_type", TYPES)
    def test_double_quantization_and_values(self, quant_type, dtype):
        for shape in ((64, 64), (17, 352), (512, 300), (1024, 4096)):
            weight = (torch.randn(shape, device="cuda") * 0.02).to(dtype)
            peer_packed, state = self.functional.quantize_4bit(weight, compress_statistics=True, quant_type=quant_type)
            packed, absmax = ops.quantize_4bit_bnb(weight, 64, quant_type)
            offset = absmax.mean()
            codes, nested_absmax = ops.quantize_blockwise_bnb(absmax - offset)
            assert same(packed, peer_packed) and same(codes, state.absmax) and same(nested_absmax, state.state2.absmax)
            values = ops.dequantize_4bit_nested(packed, codes, nested_absmax, offset, list(shape), 64, 256, quant_type, dtype)
            assert torch.equal(values, self.functional.dequantize_4bit(peer_packed, state))  # FP4's second zero is -0 there

    @pytest.mark.parametrize("quant_type", TYPES)
    @pytest.mark.parametrize("block_size", BLOCKS)
    def test_values(self, block_size, quant_type):
        for dtype in DTYPES:
            weight = (torch.randn(257, 304, device="cuda") * 0.02).to(dtype)
            peer_packed, state = self.functional.quantize_4bit(weight, blocksize=block_size, quant_type=quant_type)
            packed, absmax = ops.quantize_4bit_bnb(weight, block_size, quant_type)
            values = ops.dequantize_4bit(packed, absmax, list(weight.shape), block_size, quant_type, dtype)
            assert torch.equal(values, self.functional.dequantize_4bit(peer_packed, state))

    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("scale", [1e-42, 1e-30, 0.02, 1e30, 1e38])
    def test_eight_bit_codes(self, scale, signed):
        x = (torch.randn(256 * 300 + 17, device="cuda") * scale).clamp(-3.4e38, 3.4e38)
        x = x if signed else x.abs()
        x[:4096] = 0
        x[5000] = float("nan")
        table = self.functional.create_dynamic_map(signed=signed).cuda()
        for block_size in (64, 256, 4096):
            got = ops.quantize_blockwise_bnb(x, block_size, signed)
            expected = torch.ops.bitsandbytes.quantize_blockwise.default(x, table, block_size)
            assert same(got[0], expected[0]) and same(got[1], expected[1])
