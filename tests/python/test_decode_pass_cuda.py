# SPDX-License-Identifier: Apache-2.0
"""A pass of one token a row in one launch (cuda/decode_pass.hpp), and of more rows phase by phase (cuda/wide_pass.hpp), beside one of so many that
blocks compute them as any, and beside whole passes."""

import peer
import peft
import pytest
import qlorapp
import torch
from families import FAMILIES
from qlorapp import _C

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(autouse=True)
def forgets():
    yield
    KEPT.clear()


VOCABULARY = 512
KEPT = []  # the adapter is the Python model's
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}
#: What a family names otherwise.
WIDER = {family: {"shared_intermediate_size": 512} for family in FAMILIES if family.startswith("Granite 4")}
#: What the launch does not compute: norms over all heads as one. (Ministral 3's queries have a factor in longer rows.)
OTHERWISE = {"OLMo 2", "OLMo 3"}
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def core_of(folder, lora=None, double_quant=True, quant_type="nf4", **config):
    """The model in bfloat16, and in float32 with the same codes and adapter."""
    peer.write_llama(folder, dtype=torch.bfloat16, **{**SIZES, **config})
    four_bits = qlorapp.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double_quant
    )
    cores = []
    for dtype in (torch.bfloat16, torch.float32):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map="cuda", quantization_config=four_bits
        )
        if lora is not None:
            torch.manual_seed(4)
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **lora))
            torch.manual_seed(5)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.copy_(0.05 * torch.randn(parameter.shape))
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[1]], device="cuda"))  # the core takes PEFT's adapter from here on
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        KEPT.append(model)
        cores.append(base.forward.engine.core)
    return cores


def kernels(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    return [event.name for event in profile.events()]


#: So many rows that layers multiply by a dequantized weight, and their parts are those of any pass.
ANY = 136


def compare(core, exact, lengths, steps, together):
    """Root mean squares of the errors of passes of as many rows as lengths, together and ANY, and of what they should be: float32's hidden states
    of a whole pass.
    """
    torch.manual_seed(0)
    rows = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in lengths]
    most = max(lengths) + steps
    sizes = (len(rows), together, ANY)
    caches = [_C.make_cache(core, size, most) for size in sizes]
    for size, cache in zip(sizes, caches, strict=True):
        all_rows = rows + [[3]] * (size - len(rows))
        _C.forward_cached(
            core, cache, torch.tensor([token for row in all_rows for token in row]), [len(row) for row in all_rows]
        )
    errors = torch.zeros(4, dtype=torch.float64)
    for _ in range(steps):  # as they are, recorded, and replayed
        tokens = torch.randint(0, VOCABULARY, (len(rows),))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        found = [
            _C.forward_cached(core, cache, torch.cat([tokens, torch.full((size - len(rows),), 3)]), [1] * size).double()
            for size, cache in zip(sizes, caches, strict=True)
        ]
        for i, ids in enumerate(rows):
            whole = _C.forward_cached(exact, _C.make_cache(exact, 1, len(ids)), torch.tensor(ids), [len(ids)])[0].double()
            errors += torch.stack([*((one[i] - whole).square().mean() for one in found), whole.square().mean()]).cpu()
    return errors.sqrt().tolist()


def check(cores, lengths, steps=7, together=16):
    few, many, launches, size = compare(*cores, lengths, steps, together)
    assert max(few, many) <= 1.5 * launches < size, (few, many, launches, size)


def used(core, rows=2, kernel="run_pass"):
    cache = _C.make_cache(core, rows, 8)
    _C.forward_cached(core, cache, torch.arange(3, 3 + rows), [1] * rows)
    found = kernels(lambda: _C.forward_cached(core, cache, torch.arange(3, 3 + rows), [1] * rows))
    return any(kernel in name for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family, tmp_path):
    cores = core_of(tmp_path / "m", {"r": 8, "lora_alpha": 16}, **FAMILIES[family] | WIDER.get(family, {}))
    assert used(cores[0]) == (family not in OTHERWISE and torch.cuda.get_device_capability() >= (9, 0))
    assert used(cores[0], 16, "end_in_stream") == (family not in OTHERWISE and IS_HOPPER)
    check(cores, [5, 17, 1])


@pytest.mark.parametrize("together", [9, 31, 40, 65, 128])
@pytest.mark.parametrize(
    "lora", [None, {"r": 16}, {"r": 6, "rank_pattern": {"q_proj": 2, "v_proj": 24}, "exclude_modules": ["k_proj", "down_proj"]}]
)
def test_many_rows_and_adapters(together, lora, tmp_path):
    cores = core_of(tmp_path / "m", lora, intermediate_size=2816, attention_bias=True)
    assert used(cores[0], together, "end_in_stream") == IS_HOPPER
    check(cores, [40, 1, 300, 17, 256, 255, 700, 2], together=together)


@pytest.mark.parametrize("hidden_size", [4352, 8448, 16384])  # more columns than a thread has at once
def test_wide_streams(hidden_size, tmp_path):
    cores = core_of(tmp_path / "m", {"r": 8}, hidden_size=hidden_size, head_dim=64, num_hidden_layers=1)
    assert used(cores[0], 12, "end_in_stream") == IS_HOPPER
    check(cores, [9, 30], together=12)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "lora", [None, {"r": 16}, {"r": 6, "rank_pattern": {"q_proj": 2, "v_proj": 24}, "exclude_modules": ["k_proj", "down_proj"]}]
)
def test_rows_and_adapters(rows, lora, tmp_path):
    cores = core_of(tmp_path / "m", lora, intermediate_size=2816, attention_bias=True)
    assert used(cores[0], rows)
    check(cores, [40, 1, 300, 17, 256, 255, 700, 2][:rows])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_heads_and_parts_of_long_rows(head_dim, kv_heads, tmp_path):
    cores = core_of(
        tmp_path / "m", head_dim=head_dim, num_key_value_heads=kv_heads, max_position_embeddings=4096, num_hidden_layers=2
    )
    assert used(cores[0])
    check(cores, [3000, 513])


@pytest.mark.parametrize(("double_quant", "quant_type"), [(False, "nf4"), (True, "fp4"), (False, "fp4")])
def test_kinds_of_weights(double_quant, quant_type, tmp_path):
    cores = core_of(tmp_path / "m", {"r": 8}, double_quant, quant_type)
    assert used(cores[0])
    check(cores, [9, 30])


def test_a_repeated_pass_has_the_same_bits(tmp_path):
    core, _ = core_of(tmp_path / "m", {"r": 8}, max_position_embeddings=4096)

    def run():
        cache = _C.make_cache(core, 2, 1100)
        torch.manual_seed(0)
        _C.forward_cached(core, cache, torch.randint(0, VOCABULARY, (1024,)), [1000, 24])
        return torch.stack([_C.forward_cached(core, cache, torch.tensor([7, 9]), [1, 1]) for _ in range(8)])

    first = run()
    assert all(torch.equal(run(), first) for _ in range(3))


def test_a_row_has_the_same_bits_wherever_it_is(tmp_path):
    """For one number of rows and one set of lengths, neither the tokens of other rows nor a row's place change its bits."""
    core, _ = core_of(tmp_path / "m", {"r": 8})
    assert used(core, 40, "end_in_stream") == IS_HOPPER

    def run(row, other):
        cache = _C.make_cache(core, 40, 200)
        torch.manual_seed(0)
        own, steps = torch.randint(0, VOCABULARY, (100,)), torch.randint(0, VOCABULARY, (7,))
        prompts = [own if i == row else torch.tensor([other]) for i in range(40)]
        _C.forward_cached(core, cache, torch.cat(prompts), [len(prompt) for prompt in prompts])
        found = []
        for step in steps:
            tokens = torch.full((40,), other)
            tokens[row] = step
            found.append(_C.forward_cached(core, cache, tokens, [1] * 40)[row])
        return torch.stack(found)

    first = run(3, 1)
    assert torch.equal(run(3, 9), first)
    assert torch.equal(run(39, 1), first)
