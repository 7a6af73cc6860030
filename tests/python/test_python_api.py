# SPDX-License-Identifier: Apache-2.0
"""The package under Hugging Face's names, held to transformers, PEFT and torch on checkpoints that transformers writes here."""

import dataclasses
import gc
import os
import subprocess
import sys

import pytest
import qlorapp
import torch
import transformers
from tiny_llama import SHAPES, SIZES, folder, load, ragged_batch, write_checkpoint  # noqa: F401  (folder is a fixture)

# --- the surface


def test_import_needs_no_transformers(build_dir):
    code = "import sys, qlorapp; assert not {'transformers', 'peft', 'bitsandbytes'} & set(sys.modules); qlorapp.AutoTokenizer"
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_every_public_name_is_there():
    assert all(getattr(qlorapp, name) is not None for name in qlorapp.__all__)
    assert qlorapp.AutoTokenizer.register == transformers.AutoTokenizer.register
    with pytest.raises(AttributeError, match="SFTTrainr"):
        _ = qlorapp.SFTTrainr


def test_trainable_parameters_of_llama_3_2_1b_come_from_the_configs_alone():
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    lora = qlorapp.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "k_proj", "o_proj"])
    counts = qlorapp._C.count_parameters(config.to_json_string(), lora.to_json_string())
    line = "trainable params: 3,407,872 || all params: 1,239,222,272 || trainable%: 0.2750"
    assert qlorapp._C.trainable_parameters_line(*counts) == line


def test_print_trainable_parameters_prints_pefts_line_and_returns_it(folder, capsys):
    import peft

    ours = load(folder, r=8)
    line = ours.print_trainable_parameters()
    printed = capsys.readouterr().out
    theirs = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    theirs.print_trainable_parameters()
    assert printed == capsys.readouterr().out
    assert str(line) + "\n" == printed == f"{line}\n"
    assert line._ipython_display_() is None  # IPython calls this instead of showing repr(line)


def test_names_shapes_and_state_are_those_of_transformers_and_peft(folder):
    import peft

    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization)
    theirs = peft.get_peft_model(
        theirs, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    )
    ours = load(folder, lora_dropout=0.1)

    def described(model):
        return {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}

    assert described(ours) == described(theirs)
    state, reference = ours.state_dict(), theirs.state_dict()
    assert set(state) == set(reference)
    for name, tensor in state.items():
        assert tensor.shape == reference[name].shape and tensor.dtype == reference[name].dtype, name
        if name.endswith(("quant_state.bitsandbytes__nf4", "base_layer.weight")):
            assert torch.equal(tensor, reference[name]), name
    modules = dict(theirs.named_modules())
    assert all(name in modules for name, _ in ours.named_modules())


# --- what it computes


@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_equal_transformers_in_float32(tmp_path, shape, v4):
    reference = write_checkpoint(tmp_path, v4=v4, **SHAPES[shape])
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = ragged_batch()
    with torch.no_grad():
        # Positions as ours count them: from the first token of each row.
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        expected = reference(**batch, position_ids=positions)
        output = model(**batch)
    present = batch["attention_mask"] == 1
    difference = (output.logits - expected.logits)[present].abs().max()
    assert difference <= 1e-4 and difference <= 1e-5 * expected.logits[present].abs().max()
    assert abs(output.loss - expected.loss) <= 1e-5
    assert output[0] is output.loss and output["logits"].shape == (3, 17, SIZES["vocab_size"])


def test_gradients_of_loss_are_those_of_the_hand_written_backward(folder):
    model = load(folder)
    batch = ragged_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    output = model.eval()(**batch)
    output.loss.backward()
    graph = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    core = model.core
    unpadded = core.unpad(**batch)
    core.zero_grad()
    loss, targets = core.forward_backward(unpadded, torch.tensor(1.0 / unpadded.target_count))
    direct = [p.grad for p in model.parameters() if p.requires_grad]
    assert targets == unpadded.target_count and torch.allclose(loss / targets, output.loss, rtol=1e-6)
    assert all(torch.linalg.norm(a - b) <= 1e-6 * torch.linalg.norm(b) for a, b in zip(graph, direct, strict=True))


def test_gradients_through_lazy_logits_are_those_of_the_loss(folder):
    model, batch = load(folder).eval(), ragged_batch()
    wanted = [p for p in model.parameters() if p.requires_grad]
    output = model(**batch)
    own = torch.autograd.grad(output.loss, wanted)
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    shifted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
    other = torch.autograd.grad(shifted, wanted)
    assert torch.allclose(shifted, output.loss, rtol=1e-5)
    assert all(torch.linalg.norm(a - b) <= 1e-4 * torch.linalg.norm(a) + 1e-9 for a, b in zip(own, other, strict=True))


def test_checkpointing_changes_no_gradient(folder):
    batch = ragged_batch()
    model = load(folder, lora_dropout=0.2)

    def gradients():
        torch.manual_seed(8)  # of the dropout masks
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    kept = gradients()
    assert not model.is_gradient_checkpointing
    for how in (
        {},
        {"keep": "attention_only"},
        {"keep": "input_on_host"},
        {"every": 2},
        {"every": 2, "keep": "input_on_host"},
        {"every": "sqrt"},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"keep": "input_only,everything:1"},
        {"keep": ["attention_only"] + ["everything"] * (model.config.num_hidden_layers - 1)},
    ):
        model.gradient_checkpointing_enable(**how)
        assert model.is_gradient_checkpointing
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients(), strict=True)), how
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_memory_settings_change_gradients_by_rounding_only_and_move_no_visible_tensor(folder):
    batch, model = ragged_batch(), load(folder, lora_dropout=0.2)
    model.gradient_checkpointing_enable()

    def gradients():
        torch.manual_seed(8)  # of the dropout masks
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])

    plain = gradients()
    for settings in (
        {"loss_chunk_rows": 3},
        {"mlp_tile_rows": 4},
        {"loss_chunk_rows": 5, "mlp_tile_rows": 8, "weight_workspace": "projection", "embedding_on_host": True},
    ):
        model.set_memory(**settings)
        assert torch.linalg.norm(gradients() - plain) < 1e-5 * torch.linalg.norm(plain), settings
        assert model.get_input_embeddings().weight.data_ptr() == model.core.embed_tokens.data_ptr()
    with pytest.raises(ValueError, match="mlp_tile_rows"):
        model.set_memory(mlp_tile_rows=3)


def test_dropout_follows_train_eval_and_manual_seed(folder):
    model, batch = load(folder, lora_dropout=0.5), ragged_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.05)

        def loss(seed):
            torch.manual_seed(seed)
            return model(**batch).loss.item()

        assert loss(1) == loss(1) != loss(2)
        model.eval()
        assert loss(1) == loss(2)


def test_generation_is_transformers_greedy_generation(folder):
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    ours = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, pad_token_id=0)
    assert ours.tolist() == expected.tolist()


# --- a user's own loop


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_hand_written_loop_trains(folder, set_to_none):
    model, batch = load(folder), ragged_batch()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_two_backwards_accumulate_and_a_lost_gradient_is_bound_again(folder):
    model, batch = load(folder).eval(), ragged_batch()
    some = next(p for n, p in model.named_parameters() if n.endswith("v_proj.lora_B.default.weight"))
    model(**batch).loss.backward()
    once = some.grad.clone()
    model(**batch).loss.backward()
    assert torch.allclose(some.grad, 2 * once, rtol=1e-6)
    model.zero_grad(set_to_none=True)
    assert some.grad is None
    model(**batch).loss.backward()
    assert torch.equal(some.grad, once)
    i = next(i for i, name in enumerate(model.core.adapter_names()) if model.core.parameters()[i] is some)
    assert some.grad.data_ptr() == model.core.gradient(i).data_ptr()


def test_a_parameter_that_was_replaced_is_noticed(folder):
    model, batch = load(folder).eval(), ragged_batch()
    name, some = next((n, p) for n, p in model.named_parameters() if n.endswith("lora_B.default.weight"))
    before = model(**batch).loss.item()
    values = torch.randn_like(some)
    some.data = values.clone()
    changed = model(**batch).loss.item()
    assert changed != before
    some.data.zero_()
    assert model(**batch).loss.item() == before
    holder = model.get_submodule(name.rsplit(".", 1)[0])
    holder.weight = torch.nn.Parameter(values.clone())
    assert model(**batch).loss.item() == changed
    assert torch.equal(holder.weight, values)
    with pytest.raises(ValueError, match="keeps its device and dtype"):
        model.to(torch.float16)
    assert model.to("cpu") is model


def test_a_graph_outlives_its_model(folder):
    model, batch = load(folder), ragged_batch()
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    del model
    gc.collect()
    loss.backward()
    assert any(p.grad.abs().max() > 0 for p in parameters)


def test_the_accumulators_window_equals_one_big_batch(folder):
    model, batch = load(folder).eval(), ragged_batch()
    model(**batch).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    windows = [model.core.unpad(*(batch[k][i : i + 1] for k in ("input_ids", "attention_mask", "labels"))) for i in range(3)]
    accumulator = qlorapp.Accumulator([window.target_count for window in windows])
    for i in range(3):
        row = {key: value[i : i + 1] for key, value in batch.items()}
        output = model(**row, num_items_in_batch=1)  # the sum
        accumulator.add(output.loss)
        accumulator.weigh(output.loss).backward()
    got = [p.grad for p in model.parameters() if p.requires_grad]
    assert abs(accumulator.mean_loss() - model(**batch).loss) <= 1e-6
    assert all(torch.linalg.norm(a - b) <= 5e-6 * torch.linalg.norm(b) for a, b in zip(got, wanted, strict=True))


# --- adapters and files


def test_adapters_travel_to_peft_and_back(folder, tmp_path):
    import peft

    model, batch = load(folder, r=8, target_modules=["q_proj", "down_proj"], use_rslora=True), ragged_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "ours")
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = qlorapp.PeftModel.from_pretrained(ours, tmp_path / "ours")
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    theirs = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(folder), tmp_path / "ours").eval()
    plain = {key: batch[key][2:] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.allclose(ours(**plain).logits, theirs(**plain).logits, atol=1e-4)
        with ours.disable_adapter(), theirs.disable_adapter():
            assert torch.allclose(ours(**plain).logits, theirs(**plain).logits, atol=1e-4)
        assert not torch.allclose(ours(**plain).logits, ours.get_base_model()(batch["input_ids"]).logits[2:] * 0)


def test_footprint_counts_four_bit_weights_as_stored(folder):
    four_bit, dense = load(folder), qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    assert dense.get_memory_footprint() == 4 * dense.num_parameters()
    assert four_bit.get_memory_footprint() < 0.5 * dense.get_memory_footprint()
    assert four_bit.device == torch.device("cpu") and four_bit.dtype == torch.float32
    assert four_bit.config.hidden_size == 64
    four_bit.config.use_cache = False
    assert qlorapp.prepare_model_for_kbit_training(four_bit).is_gradient_checkpointing


# --- configs


def test_configs_are_dataclasses_with_hugging_faces_defaults():
    import peft

    theirs = {f.name: getattr(peft.LoraConfig(), f.name) for f in dataclasses.fields(peft.LoraConfig)}
    for field in dataclasses.fields(qlorapp.LoraConfig):
        if field.name == "runtime_config":
            assert qlorapp.LoraConfig().runtime_config == dataclasses.asdict(theirs["runtime_config"])
        elif field.name not in ("task_type", "peft_version"):  # ours is for causal language models
            assert getattr(qlorapp.LoraConfig(), field.name) == theirs[field.name], field.name
    for name, value in vars(transformers.BitsAndBytesConfig()).items():
        ours = qlorapp.BitsAndBytesConfig().__dict__.get(name, value)
        assert ours == value or (name, ours) in [("bnb_4bit_compute_dtype", None), ("bnb_4bit_quant_storage", None)], name
    reference = {f.name: f.default for f in dataclasses.fields(transformers.TrainingArguments)}
    ours = {f.name: f.default for f in dataclasses.fields(qlorapp.TrainingArguments)}
    for name in (
        "learning_rate",
        "per_device_train_batch_size",
        "max_grad_norm",
        "adam_epsilon",
        "seed",
        "logging_steps",
        "num_train_epochs",
    ):
        assert ours[name] == reference[name], name


def test_the_command_line_parser_of_transformers_takes_the_dataclass():
    (args,) = transformers.HfArgumentParser(qlorapp.TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "x", "--learning_rate", "2e-4", "--bf16", "--save_total_limit", "2"]
    )
    assert (args.output_dir, args.learning_rate, args.bf16, args.save_total_limit) == ("x", 2e-4, True, 2)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: qlorapp.LoraConfig(lora_alhpa=3), TypeError, "Did you mean 'lora_alpha'"),
        (lambda: qlorapp.BitsAndBytesConfig(bnb_4bit_quant_typ="nf4"), TypeError, "Did you mean 'bnb_4bit_quant_type'"),
        (lambda: qlorapp.TrainingArguments(learning_rat=1), TypeError, "Did you mean 'learning_rate'"),
        (lambda: qlorapp.LoraConfig(r="sixteen"), TypeError, "'r' must be an integer"),
        (lambda: qlorapp.LoraConfig(r=0), ValueError, "r "),
        (lambda: qlorapp.LoraConfig(lora_bias=True), ValueError, "lora_bias is not supported"),
        (lambda: qlorapp.BitsAndBytesConfig(load_in_8bit=True), ValueError, "load_in_4bit"),
        (lambda: qlorapp.TrainingArguments(eval_strategy="steps", evaluation_strategy="no"), TypeError, "same option"),
        (lambda: qlorapp.AutoModelForCausalLM.from_pretrained("/no/such/folder"), FileNotFoundError, "config.json"),
        (lambda: qlorapp.AutoModelForCausalLM.from_pretrained("x", devicemap="auto"), TypeError, "unknown option"),
        (lambda: qlorapp.Quantizer(block_size=63), ValueError, "block_size"),
    ],
)
def test_mistakes_have_pythons_own_error_types(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_damaged_checkpoint_is_a_format_error(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(qlorapp.FormatError, match=r"model\.safetensors") as error:
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(error.value, ValueError)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="Did you mean 'attention_mask'"):
        model(torch.ones(1, 2, dtype=torch.long), attention_msk=None)
    with pytest.raises(IndexError, match="token ids must be from 0 to .* got 10000"):
        model(torch.full((1, 2), 10_000))
    tokens = torch.tensor([[1, 2, 3]])
    for label in (-1, 10_000):
        with pytest.raises(IndexError, match=f"labels must be -100 .ignored. or from 0 to .* got {label}"):
            model(tokens, labels=torch.tensor([[1, label, 3]]))
    padding = torch.tensor([[1, 2, 10_000]])  # what stands on padding is never looked up
    model(padding, attention_mask=torch.tensor([[1, 1, 0]]), labels=torch.tensor([[1, 2, -100]]))


def test_a_four_bit_model_goes_to_the_gpu_by_itself_and_any_other_where_it_is_sent(monkeypatch):
    from qlorapp.auto_model import _device_of

    for here in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
        gpu = torch.device("cuda", 0) if here else torch.device("cpu")
        assert _device_of(None, quantized=True) == gpu
        assert _device_of("auto", quantized=False) == gpu
        assert _device_of(None, quantized=False) == torch.device("cpu")
        places = {"": 0}
        assert _device_of(places, quantized=True) == gpu and places == {"": 0}
        assert _device_of("cpu", quantized=True) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device_map asks for cuda:2; this machine has 2 GPU"):
        _device_of("cuda:2", quantized=True)
    with pytest.raises(ValueError, match="one device"):
        _device_of({"a": 0, "b": "cpu"}, quantized=True)
