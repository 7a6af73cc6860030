# SPDX-License-Identifier: Apache-2.0
"""Passes of one token a row on a GPU: attention in one launch, recorded steps, adapters in 16 bits."""

import peft
import pytest
import qlorapp
import torch
from peer import write_llama
from qlorapp import _C

pytestmark = pytest.mark.usefixtures("cuda")
VOCABULARY = 256


def expected(q, k, v, starts, lengths, scale, window):
    """In float64, a row after the other."""
    out = []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        first = max(0, length - window) if window else 0
        keys, values = (
            x[start + first : start + length].double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)
        )
        scores = torch.einsum("hd,nhd->hn", q[row].double(), keys) * scale
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(32, 8, 128), (8, 8, 64), (4, 1, 256), (24, 8, 128), (32, 2, 128), (6, 3, 96), (5, 1, 80), (3, 3, 8)],
)
@pytest.mark.parametrize(("capacity", "window"), [(40, 0), (3000, 0), (700, 64), (90, 1)])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_attention_of_one_query_a_row(dtype, heads, kv_heads, dim, capacity, window, rows):
    torch.manual_seed(heads * dim + rows)
    k, v = (torch.randn(rows * capacity, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(rows, heads + 2, dim, device="cuda", dtype=dtype)[:, :heads]
    lengths = torch.randint(1, capacity + 1, (rows,))
    lengths[0] = capacity
    starts = torch.randperm(rows) * capacity
    found = torch.ops.qlorapp.decode_attention(q, k, v, starts.cuda(), lengths.cuda(), capacity, dim**-0.5, window)
    exact = expected(q, k, v, starts.tolist(), lengths.tolist(), dim**-0.5, window)
    bound = 2e-3 if dtype == torch.float16 else 1.6e-2
    torch.testing.assert_close(found.double(), exact, atol=bound, rtol=bound)
    assert (found.double() - exact).norm() <= (1e-3 if dtype == torch.float16 else 6e-3) * exact.norm()

    # All rows begin as the first; what they had there is not read.
    shared = torch.minimum(lengths - 1, torch.tensor(capacity // 2)) // 16 * 16
    for row in range(1, rows):
        begin, count = int(starts[row]), int(shared[row])
        for x in (k, v):
            x[begin : begin + count] = x[int(starts[0]) : int(starts[0]) + count]
    shared[0] = 0

    def attend():
        return torch.ops.qlorapp.decode_attention(
            q, k, v, starts.cuda(), lengths.cuda(), capacity, dim**-0.5, window, starts[:1].repeat(rows).cuda(), shared.cuda()
        )

    apart = torch.ops.qlorapp.decode_attention(q, k, v, starts.cuda(), lengths.cuda(), capacity, dim**-0.5, window)
    assert torch.equal(attend(), apart)
    for row in range(1, rows):
        for x in (k, v):
            x[int(starts[row]) : int(starts[row]) + int(shared[row])] = float("nan")
    assert torch.equal(attend(), apart)


def test_keys_that_are_not_the_rows_change_nothing():
    k, v = (torch.full((64, 1, 64), float("nan"), device="cuda", dtype=torch.float16) for _ in range(2))
    k[10:27], v[10:27] = torch.randn(17, 1, 64, device="cuda").half(), torch.randn(17, 1, 64, device="cuda").half()
    q = torch.randn(1, 2, 64, device="cuda", dtype=torch.float16)
    starts, lengths = torch.tensor([10], device="cuda"), torch.tensor([17], device="cuda")
    found = torch.ops.qlorapp.decode_attention(q, k, v, starts, lengths, 54, 0.125)
    torch.testing.assert_close(found.double(), expected(q, k, v, [10], [17], 0.125, 0), atol=2e-3, rtol=2e-3)


def test_bad_input_of_the_operator():
    q = torch.randn(2, 2, 64, device="cuda", dtype=torch.float16)
    k, starts = torch.randn(64, 1, 64, device="cuda", dtype=torch.float16), torch.tensor([0, 9], device="cuda")
    for lengths, longest, message in (
        (starts.int(), 9, "must be int64"), (starts[:1], 9, "one entry a query"), (starts, 0, "longest must be at least 1"), (starts.cpu(), 9, "cache_lengths must be on")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            torch.ops.qlorapp.decode_attention(q, k, k, starts, lengths, longest, 0.125)
    with pytest.raises(ValueError, match="on this GPU q must be 16 bits"):
        torch.ops.qlorapp.decode_attention(q.float(), k.float(), k.float(), starts, starts, 9, 0.125)


def model_of(folder, dtype, lora=None, **config):
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    write_llama(folder, **{**sizes, **config})
    four_bits = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda", quantization_config=four_bits)
    if lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **lora))
        torch.manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
    return model.eval()


def core_of(model):
    with torch.no_grad():
        model(input_ids=torch.tensor([[1]], device="cuda"))  # the core takes PEFT's adapter from here on
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).forward.engine.core


LORAS = {
    "none": None, "r8": {"r": 8, "lora_alpha": 16}, "some": {"r": 8, "rank_pattern": {"q_proj": 2, "v_proj": 24}, "exclude_modules": ["k_proj", "down_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lora", LORAS)
def test_each_step_is_the_whole_pass(dtype, lora, tmp_path):
    """Before it is recorded, as it is, and replayed; with rows of other lengths, and after the adapter is turned off and changed."""
    model = model_of(tmp_path / "m", dtype, LORAS[lora])
    core = core_of(model)
    rows = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in (5, 1, 17)]
    cache = _C.make_cache(core, 3, 8)
    _C.forward_cached(core, cache, torch.tensor([token for row in rows for token in row]), [len(row) for row in rows])
    bound = 4e-2 if dtype == torch.float16 else 3.2e-1

    def step():
        tokens = torch.randint(0, VOCABULARY, (3,))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        hidden = _C.forward_cached(core, cache, tokens, [1, 1, 1])
        head = model.get_output_embeddings().weight
        with torch.no_grad():
            for row, ids in enumerate(rows):
                whole = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1]
                torch.testing.assert_close((hidden[row] @ head.T).float(), whole.float(), atol=bound, rtol=bound)

    for _ in range(12):
        step()
    if lora == "none":
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    # Keys of earlier tokens are those of the adapter before: so the rows begin again.
    cache = _C.make_cache(core, 3, 64)
    _C.forward_cached(core, cache, torch.tensor([token for row in rows for token in row]), [len(row) for row in rows])
    for _ in range(8):
        step()


def test_rows_leave_and_the_others_go_on(tmp_path):
    model = model_of(tmp_path / "m", torch.float16, LORAS["r8"])
    core = core_of(model)
    prompts = [torch.randint(0, VOCABULARY, (3 + 7 * i % 11,)).tolist() for i in range(9)]
    ends = {row: 2 + 3 * row for row in range(9)}
    seen = {row: 0 for row in range(9)}

    def on_token(row, token):
        seen[row] += 1
        return seen[row] < ends[row]

    together = _C.generate(core, prompts, max_new_tokens=40, on_token=on_token)
    assert [len(found) for found in together] == list(ends.values())
    for row, prompt in enumerate(prompts):
        alone = _C.generate(core, [prompt], max_new_tokens=ends[row])[0]
        for i, (own, other) in enumerate(zip(alone, together[row], strict=True)):
            if own == other:
                continue
            ids = torch.tensor([prompt + alone[:i]], device="cuda")  # two tokens that are nearly alike
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -1].float()
            assert abs(logits[own] - logits[other]) < 0.02 * logits.std()
            break


@pytest.mark.parametrize("architecture", ["window", "norms"])
def test_other_families_take_the_same_way(architecture, tmp_path):
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
             "num_hidden_layers": 3, "vocab_size": VOCABULARY}  # fmt: skip
    if architecture == "window":
        config = transformers.Gemma3TextConfig(
            **sizes, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
    else:
        config = transformers.Qwen3Config(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    four_bits = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float16, device_map="cuda", quantization_config=four_bits
    ).eval()
    ids = torch.randint(0, VOCABULARY, (2, 9), device="cuda")
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, min_new_tokens=14, do_sample=False
        )
        whole = model(input_ids=out).logits[:, 8:-1]
    chosen, best = whole.gather(-1, out[:, 9:, None])[..., 0], whole.max(-1).values
    assert ((best - chosen) < 0.02 * whole.std()).all()


def check_products(dtype, columns, heights, rank, quantizer, nested_block, rows):
    """Of a group of layers, beside products in double precision."""
    torch.manual_seed(columns + rank)
    weights = [quantizer.quantize(torch.randn(height, columns, device="cuda") / columns**0.5) for height in heights]
    dense = [quantizer.dequantize(weight, torch.float32).double() for weight in weights]
    nested = weights[0].nested_absmax is not None
    lists = [[getattr(weight, name) for weight in weights] for name in ("packed", "absmax")]
    lists += [[getattr(weight, name) for weight in weights] if nested else [] for name in ("nested_absmax", "nested_offset")]
    b = [torch.randn(height, rank if i != 1 else 0, device="cuda", dtype=dtype) / 8 for i, height in enumerate(heights)]
    scaling = [0.5 + i for i in range(len(heights))]
    for count in rows:
        x = torch.randn(count, columns + 8, device="cuda", dtype=dtype)[:, :columns]
        a = torch.randn(sum(each.shape[1] for each in b), columns, device="cuda", dtype=dtype) / columns**0.5
        u = (x.double() @ a.double().T).to(dtype)
        bias = torch.randn(sum(heights), device="cuda", dtype=dtype) if count % 2 else None
        y = torch.full((count, sum(heights) + 8), 7.0, device="cuda", dtype=dtype)
        torch.ops.qlorapp.linear_4bit_group_(
            y[:, 4:-4],
            x,
            *lists,
            list(heights),
            64,
            nested_block,
            weights[0].quant_type,
            bias,
            a if len(a) else None,
            b,
            scaling,
        )
        parts, sizes, column = [], [], 0
        for weight, own, factor in zip(dense, b, scaling, strict=True):
            inner = u[:, column : column + own.shape[1]].double()
            column += own.shape[1]
            parts.append(x.double() @ weight.T + factor * inner @ own.double().T)
            sizes.append(x.double().abs() @ weight.abs().T + factor * inner.abs() @ own.double().abs().T)
        exact, size = torch.cat(parts, 1), torch.cat(sizes, 1)
        if bias is not None:
            exact += bias.double()
        unit = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        error = (y[:, 4:-4].double() - exact).abs()
        assert (error <= unit * (size + exact.abs()) + 1e-5).all(), (count, error.max())
        assert error.mean() < 0.1 * unit * size.mean()
        if count > 8 and rank == 0:  # W has a dequantized weight's bits: only y's own rounding is left
            exact = torch.cat([x.double() @ quantizer.dequantize(weight, dtype).double().T for weight in weights], 1)
            if bias is not None:
                exact += bias.double()
            error = y[:, 4:-4].double() - exact
            assert error.square().mean().sqrt() < 0.5 * unit * exact.square().mean().sqrt()
        assert (y[:, :4] == 7).all() and (y[:, -4:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [256, 1024, 4352])
@pytest.mark.parametrize("heights", [(64,), (200, 40, 40), (1000, 17), (512, 256, 256, 300)])
@pytest.mark.parametrize("rank", [0, 2, 16, 40])
@pytest.mark.parametrize("nested", [True, False])
def test_products_of_a_group(dtype, columns, heights, rank, nested):
    quantizer = _C.Quantizer(double_quant=nested, block_size=64)
    check_products(dtype, columns, heights, rank, quantizer, 256, (1, 3, 8, 9, 16, 17, 40, 64, 65, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns, heights", [(4096, (14336, 14336)), (14336, (4096,)), (3072, (8000, 3000))])
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("quant_type, nested_block", [("nf4", 256), ("fp4", 64), ("nf4", 1024)])
def test_each_multiprocessor_takes_many_stages_and_rows_of_several_strips(
    dtype, columns, heights, rank, quant_type, nested_block
):
    quantizer = _C.Quantizer(quant_type=quant_type, double_quant=True, block_size=64, nested_block_size=nested_block)
    check_products(dtype, columns, heights, rank, quantizer, nested_block, (5, 9, 31, 64, 127))
