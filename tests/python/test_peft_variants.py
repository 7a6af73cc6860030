# SPDX-License-Identifier: Apache-2.0
"""Each variant of a LoRA adapter against PEFT, on the same four-bit codes: logits, gradients, and files both ways."""

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from safetensors.torch import load_file

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
    ours = qlorapp.PeftModel.from_pretrained(our_base(codes), tmp_path / "theirs", is_trainable=True)

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

    # The trainer's own pass: the same gradients, into the arena.
    core = ours.core
    unpadded = core.unpad(BATCH["input_ids"], None, BATCH["labels"])
    core.zero_grad()
    loss, count = core.forward_backward(unpadded, torch.tensor(1.0 / unpadded.target_count))
    assert abs(loss / count - expected.loss) <= 1e-5
    for i, tensor in enumerate(core.parameters()):
        parameter = next(n for n, p in ours.named_parameters() if p is tensor)
        error = torch.linalg.norm(core.gradient(i) - their_gradients[parameter]) / torch.linalg.norm(their_gradients[parameter])
        assert error <= 1e-5, (parameter, error)

    ours.save_pretrained(tmp_path / "ours")
    mine, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert set(mine) == set(other) and all(torch.equal(mine[key], other[key]) for key in other)
    back = peft.PeftModel.from_pretrained(peer.load_4bit(codes), tmp_path / "ours").train()
    with torch.no_grad():
        assert torch.equal(back(**BATCH).logits, expected.logits)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "default targets"])
def test_a_new_adapter_begins_as_its_base_and_has_pefts_parameters(folders, name):
    codes = folders / "codes False"
    theirs = peer.add_adapters(peer.load_4bit(codes), **{"r": 4, **VARIANTS[name]})
    options = {"r": 4, "target_modules": "all-linear", **VARIANTS[name]}
    ours = qlorapp.get_peft_model(our_base(codes), qlorapp.LoraConfig(**options))
    described = [{n: tuple(p.shape) for n, p in m.named_parameters() if p.requires_grad} for m in (ours, theirs)]
    assert described[0] == described[1]
    with torch.no_grad():
        base = our_base(codes)(**BATCH).logits
        assert (ours(**BATCH).logits - base).abs().max() <= 2e-6 * base.abs().max()
    if "use_dora" in VARIANTS[name]:
        magnitudes = {n: p for n, p in ours.named_parameters() if "magnitude" in n}
        for n, _ in theirs.named_parameters():
            if "magnitude" not in n:
                continue
            weight = dict(theirs.named_modules())[n.split(".lora_magnitude_vector")[0]].base_layer.weight
            dense = torch.linalg.norm(dequantized(weight), dim=1)
            assert torch.allclose(magnitudes[n], dense, rtol=1e-6)


def dequantized(weight):
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()


def test_dora_with_dropout_trains_through_both_paths(folders):
    ours = qlorapp.get_peft_model(
        our_base(folders / "codes False"), qlorapp.LoraConfig(use_dora=True, lora_dropout=0.3, r=4), seed=1
    )
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = ours(**BATCH).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert ours.eval()(**BATCH).loss.item() == ours(**BATCH).loss.item()


def test_a_shared_table_that_the_file_holds_twice_must_be_one(folders, tmp_path):
    from safetensors.torch import save_file

    codes = folders / "codes True"
    their_model(codes, **VARIANTS["one shared table"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.lm_head.weight"] + 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = our_base(codes)
    with pytest.raises(qlorapp.FormatError, match="one table"):
        qlorapp.PeftModel.from_pretrained(model, tmp_path)
    assert not model.core.has_adapters and not model.peft_config


def test_training_with_full_tables_by_the_trainer_changes_them_and_the_file_says_so(folders, tmp_path):
    codes = folders / "codes True"
    rows = [{"input_ids": list(range(5, 25))}, {"input_ids": list(range(40, 70))}]
    ours = qlorapp.get_peft_model(
        our_base(codes), qlorapp.LoraConfig(r=4, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    )
    args = qlorapp.TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=6, learning_rate=1e-2, save_strategy="no",
                                     optim="adamw_8bit", per_device_train_batch_size=2)  # fmt: skip
    qlorapp.Trainer(ours, args, train_dataset=rows).train()
    ours.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    table = saved["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(table, saved["base_model.model.lm_head.weight"])
    assert not torch.equal(table, ours.get_base_model().model.embed_tokens.original_module.weight)
    theirs = peft.PeftModel.from_pretrained(peer.load_4bit(codes), tmp_path / "adapter").train()
    with torch.no_grad():
        expected = theirs(**BATCH).logits
        assert (ours.eval()(**BATCH).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
