# SPDX-License-Identifier: Apache-2.0
"""PeftModel with several adapters, beside PEFT's own on the same four-bit codes."""

import json
import pathlib

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp

IDS = torch.arange(3, 51).view(2, 24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four-bit codes, and two adapters of PEFT for them."""
    root = tmp_path_factory.mktemp("several")
    peer.write_llama(root / "float")
    peer.load_4bit(root / "float").save_pretrained(root / "codes")
    for seed, options in enumerate(
        ({"r": 4, "lora_alpha": 40}, {"r": 2, "lora_alpha": 30, "target_modules": ["v_proj", "up_proj"]})
    ):
        peer.add_adapters(peer.load_4bit(root / "codes"), seed=seed, **options).save_pretrained(root / f"adapter {seed}")
    return root


def our_base(root):
    return qlorapp.AutoModelForCausalLM.from_pretrained(root / "codes", dtype=torch.float32)


def with_two_adapters(cls, base, root, **options):
    model = cls.from_pretrained(base, root / "adapter 0", adapter_name="first", **options)
    model.load_adapter(root / "adapter 1", adapter_name="second", **options)
    return model


@pytest.fixture
def both(folders):
    ours = with_two_adapters(qlorapp.PeftModel, our_base(folders), folders)
    theirs = with_two_adapters(peft.PeftModel, peer.load_4bit(folders / "codes"), folders).train()
    return ours, theirs


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_alike(ours, theirs):
    expected = logits(theirs)
    assert (logits(ours) - expected).abs().max() <= 1e-5 * expected.abs().max()


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_active_adapter_computes_and_disabling_gives_the_base(both, folders):
    ours, theirs = both
    seen = []
    for name in ("first", "second", "first"):
        ours.set_adapter(name)
        theirs.set_adapter(name)
        assert ours.active_adapter == theirs.active_adapter == name and ours.active_adapters == theirs.active_adapters == [name]
        assert ours.active_peft_config.r == theirs.active_peft_config.r
        assert_alike(ours, theirs)
        seen.append(logits(ours))
        with ours.disable_adapter(), theirs.disable_adapter():
            assert_alike(ours, theirs)
            with ours.disable_adapter():  # nested
                pass
            seen.append(logits(ours))
        assert torch.equal(logits(ours), seen[-2])
    base = logits(our_base(folders))
    assert all(torch.equal(one, base) for one in seen[1::2])
    assert torch.equal(seen[0], seen[4]) and (seen[0] - seen[2]).abs().max() > 1e-2


def test_what_trains_is_what_trains_in_peft(both):
    ours, theirs = both
    assert trainable(ours) == trainable(theirs) == set()
    for options in ({}, {"inference_mode": True}):
        ours.set_adapter("second", **options)
        theirs.set_adapter("second", **options)
        assert trainable(ours) == trainable(theirs)
        assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
    assert set(dict(ours.named_parameters())) == set(dict(theirs.named_parameters()))
    assert set(ours.state_dict()) == set(theirs.state_dict())


def test_a_new_adapter_beside_others_is_frozen_until_it_is_set(both):
    ours, theirs = both
    ours.set_adapter("first")
    theirs.set_adapter("first")
    before = trainable(ours)
    options = {"r": 3, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    ours.add_adapter("third", qlorapp.LoraConfig(**options))
    theirs.add_adapter("third", peft.LoraConfig(**options))
    assert list(ours.peft_config) == list(theirs.peft_config) == ["first", "second", "third"]
    assert trainable(ours) == trainable(theirs) == before and ours.active_adapter == "first"
    assert_alike(ours, theirs)
    ours.set_adapter("third")
    theirs.set_adapter("third")
    assert trainable(ours) == trainable(theirs) != before
    assert_alike(ours, theirs)  # both begin as the base
    ours.train()
    ours(input_ids=IDS, labels=IDS).loss.backward()
    touched = {name for name, p in ours.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert touched and touched <= trainable(ours)


def test_a_deleted_adapter_is_gone_and_the_first_of_the_others_is_active(both):
    ours, theirs = both
    for model in both:
        model.set_adapter("first")
        model.delete_adapter("first")
    assert ours.active_adapter == "second" and ours.active_adapters == ["second"]
    theirs.set_adapter("second")  # PEFT 0.21.2 says that it does so itself, and is left with none
    assert list(ours.peft_config) == list(theirs.peft_config) == ["second"]
    assert set(dict(ours.named_parameters())) == set(dict(theirs.named_parameters()))
    assert_alike(ours, theirs)
    base = ours.unload()
    assert not base.peft_config and not base.core.has_adapters
    assert all("lora" not in name and "base_layer" not in name for name, _ in base.named_modules())


def test_named_adapters_are_saved_into_folders_of_their_names(both, tmp_path, folders):
    ours, theirs = both
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("first", "second"):
        files = [tmp_path / side / name / "adapter_model.safetensors" for side in ("ours", "theirs")]
        mine, other = (qlorapp_tensors(file) for file in files)
        assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in other)
        assert json.loads((files[0].parent / "adapter_config.json").read_text())["r"] == theirs.peft_config[name].r
    ours.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["second"]
    back = with_two_adapters_of(qlorapp.PeftModel, our_base(folders), tmp_path / "theirs")
    assert_alike(back, theirs)
    with pytest.raises(ValueError, match="there is no adapter 'x'"):
        ours.save_pretrained(tmp_path, selected_adapters=["x"])


def with_two_adapters_of(cls, base, folder):
    model = cls.from_pretrained(base, folder / "first", adapter_name="first")
    model.load_adapter(folder, adapter_name="second", subfolder="second")
    return model


def qlorapp_tensors(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_state_dicts_of_adapters_are_pefts_and_can_be_set(both):
    ours, theirs = both
    for name in ("first", "second"):
        mine, other = (
            qlorapp.get_peft_model_state_dict(ours, adapter_name=name),
            peft.get_peft_model_state_dict(theirs, adapter_name=name),
        )
        assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in other)
        whole = qlorapp.get_peft_model_state_dict(ours, ours.state_dict(), adapter_name=name)
        assert all(torch.equal(whole[key], other[key]) for key in other)
    doubled = {key: 2 * value for key, value in mine.items()}
    qlorapp.set_peft_model_state_dict(ours, doubled, adapter_name="second")
    peft.set_peft_model_state_dict(theirs, doubled, adapter_name="second")
    ours.set_adapter("second")
    theirs.set_adapter("second")
    assert_alike(ours, theirs)
    key = next(iter(doubled))
    with pytest.raises(KeyError, match="missing"):
        qlorapp.set_peft_model_state_dict(ours, {k: v for k, v in doubled.items() if k != key}, adapter_name="second")
    with pytest.raises(ValueError, match="must have shape"):
        qlorapp.set_peft_model_state_dict(ours, doubled | {key: torch.zeros(1)}, adapter_name="second")


def test_parameters_of_an_adapter_that_was_replaced_while_inactive_are_noticed(both, tmp_path):
    ours, _ = both
    ours.set_adapter("first")
    name, parameter = next((n, p) for n, p in ours.named_parameters() if n.endswith("lora_B.second.weight"))
    parameter.data = torch.full_like(parameter, 0.5)
    ours.save_pretrained(tmp_path, selected_adapters=["second"])
    saved = qlorapp_tensors(tmp_path / "second" / "adapter_model.safetensors")
    assert (saved[name.replace(".second", "")] == 0.5).all()
    before = logits(ours)
    ours.set_adapter("second")
    assert (logits(ours) - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda m: m.set_adapter("frist"),
            ValueError,
            "no adapters named 'frist'; the model has .*first.*Did you mean 'first'",
        ),
        (lambda m: m.set_adapter(["first", "second"]), ValueError, "one adapter is active at a time"),
        (lambda m: m.add_adapter("first", qlorapp.LoraConfig()), ValueError, "has adapters named 'first' already"),
        (lambda m: m.delete_adapter("x"), ValueError, "no adapters named 'x'"),
        (
            lambda m: m.merge_and_unload(),
            NotImplementedError,
            "merge_and_unload: .*qlorapp\\.merge\\(model_folder, adapter_folder, output\\)",
        ),
        (lambda m: m.add_weighted_adapter(["first"], [1.0], "x"), NotImplementedError, "add_weighted_adapter: one adapter"),
        (lambda m: m.save_pretrained("x", safe_serialization=False), ValueError, "safetensors only"),
        (lambda m: m.save_pretrained("x", save_embedding_layers=True), ValueError, "Name them in modules_to_save"),
        (lambda m: m.save_pretrained("x", selcted_adapters=[]), TypeError, "Did you mean 'selected_adapters'"),
        (lambda m: m.load_adapter("x", adaptername="y"), TypeError, "Did you mean 'adapter_name'"),
        (lambda m: qlorapp.get_peft_model(m, qlorapp.LoraConfig()), TypeError, "add_adapter"),
        (lambda m: m.no_such_thing, AttributeError, "no_such_thing"),
    ],
)
def test_what_cannot_be_says_why(folders, call, error, text):
    model = with_two_adapters(qlorapp.PeftModel, our_base(folders), folders)
    with pytest.raises(error, match=text):
        call(model)


def test_a_config_in_inference_mode_makes_a_frozen_adapter(folders):
    options = {"r": 2, "inference_mode": True, "task_type": "CAUSAL_LM"}
    ours = qlorapp.get_peft_model(our_base(folders), qlorapp.LoraConfig(**options), adapter_name="mine")
    assert trainable(ours) == set() and ours.active_adapter == "mine"
    assert qlorapp.PeftModelForCausalLM is qlorapp.PeftModel


def test_models_are_saved_as_scripts_for_accelerate_do(folders, tmp_path):
    model = with_two_adapters(qlorapp.PeftModel, our_base(folders), folders)
    base, file = model.get_base_model(), pathlib.Path("first") / "adapter_model.safetensors"
    model.save_pretrained(tmp_path / "alone", is_main_process=False, save_function=torch.save, state_dict={})
    base.save_pretrained(tmp_path / "alone", is_main_process=False, save_function=torch.save, state_dict={})
    assert not (tmp_path / "alone").exists()
    model.save_pretrained(tmp_path / "plain")
    of_file = qlorapp.get_peft_model_state_dict(model, adapter_name="first")
    for state in (model.state_dict(), of_file):
        selected = {"selected_adapters": ["first"], "save_function": torch.save}
        model.save_pretrained(tmp_path / "given", is_main_process=True, state_dict=state, **selected)
        assert (tmp_path / "given" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
        name = next(name for name in state if "lora_B" in name and "second" not in name)
        for wrong, why in (({**state, name: state[name] + 1}, "has other values"), ({}, "it has no")):
            with pytest.raises(ValueError, match=rf"\[save_pretrained\] state_dict must hold .*{why}"):
                model.save_pretrained(tmp_path / "wrong", state_dict=wrong, **selected)
    state = base.state_dict()
    base.save_pretrained(tmp_path / "base", state_dict=state, save_function=torch.save, max_shard_size="1GB")
    norm = "model.norm.weight"
    for wrong, why in (({**state, norm: state[norm] * 2}, f"'{norm}' has other values"), (of_file, "it has no")):
        with pytest.raises(ValueError, match=rf"\[save_pretrained\] state_dict must hold .*{why}"):
            base.save_pretrained(tmp_path / "wrong", state_dict=wrong)
    assert not (tmp_path / "wrong").exists() and (tmp_path / "base").exists()
