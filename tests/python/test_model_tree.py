# SPDX-License-Identifier: Apache-2.0
"""The model object as scripts handle it: state dicts, embeddings, counts, copies and hooks, beside transformers and PEFT."""

import copy
import pickle

import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder, load, ragged_batch  # noqa: F401  (folder is a fixture)


def test_a_state_dict_goes_back_in_and_strictly(folder):
    model, other = load(folder), load(folder)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    batch = ragged_batch()
    state = other.state_dict()
    before = model.eval()(**batch).loss.item()
    result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert model(**batch).loss.item() == other.eval()(**batch).loss.item() != before
    one = next(iter(state))
    lora = next(name for name in state if "lora_A" in name)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in state.items() if name != one})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "nonsense": state[one]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, lora: torch.zeros(1, 2)})
    assert model.load_state_dict({lora: state[lora]}, strict=False).missing_keys
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(state, assign=True)


def test_four_bit_weights_are_loaded_with_all_their_parts(tmp_path):
    from tiny_llama import write_checkpoint

    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed))
    file = tmp_path / "1" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    model, other = (load(tmp_path / str(seed)).get_base_model() for seed in (0, 1))
    ids = torch.arange(5, 25)[None]
    wanted = other.eval()(ids).logits
    assert not torch.allclose(model.eval()(ids).logits, wanted)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(ids).logits, wanted)
    nf4 = next(name for name in other.state_dict() if name.endswith("bitsandbytes__nf4"))
    text = bytes(other.state_dict()[nf4]).replace(b'"blocksize": 64', b'"blocksize": 32')
    broken = {**other.state_dict(), nf4: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="another form"):
        model.load_state_dict(broken)


def test_embeddings_counts_device_and_dtype_are_transformers(folder):
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(ours, get)().weight, getattr(theirs, get)().weight)
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    assert ours.get_memory_footprint() == theirs.get_memory_footprint(return_buffers=False)
    assert ours.device == theirs.device and ours.dtype == theirs.dtype
    assert {name for name, _ in ours.named_modules()} == {
        name for name, _ in theirs.named_modules() if not name.endswith(("rotary_emb", "act_fn"))
    }
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(ours.get_input_embeddings()(ids), theirs.get_input_embeddings()(ids))


def test_a_layer_called_by_itself_computes_with_its_adapter(folder):
    for options in ({}, {"use_dora": True}):
        model = load(folder, **options).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.dim() == 2:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        layer = model.get_base_model().model.layers[0].mlp.up_proj
        x = torch.randn(3, 64)
        dense = (
            layer.base_layer(torch.eye(64)).T
            + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        )
        if options:
            dense = dense * (layer.lora_magnitude_vector["default"].weight / torch.linalg.norm(dense, dim=1))[:, None]
        assert torch.allclose(layer(x), x @ dense.T, atol=1e-4)
        with model.disable_adapter():
            assert torch.equal(layer(x), layer.base_layer(x))


def test_a_model_is_not_copied_pickled_or_cast_and_says_what_to_do(folder, tmp_path):
    model = load(folder)
    for one in (model, model.get_base_model()):
        with pytest.raises(TypeError, match="from_pretrained"):
            copy.deepcopy(one)
        with pytest.raises(TypeError, match="save_pretrained"):
            pickle.dumps(one)
        with pytest.raises(TypeError, match="save_pretrained"):
            torch.save(one, tmp_path / "x")
        for cast in ("half", "bfloat16", "double"):
            with pytest.raises(ValueError, match="keeps its device and dtype"):
                getattr(one, cast)()
        assert one.to(torch.device("cpu")) is one and one.float() is one
    low = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="keeps its device and dtype"):
        low.float()


def test_hooks_run_on_the_model_and_on_parameters_and_are_refused_inside(folder):
    model, batch = load(folder), ragged_batch()
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append("model"))
    some = next(p for n, p in model.named_parameters() if n.endswith("lora_B.default.weight"))
    some.register_hook(lambda gradient: calls.append("parameter"))
    model(**batch).loss.backward()
    assert calls == ["model", "parameter"]
    lm = model.get_base_model()
    assert model.model is model.base_model.model is lm  # as in PEFT
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)  # which are never called anywhere
    inside = [module for module in lm.modules() if module is not lm and not isinstance(module, containers)]
    assert {"Group", "LoraLayer", "RMSNorm", "Embedding", "Linear", "Identity"} <= {type(module).__name__ for module in inside}
    for module in inside:
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            with pytest.raises(
                NotImplementedError, match=rf"register_{kind}_hook on {type(module).__name__}: the hook would never run"
            ) as told:
                getattr(module, f"register_{kind}_hook")(lambda *args: None)
            assert "\n" not in str(told.value) and ("on the model" in str(told.value)) == ("forward" in kind)
    calls.clear()
    model.base_model.register_forward_hook(lambda module, args, output: calls.append("level between"))
    model(**batch)
    assert calls == ["level between", "model"]

    def make_inputs_require_grad(module, inputs, output):
        output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad).remove()  # the idiom of checkpointed scripts
    dropping = load(folder, lora_dropout=0.5)
    dropout = next(module for module in dropping.modules() if isinstance(module, torch.nn.Dropout))
    with pytest.raises(NotImplementedError, match="on Dropout: the hook would never run"):
        dropout.register_forward_hook(lambda *args: None)


def test_the_way_out_of_hooks_works(folder, tmp_path):
    """What the refusal names: transformers' model of the same folder, in Trainer."""
    model = qlorapp.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), qlorapp.LoraConfig(r=4))
    seen = []
    model.get_base_model().model.layers[1].register_forward_hook(lambda module, args, output: seen.append(module))
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 2
    qlorapp.Trainer(
        model, qlorapp.TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no"), train_dataset=rows
    ).train()
    assert seen


def ways_to_edit(lm):
    """What scripts try, as (the name that the refusal has to give, the edit)."""
    block, layer = lm.model.layers[0], lm.model.layers[0].self_attn.q_proj
    linear, identity = torch.nn.Linear(64, 64), torch.nn.Identity()
    return [
        ("lm_head of LlamaForCausalLM", lambda: setattr(lm, "lm_head", identity)),
        ("lm_head of LlamaForCausalLM", lambda: setattr(lm, "lm_head", torch.nn.Sequential(lm.lm_head, identity))),
        ("lm_head of LlamaForCausalLM", lambda: delattr(lm, "lm_head")),
        ("model of LlamaForCausalLM", lambda: lm.add_module("model", identity)),
        ("embed_tokens of Group", lambda: setattr(lm.model, "embed_tokens", None)),
        ("mlp of Group", lambda: setattr(block, "mlp", identity)),
        ("mlp of Group", lambda: block.register_module("mlp", identity)),
        ("forward of Group", lambda: setattr(block.self_attn, "forward", lambda x: x)),
        ("forward of LlamaForCausalLM", lambda: setattr(lm, "forward", lambda **batch: None)),
        ("forward of RMSNorm", lambda: setattr(lm.model.norm, "forward", lambda x: x)),
        ("layers of Group", lambda: setattr(lm.model, "layers", lm.model.layers[:1])),
        ("the list of ModuleList", lambda: lm.model.layers.append(block)),
        ("the list of ModuleList", lambda: lm.model.layers.insert(0, block)),
        ("the list of ModuleList", lambda: lm.model.layers.pop(0)),
        ("the list of ModuleList", lambda: lm.model.layers.__delitem__(slice(1, None))),
        ("0 of ModuleList", lambda: lm.model.layers.__setitem__(0, identity)),
        ("q_proj of Group", lambda: setattr(block.self_attn, "q_proj", linear)),
        ("base_layer of LoraLayer", lambda: setattr(layer, "base_layer", linear)),
        ("default of ModuleDict", lambda: layer.lora_A.__setitem__("default", linear)),
        ("'other' of ModuleDict", lambda: layer.lora_A.update({"other": linear})),
        ("'default' of ModuleDict", lambda: layer.lora_dropout.pop("default")),
        ("the entries of ModuleDict", lambda: layer.lora_B.clear()),
    ]  # fmt: skip


def test_edits_that_cpp_would_not_see_are_refused(folder):
    model = load(folder, lora_dropout=0.5).eval()
    lm, batch = model.get_base_model(), ragged_batch()
    names, before = [name for name, _ in model.named_modules()], model(**batch).logits
    for said, edit in [
        *ways_to_edit(lm),
        ("lm_head of LlamaForCausalLM", lambda: setattr(model, "lm_head", torch.nn.Identity())),
    ]:
        with pytest.raises(NotImplementedError, match=rf"{said} cannot be changed: .*load the model by transformers") as told:
            edit()
        assert "\n" not in str(told.value)
    assert names == [name for name, _ in model.named_modules()] and torch.equal(model(**batch).logits, before)


def test_what_of_an_adapter_cpp_has_read_is_read_only(folder):
    lm = load(folder, lora_dropout=0.5).get_base_model()
    layer = lm.model.layers[0].mlp.up_proj
    factor = dict(layer.scaling)
    for edit in (
        lambda: layer.scaling.__setitem__("default", 0.0),
        lambda: layer.scaling.update(default=0.0),
        lambda: layer.scaling.pop("default"),
        lambda: layer.scaling.__ior__({"default": 0.0}),
    ):
        with pytest.raises(TypeError, match="scaling cannot be changed: .*lora_alpha"):
            edit()
    with pytest.raises(AttributeError, match="scaling of LoraLayer cannot be changed: .*lora_alpha"):
        layer.scaling = {"default": 0.0}
    with pytest.raises(AttributeError, match=r"p of Dropout cannot be changed: .*model.eval\(\)"):
        layer.lora_dropout["default"].p = 0.0
    layer.lora_dropout["default"].p = 0.5  # as it is
    copied = copy.deepcopy(layer.scaling)
    copied["default"] = 0.0
    assert layer.scaling == factor and layer.lora_dropout["default"].p == 0.5


def test_the_ways_out_of_a_fixed_scaling_work(folder):
    model, batch = load(folder).eval(), ragged_batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
        adapted = model(**batch).logits
        with model.disable_adapter():
            base = model(**batch).logits
        assert not torch.equal(adapted, base)
        for module in model.modules():
            if hasattr(module, "lora_B"):
                module.lora_B["default"].weight.mul_(0.0)
        assert torch.equal(model(**batch).logits, base)


def test_harmless_edits_go_on_working(folder):
    model = load(folder)
    lm = model.get_base_model()
    block = lm.model.layers[0]
    lm.lm_head, lm.model.layers[0], block.mlp = lm.lm_head, block, block.mlp
    block.mlp.forward = block.mlp.forward
    lm.config.use_cache = False
    lm.is_parallelizable = lm.model_parallel = True
    lm.value_head = torch.nn.Linear(64, 1)  # a script's own, which calls it
    lm.value_head = torch.nn.Linear(64, 2)
    part = lm.model.layers[:2]
    part.append(torch.nn.Identity())
    part[0] = torch.nn.Identity()
    del part[1], lm.value_head
    assert len(part) == 2 and len(lm.model.layers) == 3
    model.train().eval().requires_grad_(False)
    assert not lm.training and not block.training
    assert model.to("cpu") is model and block.float() is block


class CastOutputToFloat(torch.nn.Sequential):
    """As notebooks for old PEFT have it."""

    def forward(self, x):
        return super().forward(x).to(torch.float32)


def test_the_cast_of_old_notebooks_is_taken_and_said(folder, caplog):
    for dtype in (torch.float32, torch.bfloat16):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        head, ids = model.lm_head, torch.arange(5, 25)[None]
        before = model(ids).logits
        model.lm_head = CastOutputToFloat(model.lm_head)
        assert model.lm_head is head and torch.equal(model(ids).logits, before) and before.dtype == dtype
        adapted = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4))
        adapted.lm_head = CastOutputToFloat(adapted.lm_head)
        assert [name for name, _ in adapted.named_modules() if "lm_head" in name] == ["base_model.model.lm_head"]
        said = [r.getMessage() for r in caplog.records if "CastOutputToFloat" in r.getMessage()]
        assert len(said) == (dtype == torch.bfloat16), said
    assert "logits stay bfloat16" in said[0] and "logits.float()" in said[0]


def test_a_gradient_that_a_base_parameter_would_never_get_is_refused_or_said(folder, tmp_path, caplog):
    from tiny_trainer import arguments, rows

    model = load(folder)
    trainer = qlorapp.Trainer(model, arguments(tmp_path), train_dataset=rows(4))
    for name, parameter in model.named_parameters():  # LongLoRA's
        if any(part in name for part in ("embed", "norm")):
            parameter.requires_grad_()
    wanted = r"requires_grad=True on model\.layers\.0\.input_layernorm\.weight has no effect: .*modules_to_save"
    with pytest.raises(ValueError, match=r"\[Trainer\] " + wanted):
        qlorapp.Trainer(model, arguments(tmp_path), train_dataset=rows(4))
    with pytest.raises(ValueError, match=r"\[Trainer\] " + wanted):
        trainer.train()
    with torch.no_grad():
        model(**ragged_batch())
    assert "requires_grad" not in caplog.text
    model(**ragged_batch()).loss.backward()
    model(**ragged_batch()).loss.backward()
    assert caplog.text.count("[forward] requires_grad=True on model.layers.0.input_layernorm.weight") == 1


def test_a_table_that_an_adapter_trains_may_require_a_gradient_as_a_whole(folder, tmp_path):
    from tiny_trainer import arguments, rows

    model = load(folder, modules_to_save=["embed_tokens"])
    model.get_base_model().model.embed_tokens.requires_grad_(True)
    qlorapp.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows(4)).train()


@pytest.mark.parametrize("leaf", ["model.norm", "lm_head", "model.layers.1.mlp.up_proj.base_layer"])
def test_other_values_by_data_are_refused_and_casts_are_undone(folder, leaf, caplog):
    model = load(folder)
    module = model.get_base_model().get_submodule(leaf)
    batch, own = ragged_batch(), module.weight.data
    before = model.eval()(**batch).loss.item()
    module.weight.data = own.clone()  # equal values may be anywhere
    assert model(**batch).loss.item() == before and module.weight.data_ptr() == own.data_ptr()
    if own.is_floating_point():
        module.to(torch.bfloat16)
        assert model(**batch).loss.item() == before and module.weight.dtype == own.dtype
    module.weight.data = own * 3
    for use in (lambda: model(**batch), lambda: model.generate(batch["input_ids"][2:], max_new_tokens=1)):
        with pytest.raises(ValueError, match=rf"\[modules\] {leaf}\.weight\.data must stay .*data\.copy_"):
            use()
    module.weight.data = own
    module.weight.data.copy_(own * 3)
    assert model(**batch).loss.item() != before


def test_a_cast_of_the_base_is_said_once(folder, caplog):
    model = load(folder)
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float16)
    model(**ragged_batch())
    assert caplog.text.count("a cast of base weights to torch.float16 has no effect") == 1


def test_a_table_that_moved_is_shown_where_it_is(folder):
    model = load(folder).get_base_model()
    core = model._core

    class Moved:
        embed_tokens = core.embed_tokens.clone()

    model._core = Moved
    model._memory_changed()
    model._core = core
    assert model.model.embed_tokens.weight.data_ptr() == Moved.embed_tokens.data_ptr()
    model._base_parameters.put_back()


def test_adapters_that_were_cast_stay_float32_and_go_on_training(folder, tmp_path, caplog):
    from tiny_trainer import arguments, rows

    model = load(folder)
    for use in ("forward", "trainer", "generate", "data", "replaced"):
        for name, module in model.named_modules():
            if "lora_" in name:
                module.to(torch.bfloat16)
        held = next(module for name, module in model.named_modules() if name.endswith("lora_B.default"))
        wanted = held.weight.detach().float().clone()
        assert torch.equal(wanted, wanted.bfloat16().float())
        if use == "data":
            held.weight.data = held.weight.data.bfloat16()
        if use == "replaced":
            held.weight = torch.nn.Parameter(held.weight.detach().bfloat16())
        if use == "trainer":
            qlorapp.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows(4)).train()
        elif use == "generate":
            model.generate(torch.arange(5, 9)[None], max_new_tokens=1)
        else:
            model(**ragged_batch()).loss.backward()
            assert held.weight.grad.dtype == torch.float32 and held.weight.grad.isfinite().all()
        assert held.weight.dtype == torch.float32 and torch.equal(held.weight.detach(), wanted) == (use != "trainer")
    assert caplog.text.count("adapters stay float32: a cast to torch.bfloat16") == 1
    with pytest.raises(ValueError, match="must stay on the model's device, cpu; got meta"):
        held.to("meta")
