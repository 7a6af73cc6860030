# SPDX-License-Identifier: Apache-2.0
"""How adapters begin: C++'s initializations against PEFT's and linear algebra, and PEFT's own over this library's layers."""

import json

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
import transformers
from safetensors.torch import load_file

MODULE = "model.layers.1.mlp.up_proj"  # (192, 64)
IDS = torch.arange(3, 99).view(4, 24)
OPTIONS = {"r": 6, "lora_alpha": 12, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("init")
    peer.write_llama(root / "float")
    return root / "float"


def plain(folder, four_bit=True):
    return qlorapp.load_model(str(folder), compute_dtype=torch.float32, load_in_4bit=four_bit, double_quant=False)


def adapted(folder, four_bit=True, **options):
    model = plain(folder, four_bit)
    model.add_adapters(json.dumps({**OPTIONS, **options}), 1, weights=str(folder))
    return model


def stored(model):
    return dict(model.named_weights())[f"{MODULE}.weight"]


def parts(model):
    """W, A, B and the scaling of one layer."""
    weight, tensors = stored(model), dict(zip(model.adapter_names(), model.parameters(), strict=True))
    dense = weight if isinstance(weight, torch.Tensor) else qlorapp.Quantizer().dequantize(weight)
    a, b = (tensors[f"base_model.model.{MODULE}.lora_{side}.weight"].detach() for side in "AB")
    return dense.detach(), a, b, OPTIONS["lora_alpha"] / OPTIONS["r"]


def whole(folder):
    return load_file(folder / "model.safetensors")[f"{MODULE}.weight"]


def logits(model):
    with torch.no_grad():
        if isinstance(model, torch.nn.Module):
            return model(input_ids=IDS).logits
        batch = model.unpad(IDS)
        return batch.pad(model.logits(model.hidden_states(batch, False)))


def close(a, b, tolerance=1e-5):
    return torch.linalg.norm(a - b) <= tolerance * torch.linalg.norm(b)


# --- C++


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_random_ones_begin_as_the_base(base, init):
    model = adapted(base, init_lora_weights=init)
    _, a, b, _ = parts(model)
    assert close(logits(model), logits(plain(base)))
    if init == "orthogonal":
        assert a.abs().sum() > 0 and b.abs().sum() > 0 and (b @ a).abs().max() <= 1e-5 * (b.abs().max() * a.abs().max())
    else:
        assert b.abs().sum() == 0
        deviation = 1 / 6 if init == "gaussian" else (1 / 64) ** 0.5 / 3**0.5
        assert abs(a.std() / deviation - 1) < 0.15


def test_false_draws_both_as_peft_does(base):
    _, a, b, _ = parts(adapted(base, init_lora_weights=False))
    torch.manual_seed(0)
    theirs = peft.get_peft_model(peer.load_4bit(base), peft.LoraConfig(**OPTIONS, init_lora_weights=False))
    layer = theirs.base_model.model.get_submodule(MODULE)
    for mine, other in ((a, layer.lora_A["default"].weight), (b, layer.lora_B["default"].weight)):
        assert abs(mine.std() / other.std() - 1) < 0.15 and mine.abs().max() <= mine.shape[1] ** -0.5


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora"])
def test_decompositions_are_pefts_on_a_float_base(base, init):
    theirs = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(**OPTIONS, init_lora_weights=init)
    )
    layer = theirs.base_model.model.get_submodule(MODULE)
    ours = adapted(base, four_bit=False, init_lora_weights=init)
    weight, a, b, scaling = parts(ours)
    if "niter" in init:  # a random subspace each: the part that is left is nearly the least there can be
        least = torch.linalg.norm(torch.linalg.svdvals(whole(base))[6:])
        assert torch.linalg.norm(weight) <= 1.02 * least and torch.linalg.norm(layer.base_layer.weight) <= 1.02 * least
    else:  # singular vectors have a sign of their own; the product and the rest have not
        assert close(b @ a, layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
        assert close(weight, layer.base_layer.weight)
    assert close(weight + scaling * b @ a, whole(base))
    assert close(logits(ours), logits(plain(base, four_bit=False)))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_on_a_four_bit_base_the_parts_are_of_the_float_weight_and_the_rest_is_quantized(base, tmp_path, init):
    model = adapted(base, init_lora_weights=init)
    weight, a, b, scaling = parts(model)
    original = whole(base)
    codes = qlorapp.Quantizer(quant_type="nf4", double_quant=False).quantize(original - scaling * b @ a)
    assert torch.equal(stored(model).packed, codes.packed)
    if init == "pissa":  # its claim: what is left has smaller entries, and is quantized with a smaller error
        dense = parts(adapted(base))[0]
        assert torch.linalg.norm(weight + scaling * b @ a - original) < torch.linalg.norm(dense - original)
    model.save_adapter(str(tmp_path / "adapter"), "rest")
    model.save(str(base), str(tmp_path / "rest"))
    theirs = peft.PeftModel.from_pretrained(peer.load_4bit(tmp_path / "rest"), tmp_path / "adapter").train()
    assert close(logits(theirs), logits(model))
    again = plain(tmp_path / "rest")
    again.load_adapter(str(tmp_path / "adapter"))
    assert close(logits(again), logits(model))
    with pytest.raises(ValueError, match="Load the base that was saved with it"):
        plain(base).load_adapter(str(tmp_path / "adapter"))


@pytest.mark.parametrize("rounds", [1, 3])
def test_loftq_is_the_best_correction_of_the_quantization_error(base, rounds):
    dense = parts(adapted(base))[0]
    model = adapted(base, init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": rounds})
    weight, a, b, scaling = parts(model)
    original = whole(base)
    tail = torch.linalg.svdvals(original - weight)[6:]  # Eckart and Young: no matrix of rank 6 comes nearer
    error = torch.linalg.norm(original - weight - scaling * b @ a)
    assert abs(error - torch.linalg.norm(tail)) <= 1e-4 * error
    assert error < torch.linalg.norm(original - dense)
    assert torch.equal(weight, dense) == (rounds == 1)  # one round leaves the base as any loader quantizes it
    assert model.base_was_changed == (rounds > 1)


def test_what_needs_float_weights_says_so_where_there_are_none(base, tmp_path):
    dense = parts(adapted(base))[0]
    plain(base).save(str(base), str(tmp_path / "codes"))
    codes = plain(tmp_path / "codes")
    with pytest.raises(ValueError, match="as it was before it was quantized"):
        codes.add_adapters(
            json.dumps({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}), 0, weights=str(tmp_path / "codes")
        )
    assert not codes.has_adapters
    model = adapted(tmp_path / "codes", init_lora_weights="pissa", target_modules=["up_proj"])
    _, a, b, scaling = parts(model)
    u, s, v = torch.linalg.svd(dense)
    assert close(scaling * b @ a, u[:, :6] * s[:6] @ v[:6], 1e-4)
    with pytest.raises(ValueError, match="has at most 64 ranks; r is 65"):
        adapted(base, init_lora_weights="pissa", r=65)
    with pytest.raises(ValueError, match="a model without adapters"):
        model.add_adapters(json.dumps({"init_lora_weights": "olora"}), 0, "more")


# --- PEFT


def test_pefts_olora_over_four_bits_is_that_over_bitsandbytes_layers(base, tmp_path):
    """It changes the base, which is put in four bits again."""
    config = {**OPTIONS, "init_lora_weights": "olora", "task_type": "CAUSAL_LM"}
    peer.load_4bit(base).save_pretrained(tmp_path / "codes")
    theirs = peft.get_peft_model(peer.load_4bit(tmp_path / "codes"), peft.LoraConfig(**config))
    read = qlorapp.AutoModelForCausalLM.from_pretrained
    ours = qlorapp.get_peft_model(read(tmp_path / "codes", dtype=torch.float32), peft.LoraConfig(**config))
    layers = [model.get_base_model().get_submodule(MODULE) for model in (ours, theirs)]
    for side in ("lora_A", "lora_B"):
        assert close(*(getattr(layer, side)["default"].weight for layer in layers))
    assert (layers[0].base_layer.weight == layers[1].base_layer.weight).float().mean() >= 0.999
    expected = logits(ours)
    ours.peft_config["default"].init_lora_weights = True  # what is read is not to be begun again
    ours.save_pretrained(tmp_path / "adapter")
    ours.unload().save_pretrained(tmp_path / "rest")
    again = peft.PeftModel.from_pretrained(peer.load_4bit(tmp_path / "rest"), tmp_path / "adapter").train()
    assert close(logits(again), expected)


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal"])
def test_pefts_own_over_float_layers_begin_as_the_base(base, init):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(base)
    before = logits(model)
    config = peft.LoraConfig(**OPTIONS, init_lora_weights=init, task_type="CAUSAL_LM")
    assert close(logits(qlorapp.get_peft_model(model, config)), before)
