# SPDX-License-Identifier: Apache-2.0
"""merge_and_unload() and merge_adapter() of PEFT over this library's layers: dense ones as PEFT's, four bits as over bitsandbytes'."""

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from qlorapp.hf.forward import engine_of
from test_merge import logits, plain, trained
from test_peft_variants import VARIANTS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("merge in place")
    for tied in (False, True):
        peer.write_llama(root / f"float {tied}", tie_word_embeddings=tied)
    peer.load_4bit(root / "float False").save_pretrained(root / "codes")
    return root


def read(folder, **options):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("name", "tied"),
    [("ranks and alphas of their own", False), ("DoRA", False), ("both tables, DoRA", False), ("embedding", True)],
)
def test_dense_weights_get_what_pefts_merge_gives_them(root, tmp_path, name, tied):
    folder = root / f"float {tied}"
    theirs = trained(plain(folder), **VARIANTS[name])
    theirs.save_pretrained(tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(read(folder), tmp_path / "adapter").merge_and_unload()
    expected = theirs.merge_and_unload()
    state = expected.state_dict()
    assert set(merged.state_dict()) == set(state)
    for tensor, value in merged.state_dict().items():
        assert torch.allclose(value, state[tensor], rtol=0, atol=1e-6 * state[tensor].abs().max().item()), tensor
    assert (logits(merged) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()
    merged.save_pretrained(tmp_path / "merged")
    assert (logits(read(tmp_path / "merged")) - logits(merged)).abs().max() <= 1e-5 * logits(merged).abs().max()


def test_four_bits_get_the_codes_that_pefts_merge_gives_bitsandbytes_layers(root, tmp_path):
    """Read back from a folder, by PEFT's own class, without a pass before."""
    peer.shaken(peer.add_adapters(peer.load_4bit(root / "codes"))).save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(peer.load_4bit(root / "codes"), tmp_path / "adapter").merge_and_unload()
    ours = peft.PeftModel.from_pretrained(read(root / "codes", dtype=torch.float32), tmp_path / "adapter").merge_and_unload()
    packed = [name for name, value in theirs.state_dict().items() if value.dtype == torch.uint8 and name.endswith("weight")]
    assert len(packed) == 21
    for name in packed:  # a sum in another order may cross the middle between two codes
        same = ours.state_dict()[name] == theirs.state_dict()[name]
        assert same.float().mean() >= 0.999, name
    ours.save_pretrained(tmp_path / "merged")
    again = read(tmp_path / "merged", dtype=torch.float32)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())
    assert (logits(again) - logits(ours)).abs().max() <= 1e-5 * logits(ours).abs().max()
    assert not any("lora" in name or "base_layer" in name for name, _ in ours.named_modules())


MAKERS = {
    "PEFT's from_pretrained": lambda model, folder: peft.PeftModel.from_pretrained(model, folder),
    "PEFT's get_peft_model": lambda model, folder: peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder)),
    "transformers' load_adapter": lambda model, folder: (model.load_adapter(str(folder)), model)[1],
    "added": lambda model, folder: peft.get_peft_model(model, peft.LoraConfig(r=2), "first").load_adapter(folder, "second") and model,
}  # fmt: skip


@pytest.mark.parametrize(("maker", "use_dora"), [*((maker, False) for maker in MAKERS), ("PEFT's from_pretrained", True)])
def test_a_merge_that_is_undone_leaves_the_very_codes_and_the_engine(root, tmp_path, maker, use_dora):
    config = {
        "r": 4,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "use_dora": use_dora,
        "init_lora_weights": False,
    }
    peft.get_peft_model(plain(root / "float False"), peft.LoraConfig(**config)).save_pretrained(tmp_path)
    model = MAKERS[maker](read(root / "codes", dtype=torch.float32), tmp_path)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tuned = [module for module in base.modules() if isinstance(module, peft.tuners.lora.Linear)]
    for module in tuned:
        module.set_adapter(list(module.lora_A)[-1:])
    before, codes = logits(model), {name: value.clone() for name, value in base.state_dict().items()}
    reasons = set(engine_of(base)._told)
    for safe in (False, True):
        for module in tuned:
            module.merge(safe_merge=safe)
        merged = logits(model)
        assert 0 < (merged - before).abs().max() < before.abs().max()
        for module in tuned:
            module.unmerge()
        assert all(torch.equal(value, codes[name]) for name, value in base.state_dict().items())
        engine_of(base)._told.clear()
        assert torch.equal(logits(model), before)
        assert engine_of(base)._told == reasons  # only DoRA has one


def test_a_safe_merge_changes_nothing_where_a_sum_is_not_finite(root):
    model = qlorapp.get_peft_model(read(root / "codes"), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    before = layer.base_layer.weight.clone()
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="The adapter default seems to be broken"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, before) and not layer.merged


def test_a_bias_of_an_adapter_is_not_lost(root):
    config = peft.LoraConfig(r=2, lora_bias=True, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lora_bias cannot be merged into a layer without bias"):
        qlorapp.get_peft_model(read(root / "codes"), config).merge_and_unload()
