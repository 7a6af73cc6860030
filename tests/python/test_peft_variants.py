# SPDX-License-Identifier: Apache-2.0
"""Each variant of a LoRA adapter of PEFT over this library's layers and over bitsandbytes', on the same codes: logits, gradients, files both ways."""

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from safetensors.torch import load_file, save_file

VARIANTS = {
    "plain": {},
    "default targets": {"target_modules": None},
    "rsLoRA": {"use_rslora": True, "r": 6},
    "ranks and alphas of their own": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"down_proj": 32, r"layers\.[02]\.self_attn\.q_proj": 1},
    },
    "some layers, some modules": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "layers_to_transform": [1, 2],
        "layers_pattern": "layers",
        "exclude_modules": ["layers.2.mlp.up_proj"],
    },
    "a regular expression": {"target_modules": r".*\.[12]\.(self_attn|mlp)\.(q|down)_proj"},
    "biases where there are none": {"bias": "all"},
    "DoRA": {"use_dora": True},
    "DoRA, rsLoRA, ranks of their own": {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 3}},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "both tables, DoRA": {"modules_to_save": ["embed_tokens", "lm_head"], "use_dora": True},
    "one shared table": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "one shared table by the name of the head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}
CASES = [(name, False) for name in VARIANTS] + [
    (name, True) for name in VARIANTS if {"modules_to_save"} & set(VARIANTS[name]) or name == "plain"
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The peer's codes, with a head of its own and with a tied one."""
    root = tmp_path_factory.mktemp("variants")
    for tied in (False, True):
        peer.write_llama(root / f"float {tied}", tie_word_embeddings=tied)
        peer.load_4bit(root / f"float {tied}").save_pretrained(root / f"codes {tied}")
    return root


def their_model(codes, **options):
    """PEFT's model with every trained value away from its start, so that nothing of it can go unnoticed."""
    model = peer.add_adapters(peer.load_4bit(codes), **{"r": 4, "lora_alpha": 10, **options})
    return peer.shaken(model)


def our_base(codes):
    return qlorapp.AutoModelForCausalLM.from_pretrained(codes, dtype=torch.float32)


BATCH = {"input_ids": torch.arange(3, 99).view(4, 24), "labels": torch.arange(3, 99).view(4, 24)}


def gradients(model):
    model.zero_grad(set_to_none=True)
    output = model(**BATCH)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


@pytest.mark.parametrize("name, tied", CASES, ids=[f"{name}{' (tied)' * tied}" for name, tied in CASES])
def test_logits_and_gradients_are_pefts_and_files_travel_both_ways(folders, tmp_path, name, tied):
    codes = folders / f"codes {tied}"
    theirs = their_model(codes, **VARIANTS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = peft.PeftModel.from_pretrained(our_base(codes), tmp_path / "theirs", is_trainable=True)

    expected, their_gradients = gradients(theirs)
    output, our_gradients = gradients(ours)
    assert (output.logits - expected.logits).abs().max() <= 1e-5 * expected.logits.abs().max()
    assert abs(output.loss - expected.loss) <= 1e-5
    assert set(our_gradients) == set(their_gradients)
    for parameter, gradient in their_gradients.items():
        error = torch.linalg.norm(our_gradients[parameter] - gradient) / torch.linalg.norm(gradient)
        assert error <= 1e-5, (parameter, error)
    described = {n: tuple(p.shape) for n, p in theirs.named_parameters() if p.requires_grad}
    assert {n: tuple(p.shape) for n, p in ours.named_parameters() if p.requires_grad} == described
    assert {n for n, _ in theirs.named_parameters()} == {n for n, _ in ours.named_parameters()}
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()

    engine = ours.get_base_model().forward.engine
    assert bool(engine._told) == bool({"use_dora", "modules_to_save"} & set(VARIANTS[name])), engine._told

    ours.save_pretrained(tmp_path / "ours")
    mine, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert set(mine) == set(other) and all(torch.equal(mine[key], other[key]) for key in other)
    back = peft.PeftModel.from_pretrained(peer.load_4bit(codes), tmp_path / "ours").train()
    with torch.no_grad():
        assert torch.equal(back(**BATCH).logits, expected.logits)


@pytest.mark.parametrize(
    "name", ["ranks and alphas of their own", "some layers, some modules", "default targets", "DoRA", "one shared table"]
)
def test_a_new_adapter_begins_as_its_base_and_has_the_parameters_over_bitsandbytes_layers(folders, name):
    codes = folders / f"codes {'shared' in name}"
    options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **VARIANTS[name]}
    theirs = peft.get_peft_model(peer.load_4bit(codes), peft.LoraConfig(**options))
    ours = qlorapp.get_peft_model(our_base(codes), qlorapp.LoraConfig(**options))
    described = [{n: tuple(p.shape) for n, p in m.named_parameters() if p.requires_grad} for m in (ours, theirs)]
    assert described[0] == described[1]
    with torch.no_grad():
        base = our_base(codes)(**BATCH).logits
        assert (ours(**BATCH).logits - base).abs().max() <= 2e-6 * base.abs().max()
    magnitudes = [{n: p for n, p in m.named_parameters() if "magnitude" in n} for m in (ours, theirs)]
    assert ("DoRA" in name) == bool(magnitudes[1])
    assert all(torch.allclose(magnitudes[0][n], p, rtol=1e-6) for n, p in magnitudes[1].items())


def test_dora_with_dropout_trains_through_both_paths(folders):
    torch.manual_seed(1)
    config = qlorapp.LoraConfig(use_dora=True, lora_dropout=0.3, r=4, task_type="CAUSAL_LM")
    ours = qlorapp.get_peft_model(our_base(folders / "codes False"), config).train()
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = ours(**BATCH).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_shared_table_that_the_file_holds_twice_must_be_one_for_cpp(folders, tmp_path):
    codes = folders / "codes True"
    their_model(codes, **VARIANTS["one shared table"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.lm_head.weight"] + 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    core = qlorapp.load_model(str(codes), compute_dtype=torch.float32)
    with pytest.raises(qlorapp.FormatError, match="must be equal"):
        core.load_adapter(str(tmp_path))
    assert not core.has_adapters


def test_a_value_that_is_set_is_computed_and_saved(folders, tmp_path):
    """PEFT's state dicts write into the memory that C++ reads."""
    theirs = their_model(folders / "codes False")
    ours = qlorapp.get_peft_model(
        our_base(folders / "codes False"),
        qlorapp.LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    gradients(ours)
    values = peft.get_peft_model_state_dict(theirs)
    peft.set_peft_model_state_dict(ours, values)
    expected = theirs(**BATCH).loss
    assert abs(ours(**BATCH).loss - expected) <= 1e-5 and not ours.get_base_model().forward.engine._told
    ours.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == values.keys() and all(torch.equal(saved[key], value) for key, value in values.items())


def test_several_adapters_over_four_bits_are_those_over_bitsandbytes(folders, tmp_path):
    codes = folders / "codes False"
    for i, options in enumerate(
        ({"r": 4, "lora_alpha": 40}, {"r": 2, "lora_alpha": 30, "target_modules": ["v_proj", "up_proj"]})
    ):
        peer.add_adapters(peer.load_4bit(codes), seed=i, **options).save_pretrained(tmp_path / f"{i}")
    models = []
    for base in (our_base(codes), peer.load_4bit(codes)):
        models.append(peft.PeftModel.from_pretrained(base, tmp_path / "0", adapter_name="first"))
        models[-1].load_adapter(tmp_path / "1", adapter_name="second")
        models[-1].add_weighted_adapter(["first", "second"], [0.7, 0.5], "both", combination_type="cat")
        models[
            -1
        ].train()  # PEFT's load_adapter sets evaluation mode, in which bitsandbytes multiplies in bfloat16 on CPUs that can
    with torch.no_grad():
        for name in ("second", "first", "both"):
            for model in models:
                model.set_adapter(name)
            ours, theirs = (model(**BATCH).logits for model in models)
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    models[0].save_pretrained(tmp_path / "ours")
    models[1].save_pretrained(tmp_path / "theirs")
    for name in ("first", "second", "both"):
        mine, other = (load_file(tmp_path / side / name / "adapter_model.safetensors") for side in ("ours", "theirs"))
        assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in other)
