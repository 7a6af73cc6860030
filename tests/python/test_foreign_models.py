# SPDX-License-Identifier: Apache-2.0
"""Models that this library does not compute itself: transformers' code over our four-bit layers, beside bitsandbytes'."""

import copy
import gc
import logging
import re
import weakref

import peer
import pytest
import safetensors.torch
import torch
import transformers

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from qlorapp.hf import quantizer
from qlorapp.hf.parameter_counts import is_plain_linear
from tiny_trainer import rows

IDS = torch.arange(3, 51).view(2, 24)
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float32",
}
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def gpt2():
    """Its linear layers are Conv1D, whose weights are (in, out)."""
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_inner=192, vocab_size=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gemma3():
    """A language model inside of one that reads images, with an activation that C++ does not compute."""
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "hidden_activation": "gelu"}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=120,
                                       boi_token_index=121, eoi_token_index=122)  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


MAKERS = {
    "GPTNeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "Phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),
    "GPT2": gpt2,
    "Gemma3": gemma3,
}


def write(folder, name):
    """One of them with values that are not near zero."""
    torch.manual_seed(2)
    model = MAKERS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() == 2 else 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MAKERS)
def folder(request, tmp_path_factory):
    """Families with biases and other shapes than Llama's."""
    return write(tmp_path_factory.mktemp(request.param), request.param)


def ours(folder):
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.BitsAndBytesConfig(**NF4)
    ).train()


def test_logits_are_those_over_bitsandbytes_layers_and_the_way_is_said(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="qlorapp"):
        model = ours(folder)
    assert (
        "transformers' own code, with linear layers in four bits by this library. C++ computes these, faster: Llama"
        in caplog.text
    )
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds
    with torch.no_grad():
        mine, other = model(IDS).logits, theirs(folder).eval().train()(IDS).logits
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()
    state, reference = model.state_dict(), theirs(folder).state_dict()
    assert set(state) == set(reference)
    assert all(torch.equal(state[name], reference[name]) for name in reference)
    assert model.to("cpu") is model


def test_it_trains_and_its_adapter_loads_in_peft(folder, tmp_path):
    model = qlorapp.get_peft_model(
        ours(folder), qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ).train()
    assert isinstance(model, peft.PeftModel)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(theirs(folder), tmp_path, is_trainable=True).train()
    gradients = []
    for one in (model.train(), back):
        one.zero_grad()
        one(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.requires_grad and p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()  # a tower that reads images gets none of text
    for name, gradient in gradients[1].items():
        assert torch.linalg.norm(gradients[0][name] - gradient) <= 1e-4 * torch.linalg.norm(gradient), name


def test_its_base_is_saved_in_the_bytes_of_bitsandbytes(folder, tmp_path):
    """Four-bit weights, as transformers saves those of bitsandbytes' model; it loads the folder."""
    ours(folder).save_pretrained(tmp_path / "ours")
    theirs(folder).save_pretrained(tmp_path / "theirs")
    mine, reference = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert mine.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(mine[name], tensor) or ".quant_state." in name, name
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").train()
    with torch.no_grad():
        assert torch.equal(back(IDS).logits, theirs(folder)(IDS).logits)


def test_its_parameters_are_counted_by_elements(folder):
    """As PEFT and transformers count bitsandbytes' layers; a four-bit weight's bytes are half as many."""
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    mine, other = ours(folder), theirs(folder)
    assert mine.is_loaded_in_4bit
    for options in ({}, {"exclude_embeddings": True}):
        assert mine.num_parameters(**options) == other.num_parameters(**options)
    model = qlorapp.get_peft_model(mine, qlorapp.LoraConfig(**config))
    reference = peft.get_peft_model(other, peft.LoraConfig(**config))
    assert model.get_nb_trainable_parameters() == reference.get_nb_trainable_parameters()
    assert model.num_parameters(only_trainable=True) == reference.num_parameters(only_trainable=True) > 0


def test_a_linear_layer_of_a_class_of_its_own_is_in_four_bits(tmp_path, caplog):
    """Falcon's, which transformers leaves as it is for bitsandbytes."""
    torch.manual_seed(2)
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, bias=True)).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="qlorapp"):
        model = ours(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    mine = {name for name, module in model.named_modules() if isinstance(module, qlorapp.nn.Linear4bit)}
    linear = {name: m for name, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert mine == set(linear) and len(mine) == 8
    with torch.no_grad():
        for module in linear.values():
            weight = qlorapp.Quantizer(quant_type="nf4", double_quant=False).quantize(module.weight)
            module.weight.copy_(weight.linear(torch.eye(module.in_features)).T)
        a, b = model(IDS).logits, plain(IDS).logits
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    packed = sum(module.weight.numel() for module in linear.values())
    assert (
        f"{100 * packed / plain.num_parameters():.1f} % of the {plain.num_parameters():,} parameters are in four bits."
        in caplog.text
    )


def test_a_linear_layer_that_does_more_stays_as_it_is():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class OfItsOwn(torch.nn.Linear):
        def __init__(self, size, groups):
            super().__init__(size, size)
            self.groups = groups

        def forward(self, x):
            return super().forward(x) if self.groups == 1 else x

    class Named(torch.nn.Linear):
        pass

    plain = [
        torch.nn.Linear(8, 8),
        Named(8, 8),
        Named(8, 8, bias=False),
        transformers.models.falcon.modeling_falcon.FalconLinear(8, 8),
    ]
    inside = torch.nn.MultiheadAttention(8, 2).out_proj  # whose weight is read, and forward never called
    assert all(map(is_plain_linear, plain))
    assert not any(map(is_plain_linear, [Scaled(8, 8), OfItsOwn(8, 2), inside, torch.nn.Embedding(8, 8)]))


def test_weights_that_are_no_linear_layers_are_said(tmp_path, caplog):
    """The experts of a mixture are tensors of three dimensions."""
    torch.manual_seed(2)
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    model = ours(tmp_path)
    packed = sum(
        module.in_features * module.out_features for module in model.modules() if isinstance(module, qlorapp.nn.Linear4bit)
    )
    share = (
        f"only {100 * packed / model.num_parameters():.1f} % of the {model.num_parameters():,} parameters are in four bits: "
    )
    assert share in caplog.text and "stay in float32. Largest: model.layers.*.mlp.experts.gate_up_proj" in caplog.text


def test_a_model_without_any_layer_in_four_bits_is_refused(tmp_path):
    write(tmp_path, "Phi")
    skip = ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"]
    config = qlorapp.BitsAndBytesConfig(**NF4, llm_int8_skip_modules=skip)
    with pytest.raises(
        ValueError, match="must find linear layers to put in four bits; PhiForCausalLM has none .*Leave out quantization_config"
    ):
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_a_counted_model_is_freed_when_it_is_deleted(tmp_path):
    model = qlorapp.get_peft_model(
        ours(write(tmp_path, "Phi")), qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    weight = weakref.ref(model.get_base_model().model.layers[0].self_attn.q_proj.base_layer)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_a_copy_computes_the_same_with_weights_of_its_own(folder):
    model = ours(folder)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(IDS).logits, model(IDS).logits)
    mine, theirs = (next(m for m in each.modules() if isinstance(m, qlorapp.nn.Linear4bit)) for each in (model, copied))
    assert mine.weight.data_ptr() != theirs.weight.data_ptr()


@pytest.mark.parametrize(("by", "double_quant"), [("ours", True), ("theirs", False), ("theirs, stored as bfloat16", True)])
def test_a_folder_in_four_bits_loads_with_its_very_codes_and_trains(folder, tmp_path, by, double_quant):
    options = {**NF4, "bnb_4bit_use_double_quant": double_quant}
    if by == "ours":
        config = qlorapp.BitsAndBytesConfig(**options)
        qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(tmp_path)
    else:
        storage = {"bnb_4bit_quant_storage": "bfloat16"} if "bfloat16" in by else {}
        config = transformers.BitsAndBytesConfig(**options, **storage)
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(tmp_path)
    more = {"quantization_config": qlorapp.BitsAndBytesConfig(**NF4)} if by == "theirs" else {}
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **more)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules()) and model.dtype == torch.float32
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    with torch.no_grad():
        mine, other = model(IDS).logits, reference(IDS).logits
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()
    model.save_pretrained(tmp_path / "again")
    files = [safetensors.torch.load_file(place / "model.safetensors") for place in (tmp_path, tmp_path / "again")]
    for name, tensor in files[0].items():
        if ".quant_state." not in name:
            assert torch.equal(files[1][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    trained = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    trained(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in trained.named_parameters() if p.requires_grad and "vision" not in name)


def test_a_float_folder_loads_without_a_config(folder):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    assert not any(type(module).__name__ == "Linear4bit" for module in model.modules())
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_a_damaged_four_bit_folder_names_the_weight(folder, tmp_path):
    ours(folder).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".absmax"))
    tensors[name] = tensors[name][:-1].clone()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        qlorapp.FormatError,
        match=rf"{re.escape(str(tmp_path))} is damaged: .*{re.escape(name.split('layers.')[-1])} must exist",
    ):
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_options_of_transformers_reach_its_model(folder):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", use_cache=False)
    assert model.config._attn_implementation == "eager" and model.config.get_text_config().use_cache is False


def test_a_gpu_that_is_not_there_gives_the_cpu_and_says_so(folder, caplog):
    for place in ({"": 0}, "cuda:0", 0):
        caplog.clear()
        assert qlorapp.AutoModelForCausalLM.from_pretrained(folder, device_map=place).device.type == "cpu"
        assert "device_map asks for cuda:0, but there is no GPU here: the model is on the CPU." in caplog.text


def test_a_weight_that_is_missing_is_an_error(folder, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(tensors) if "norm" in name or "ln_" in name)
    del tensors[name]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (ours, qlorapp.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(qlorapp.FormatError, match=rf"lacks .*{name.split('.', 3)[-1]}, which its config.json asks for"):
            load(tmp_path)


@pytest.mark.parametrize("quantized", [True, False])
def test_an_adapter_over_conv1d_layers_loads_in_peft_over_float_ones_and_back(tmp_path, quantized):
    """PEFT says fan_in_fan_out for those and not for four-bit ones; the values are the same."""
    folder = write(tmp_path / "base", "GPT2")
    base = ours(folder) if quantized else qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    config = qlorapp.LoraConfig(r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = qlorapp.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")

    def update_over_float(load):
        """What the adapter adds to the logits."""
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            before = plain(IDS).logits
            return load(plain, tmp_path / "adapter").eval()(IDS).logits - before

    theirs_over_float = update_over_float(peft.PeftModel.from_pretrained)
    assert theirs_over_float.abs().max() > 0.1
    with torch.no_grad():
        mine = model.eval()(IDS).logits
        if not quantized:
            plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            assert torch.allclose(mine, theirs_over_float + plain(IDS).logits, atol=1e-5)
            return
        other = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "adapter").train()(IDS).logits
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


def test_an_encoder_and_decoder_is_no_causal_model(tmp_path):
    config = transformers.T5Config(d_model=64, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=64)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="other causal model of transformers.*; got T5ForConditionalGeneration"):
        ours(tmp_path)


@pytest.mark.parametrize("taken", ["AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"])
def test_a_quantizer_of_our_name_by_somebody_else_is_named(tmp_path, monkeypatch, taken):
    """At either of transformers' two tables, before this library's own is registered or after it."""
    from transformers.quantizers import auto

    class Foreign:
        __module__, __qualname__ = "other_package", "TheirQuantizer"

    write(tmp_path, "Phi")
    for registered_before in (True, False):
        with monkeypatch.context() as patch:
            if not registered_before:
                patch.setattr(quantizer, "_ours", [])
            for name in ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"):
                if not registered_before:
                    patch.delitem(getattr(auto, name), "qlorapp", raising=False)
            patch.setitem(getattr(auto, taken), "qlorapp", Foreign)
            with pytest.raises(
                ValueError, match=r"other_package.TheirQuantizer is registered .* 'qlorapp'.*Remove the import"
            ) as told:
                ours(tmp_path)
            assert "\n" not in str(told.value) and getattr(auto, taken)["qlorapp"] is Foreign
            assert qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits.shape == (2, 24, 128)  # the way out
    assert ours(tmp_path)(IDS).logits.isfinite().all()


def test_our_quantizer_is_registered_twice_without_harm(tmp_path, monkeypatch):
    """As where a notebook loads the package again: its older classes are in transformers' tables."""
    write(tmp_path, "Phi")
    before = ours(tmp_path)(IDS).logits
    known = quantizer.register()
    monkeypatch.setattr(quantizer, "_ours", [])
    assert torch.equal(ours(tmp_path)(IDS).logits, before)
    assert quantizer.register() is not known and quantizer.register() is quantizer.register()


# --- training


def adapted(folder, **lora):
    torch.manual_seed(5)
    return qlorapp.get_peft_model(
        ours(folder), qlorapp.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora})
    )


def trained(kind, folder, output, resume=None, lora=None, **options):
    args = kind[1](str(output), **{"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1,
                   "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "use_cpu": True, **options})  # fmt: skip
    trainer = kind[0](
        adapted(folder, **(lora or {})), args, data_collator=peer.collate, train_dataset=rows(26), eval_dataset=rows(5, seed=3)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


OURS, THEIRS = ((kind.Trainer, kind.TrainingArguments) for kind in (qlorapp, transformers))


def test_our_trainer_trains_it_as_transformers_own(folder, tmp_path):
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "eval_strategy": "epoch", "max_steps": 5}
    mine, other = (trained(kind, folder, tmp_path, **options) for kind in (OURS, THEIRS))
    timed = ("runtime", "per_second")
    logs = [[{k: v for k, v in entry.items() if not any(part in k for part in timed)} for entry in trainer.state.log_history]
            for trainer in (mine, other)]  # fmt: skip
    assert logs[0] == logs[1] and any("eval_loss" in entry for entry in logs[0])


def test_a_run_resumes_with_the_same_bits(tmp_path):
    """With this library's eight-bit moments in transformers' checkpoint."""
    folder = write(tmp_path / "phi", "Phi")
    options = {"lora": {"lora_dropout": 0.2}, "optim": "paged_adamw_8bit"}
    whole = trained(OURS, folder, tmp_path, save_strategy="steps", save_steps=2, **options)
    resumed = trained(OURS, folder, tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    states = [{n: p for n, p in trainer.model.named_parameters() if p.requires_grad} for trainer in (whole, resumed)]
    assert states[0] and all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_adapters_learn_on_a_prepared_base_in_each_kind_of_checkpointing(tmp_path, options):
    folder = write(tmp_path, "Phi")
    gradients = []
    for prepared in (False, True):
        model = ours(folder)
        if prepared:
            assert any(p.requires_grad for p in model.parameters())  # norms, biases, embeddings: as transformers loads them
            model = qlorapp.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
            assert not any(p.requires_grad for p in model.parameters()) and model.is_gradient_checkpointing
        torch.manual_seed(5)
        config = qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = qlorapp.get_peft_model(model, config).train()
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "lora_" in name})
    for name, expected in gradients[0].items():
        assert torch.allclose(gradients[1][name], expected, rtol=1e-4, atol=1e-7), name


def test_plans_are_refused_with_the_way_out(tmp_path):
    model = ours(write(tmp_path, "Phi"))
    for ask in (qlorapp.plan, qlorapp.find_max_batch_size):
        with pytest.raises(TypeError, match=rf"\[{ask.__name__}\] .* is computed by transformers"):
            ask(model)
