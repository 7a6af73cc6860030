# SPDX-License-Identifier: Apache-2.0
"""init_lora_weights: what each begins with, by its definition and against PEFT where that takes the same base."""

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp

IDS = torch.arange(3, 51).view(2, 24)
MODULE = "model.layers.1.mlp.up_proj"  # (192, 64)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("init")
    peer.write_llama(root / "float")
    return root / "float"


def our_model(folder, four_bit=True):
    config = qlorapp.BitsAndBytesConfig(**NF4) if four_bit else None
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def adapted(folder, four_bit=True, seed=1, **options):
    config = qlorapp.LoraConfig(**{"r": 6, "lora_alpha": 12, "target_modules": "all-linear", **options})
    return qlorapp.get_peft_model(our_model(folder, four_bit), config, seed=seed)


def parts(model):
    layer = model.get_base_model().get_submodule(MODULE)
    weight = layer.base_layer(torch.eye(64)).T.detach()
    return weight, layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach(), layer.scaling["default"]


def whole(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")[f"{MODULE}.weight"]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def close(a, b, tolerance=1e-5):
    return torch.linalg.norm(a - b) <= tolerance * torch.linalg.norm(b)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "Gaussian"])
def test_random_ones_begin_as_the_base(base, init):
    model = adapted(base, init_lora_weights=init)
    _, a, b, _ = parts(model)
    assert close(logits(model), logits(our_model(base)))
    if init == "orthogonal":
        assert a.abs().sum() > 0 and b.abs().sum() > 0 and (b @ a).abs().max() <= 1e-5 * (b.abs().max() * a.abs().max())
    else:
        assert b.abs().sum() == 0
        deviation = 1 / 6 if init != True else (1 / 64) ** 0.5 / 3**0.5  # noqa: E712
        assert abs(a.std() / deviation - 1) < 0.15


def test_false_draws_both_as_peft_does(base):
    _, a, b, _ = parts(adapted(base, init_lora_weights=False))
    torch.manual_seed(0)
    model = peft.get_peft_model(
        peer.load_4bit(base), peft.LoraConfig(r=6, lora_alpha=12, target_modules=["up_proj"], init_lora_weights=False)
    )
    theirs = model.base_model.model.get_submodule(MODULE)
    for mine, other in ((a, theirs.lora_A["default"].weight), (b, theirs.lora_B["default"].weight)):
        assert abs(mine.std() / other.std() - 1) < 0.15 and mine.abs().max() <= mine.shape[1] ** -0.5


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora"])
def test_decompositions_are_pefts_on_a_float_base(base, init):
    import transformers

    ours = adapted(base, four_bit=False, init_lora_weights=init)
    theirs = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=6, lora_alpha=12, target_modules="all-linear", init_lora_weights=init, task_type="CAUSAL_LM"),
    )
    layer = theirs.base_model.model.get_submodule(MODULE)
    weight, a, b, scaling = parts(ours)
    if "niter" in init:  # a random subspace each: the part that is left is nearly the least there can be
        least = torch.linalg.norm(torch.linalg.svdvals(whole(base))[6:])
        assert torch.linalg.norm(weight) <= 1.02 * least and torch.linalg.norm(layer.base_layer.weight) <= 1.02 * least
    else:  # singular vectors have a sign of their own; the product and the rest have not
        assert close(b @ a, layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
        assert close(weight, layer.base_layer.weight)
    assert close(weight + scaling * b @ a, whole(base))
    assert close(logits(ours), logits(our_model(base, four_bit=False)))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_on_a_four_bit_base_the_parts_are_of_the_float_weight_and_the_rest_is_quantized(base, tmp_path, init):
    model = adapted(base, init_lora_weights=init)
    weight, a, b, scaling = parts(model)
    original = whole(base)
    rest = original - scaling * b @ a
    codes = qlorapp.Quantizer(quant_type="nf4", double_quant=False).quantize(rest)
    assert torch.equal(model.get_base_model().get_submodule(MODULE).base_layer.quant_state.packed, codes.packed)
    if init == "pissa":  # its claim: what is left has smaller entries, and is quantized with a smaller error
        plain = our_model(base).get_submodule(MODULE)(torch.eye(64)).T
        assert torch.linalg.norm(weight + scaling * b @ a - original) < torch.linalg.norm(plain - original)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    model.save_pretrained(tmp_path / "adapter")
    model.get_base_model().save_pretrained(tmp_path / "rest")
    expected = logits(model)
    theirs = peft.PeftModel.from_pretrained(peer.load_4bit(tmp_path / "rest"), tmp_path / "adapter").train()
    assert close(logits(theirs), expected)
    rest = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "rest", dtype=torch.float32)
    assert close(logits(qlorapp.PeftModel.from_pretrained(rest, tmp_path / "adapter")), expected)
    with pytest.raises(ValueError, match="Load the base that was saved beside it"):
        qlorapp.PeftModel.from_pretrained(our_model(base), tmp_path / "adapter")


@pytest.mark.parametrize("rounds", [1, 3])
def test_loftq_is_the_best_correction_of_the_quantization_error(base, rounds):
    plain = our_model(base).get_submodule(MODULE)(torch.eye(64)).T
    model = adapted(base, init_lora_weights="loftq", loftq_config=qlorapp.LoftQConfig(loftq_iter=rounds))
    weight, a, b, scaling = parts(model)
    original = whole(base)
    tail = torch.linalg.svdvals(original - weight)[6:]  # Eckart and Young: no matrix of rank 6 comes nearer
    error = torch.linalg.norm(original - weight - scaling * b @ a)
    assert abs(error - torch.linalg.norm(tail)) <= 1e-4 * error
    assert error < torch.linalg.norm(original - plain)
    assert torch.equal(weight, plain) == (rounds == 1)  # one round leaves the base as any loader quantizes it
    assert model.core.base_was_changed == (rounds > 1)


def test_what_needs_float_weights_says_so_where_there_are_none(base, tmp_path):
    our_model(base).save_pretrained(tmp_path / "codes")
    codes = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.float32)
    with pytest.raises(ValueError, match="as it was before it was quantized"):
        codes.add_adapters(qlorapp.LoraConfig(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}))
    assert not codes.peft_config
    model = qlorapp.get_peft_model(codes, qlorapp.LoraConfig(init_lora_weights="pissa", target_modules=["up_proj"], r=6))
    _, a, b, scaling = parts(model)
    dense = our_model(base).get_submodule(MODULE)(torch.eye(64)).T
    u, s, v = torch.linalg.svd(dense)
    assert close(scaling * b @ a, u[:, :6] * s[:6] @ v[:6], 1e-4)
    with pytest.raises(ValueError, match="has at most 64 ranks; r is 65"):
        adapted(base, init_lora_weights="pissa", r=65)
    with pytest.raises(ValueError, match="a model without adapters"):
        model.add_adapter("more", qlorapp.LoraConfig(init_lora_weights="olora"))
