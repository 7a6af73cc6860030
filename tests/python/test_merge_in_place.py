# SPDX-License-Identifier: Apache-2.0
"""merge_and_unload() over weights of 16 and 32 bits, beside PEFT's."""

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import qlorapp
from test_merge import CASES, logits, plain, trained
from test_peft_variants import VARIANTS

#: What trains embedding or head away from the table that they share.
PARTED = {"embedding", "head", "both tables, DoRA"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("merge in place")
    for tied in (False, True):
        peer.write_llama(root / f"float {tied}", tie_word_embeddings=tied)
    return root


def read(folder, **options):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("name, tied", CASES, ids=[f"{name}{' (tied)' * tied}" for name, tied in CASES])
def test_dense_weights_get_what_pefts_merge_gives_them(root, tmp_path, name, tied):
    folder = root / f"float {tied}"
    theirs = trained(plain(folder), **VARIANTS[name])
    theirs.save_pretrained(tmp_path / "adapter")
    model = qlorapp.PeftModel.from_pretrained(read(folder), tmp_path / "adapter")
    before = logits(model)
    if tied and name in PARTED:
        with pytest.raises(NotImplementedError, match=r"away from the table that embedding and head share.*qlorapp\.merge\("):
            model.merge_and_unload()
        assert torch.equal(logits(model), before)
        return
    merged = model.merge_and_unload()
    assert isinstance(merged, qlorapp.CausalLM) and merged.peft_config == {} and not merged.core.has_adapters
    expected = theirs.merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert set(ours) == set(expected)
    for tensor, value in ours.items():
        assert torch.allclose(value, expected[tensor], rtol=0, atol=1e-6 * expected[tensor].abs().max().item()), tensor
    assert (logits(merged) - before).abs().max() <= 1e-5 * before.abs().max()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(read(tmp_path / "merged")), logits(merged))


def test_a_sixteen_bit_base_merges_by_the_calls_that_scripts_have(root, tmp_path):
    folder = root / "float False"
    trained(plain(folder)).save_pretrained(tmp_path / "adapter")
    base = read(folder, torch_dtype=torch.float16)
    model = qlorapp.PeftModel.from_pretrained(base, tmp_path / "adapter")
    before = logits(model)
    merged = model.merge_and_unload(progressbar=True, safe_merge=True)
    assert merged is base and (logits(merged) - before).abs().max() <= 1e-2 * before.abs().max()
    config = qlorapp.PeftConfig.from_pretrained(tmp_path / "adapter")
    config.base_model_name_or_path = str(folder)
    again = qlorapp.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", config=config, dtype=torch.float16)
    assert torch.equal(logits(again.merge_and_unload()), logits(merged))
    assert qlorapp.get_peft_model(merged, qlorapp.LoraConfig(r=2)).active_adapter == "default"


def test_adapters_are_merged_by_name_and_the_others_left_out(root):
    model = qlorapp.get_peft_model(read(root / "float False"), qlorapp.LoraConfig(r=2, init_lora_weights=False), "a")
    model.add_adapter("b", qlorapp.LoraConfig(r=2, init_lora_weights=False))
    model.set_adapter("b")
    expected = logits(model)
    model.set_adapter("a")
    with pytest.raises(ValueError, match=r"there is no adapter 'c'; the model has \['a', 'b'\]"):
        model.merge_and_unload(adapter_names=["c"])
    assert (logits(model.merge_and_unload(adapter_names=["b"])) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_safe_merge_changes_nothing_where_a_sum_is_not_finite(root):
    model = qlorapp.get_peft_model(read(root / "float False"), qlorapp.LoraConfig(r=2))
    base = {name: value.clone() for name, value in model.get_base_model().state_dict().items() if "base_layer" in name}
    broken = model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["default"].weight
    with torch.no_grad():
        broken[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"with the adapter 'default', model\.layers\.1\.self_attn\.v_proj is not finite"):
        model.merge_and_unload(safe_merge=True)
    now = model.get_base_model().state_dict()
    assert all(torch.equal(now[name], value) for name, value in base.items())


def test_four_bits_and_merges_that_are_undone_are_refused_with_the_way_out(root):
    model = qlorapp.get_peft_model(read(root / "float False", load_in_4bit=True, device_map="cpu"), qlorapp.LoraConfig(r=2))
    with pytest.raises(
        NotImplementedError, match="four-bit weights would be quantized a second time. Load the base in 16 bits"
    ):
        model.merge_and_unload()
    with pytest.raises(
        NotImplementedError, match=r"merge_adapter: .*merge_and_unload\(\) merges into weights of 16 or 32 bits"
    ):
        model.merge_adapter()
