# SPDX-License-Identifier: Apache-2.0
"""PeftModel with several adapters, beside PEFT's own on the same four-bit codes."""

import dataclasses
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
    with pytest.raises(ValueError, match="must have shape"):
        qlorapp.set_peft_model_state_dict(ours, doubled | {key: torch.zeros(1)}, adapter_name="second")


def test_a_part_of_an_adapter_can_be_set_as_in_peft(both, caplog):
    mine = qlorapp.get_peft_model_state_dict(both[0], adapter_name="second")
    names = sorted(mine)
    part = {name: 3 * mine[name] for name in names[:3]}
    more = {"of.others.lora_A.weight": torch.ones(2), names[3].replace("layers.0", "layers.99"): mine[names[3]]}
    results = []
    for model, package in zip(both, (qlorapp, peft), strict=True):
        results.append(package.set_peft_model_state_dict(model, {**part, **more}, adapter_name="second"))
        model.set_adapter("second")
    told, theirs = results
    assert sorted(told.missing_keys) == sorted(key for key in theirs.missing_keys if "lora_" in key and ".second." in key)
    assert len(told.missing_keys) == len(names) - 3 and sorted(told.unexpected_keys) == sorted(
        theirs.unexpected_keys
    ) == sorted(more)
    assert f"{len(names) - 3} of {len(names)} parameters of 'second' get no value and stay" in caplog.text
    assert "2 names are not the adapter's (of.others.lora_A.weight" in caplog.text
    assert_alike(*both)
    with pytest.raises(KeyError, match="names must be those of get_peft_model_state_dict"):
        qlorapp.set_peft_model_state_dict(both[0], more, adapter_name="second")
    caplog.clear()
    missing, unexpected = qlorapp.set_peft_model_state_dict(both[0], mine, adapter_name="second")
    assert not missing and not unexpected and not caplog.text


def test_a_model_that_has_adapters_gets_one_more(both, caplog):
    """As where a cell of a notebook is run again."""
    made = []
    for model, package in zip(both, (qlorapp, peft), strict=True):
        config = package.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        made.append(package.get_peft_model(model, config, adapter_name="third"))
    ours, theirs = made
    assert ours.active_adapter == theirs.active_adapter == "third" and list(ours.peft_config) == list(theirs.peft_config)
    assert "has adapters already, ['first', 'second']: 'third' comes beside them. Call unload() first" in caplog.text
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B.third" in name:
                parameter.fill_(0.1)
    changed = logits(ours)
    with pytest.raises(ValueError, match="names no linear layer of this model"):  # and nothing is lost
        qlorapp.get_peft_model(ours, qlorapp.LoraConfig(r=2, target_modules=["no_such_proj"]), adapter_name="third")
    assert torch.equal(logits(ours), changed) and list(ours.peft_config) == ["first", "second", "third"]
    caplog.clear()
    config = qlorapp.LoraConfig(r=2, target_modules=["q_proj"])
    for model in (ours, ours.get_base_model()):
        again = qlorapp.get_peft_model(model, config, adapter_name="third")
        assert "'third' is made anew, and what it has learnt is dropped" in caplog.text and again.training
        assert trainable(again) == {name for name, _ in again.named_parameters() if ".third." in name} != set()
        with again.disable_adapter():
            base = logits(again)
        assert torch.equal(logits(again), base) and not torch.equal(base, changed)
        assert again.peft_config["third"].r == 2 and again.get_base_model() is ours.get_base_model()


def test_layers_of_adapters_are_turned_off_and_on(both):
    expected = [logits(model) for model in both]
    for model in both:
        assert not model.base_model.model.model.layers[0].mlp.up_proj.disable_adapters
        assert model.disable_adapter_layers() is None
        assert model.base_model.model.model.layers[0].mlp.up_proj.disable_adapters
    assert_alike(*both)
    assert not torch.equal(logits(both[0]), expected[0]) and not both[0].get_model_status().enabled
    for model, before in zip(both, expected, strict=True):
        assert model.base_model.enable_adapter_layers() is None
        assert torch.equal(logits(model), before)


def test_the_status_of_adapters_is_pefts(both):
    ours, theirs = both
    for name in ("second", "first"):
        for model in both:
            model.set_adapter(name)
        assert dataclasses.asdict(ours.get_model_status()) == dataclasses.asdict(theirs.get_model_status())
        pairs = zip(ours.get_layer_status(), theirs.get_layer_status(), strict=True)
        assert all(dataclasses.asdict(mine) == dataclasses.asdict(other) for mine, other in pairs)
        assert ours.base_model.active_adapter == theirs.base_model.active_adapter == name
        assert ours.base_model.active_adapters == theirs.base_model.active_adapters == [name]
        assert ours.peft_type == theirs.peft_type
    with pytest.raises(ValueError, match="the model has no adapter"):
        qlorapp.PeftModel(ours.unload()).get_model_status()


def test_a_layer_tells_what_pefts_layers_tell(both):
    layers = [model.base_model.model.model.layers[0].mlp.up_proj for model in both]
    for name in ("in_features", "out_features", "active_adapter", "active_adapters", "merged", "merged_adapters"):
        mine, other = (getattr(layer, name) for layer in layers)
        assert mine == other, name
    ours, theirs = layers
    assert ours.get_base_layer() is ours.base_layer and ours.weight is ours.base_layer.weight
    assert ours.base_layer.compute_dtype == theirs.base_layer.compute_dtype == torch.float32
    for name in ("first", "second"):
        assert torch.equal(ours.get_delta_weight(name), theirs.get_delta_weight(name))


def test_a_loaded_adapter_says_that_nothing_is_missing(both, folders):
    for model in both:
        assert model.load_adapter(folders / "adapter 0", "third") == ([], [])


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
        (lambda m: m.base_model.set_adapter(["first", "second"]), ValueError, "one adapter is active at a time"),
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
