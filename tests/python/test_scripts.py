# SPDX-License-Identifier: Apache-2.0
"""What scripts do with a model beside training: state dicts, loops by hand, adapters from folders; the same numbers as transformers and PEFT."""

import gc

import peft
import pytest
import qlorapp
import torch
import transformers
from qlorapp.nn import Linear4bit
from tiny_llama import SHAPES, SIZES, folder, load, ragged_batch, write_checkpoint  # noqa: F401  (folder is a fixture)
from tiny_trainer import NF4

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def four_bit(place, **options):
    return qlorapp.AutoModelForCausalLM.from_pretrained(place, quantization_config=qlorapp.BitsAndBytesConfig(**NF4), **options)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 43).view(2, 20)).logits


# --- the model


def test_names_shapes_and_state_are_those_over_bitsandbytes(folder):
    pytest.importorskip("bitsandbytes")
    lora = peft.LoraConfig(**LORA, lora_dropout=0.1)
    quantization = transformers.BitsAndBytesConfig(**NF4)
    theirs = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization), lora)
    ours = load(folder, lora_dropout=0.1, task_type="CAUSAL_LM")

    def described(model):
        return {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}

    assert described(ours) == described(theirs)
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    state, reference = ours.state_dict(), theirs.state_dict()
    assert set(state) == set(reference)
    for name, tensor in state.items():
        assert tensor.shape == reference[name].shape and tensor.dtype == reference[name].dtype, name
        if name.endswith(("quant_state.bitsandbytes__nf4", "base_layer.weight")):
            assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_equal_transformers_in_float32(tmp_path, shape, v4):
    reference = write_checkpoint(tmp_path, v4=v4, **SHAPES[shape])
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = ragged_batch()
    with torch.no_grad():
        # Positions as ours count them: from the first token of each row.
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        expected, output = reference(**batch, position_ids=positions), model(**batch)
    present = batch["attention_mask"] == 1
    difference = (output.logits - expected.logits)[present].abs().max()
    assert difference <= 1e-4 and difference <= 1e-5 * expected.logits[present].abs().max()
    assert abs(output.loss - expected.loss) <= 1e-5
    assert output.logits.shape == (3, 17, SIZES["vocab_size"])


def test_what_cpp_does_not_build_of_its_own_families_is_computed_by_transformers(tmp_path, caplog):
    write_checkpoint(tmp_path, attention_dropout=0.1)
    model = four_bit(tmp_path)
    assert "LlamaForCausalLM (attention_dropout is not supported: dropout on attention weights" in caplog.text
    assert "transformers' own code, with linear layers in four bits" in caplog.text
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            reference.get_submodule(name).weight.data = layer.dequantize()
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-4)


def test_an_eos_that_was_masked_as_padding_is_learned(folder):
    """As transformers does: attention_mask=input_ids.ne(pad_token_id) where EOS is the padding, labels padded with -100 (Alpaca, QLoRA)."""
    ids = torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 2]])
    labels = torch.tensor([[-100, 6, 2, -100, -100], [-100, -100, 7, 8, 2]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(2), "labels": labels}
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert ours(**batch).loss.item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-5)


def test_autocast_changes_no_layer_of_its_own(folder):
    torch.manual_seed(1)
    weight, x = torch.randn(64, 64), torch.randn(3, 64)
    layers = [qlorapp.LoraLinear(w, r=4, seed=1) for w in (weight, qlorapp.Quantizer().quantize(weight))]
    for layer in (*layers, four_bit(folder).model.layers[0].self_attn.q_proj):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = layer(x)
        assert inside.dtype == torch.float32 and torch.equal(inside, layer(x))


# --- loops by hand


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_hand_written_loop_trains(folder, set_to_none):
    model, batch = load(folder), ragged_batch()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_two_backwards_accumulate_and_a_lost_gradient_begins_anew(folder):
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


def test_a_parameter_that_was_replaced_is_computed_with(folder):
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


def test_a_graph_outlives_its_model(folder):
    model, batch = load(folder), ragged_batch()
    parameters = trainable(model)
    loss = model(**batch).loss
    del model
    gc.collect()
    loss.backward()
    assert any(p.grad.abs().max() > 0 for p in parameters)


def test_the_accumulators_window_equals_one_big_batch(folder):
    model, batch = load(folder).eval(), ragged_batch()
    model(**batch).loss.backward()
    wanted = [p.grad.clone() for p in trainable(model)]
    model.zero_grad()
    accumulator = qlorapp.Accumulator((batch["labels"][:, 1:] != -100).sum(1).tolist())
    for i in range(3):
        row = {key: value[i : i + 1] for key, value in batch.items()}
        total = model(**row, num_items_in_batch=1).loss  # the sum
        accumulator.share_of(total).backward()
    assert abs(accumulator.mean_loss() - model(**batch).loss) <= 1e-6
    for gradient, parameter in zip(wanted, trainable(model), strict=True):
        assert torch.linalg.norm(parameter.grad - gradient) <= 5e-6 * torch.linalg.norm(gradient)


# --- folders


def test_an_adapters_folder_gives_its_base_and_itself(folder, tmp_path):
    model = qlorapp.get_peft_model(four_bit(folder), peft.LoraConfig(**LORA, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    alone = four_bit(tmp_path)
    assert type(alone) is transformers.LlamaForCausalLM and not trainable(alone)
    auto = qlorapp.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path, is_trainable=True, quantization_config=qlorapp.BitsAndBytesConfig(**NF4)
    )
    assert isinstance(auto, peft.PeftModel) and trainable(auto)
    wrapped = qlorapp.PeftModel.from_pretrained(four_bit(folder), tmp_path)
    for other in (alone, auto.eval(), wrapped.eval()):
        torch.testing.assert_close(logits(other), logits(model.eval()), rtol=1e-5, atol=1e-6)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{folder}"', "null"))
    with pytest.raises(ValueError, match="base_model_name_or_path .* must name the base"):
        four_bit(tmp_path)


def test_what_cannot_be_loaded_has_pythons_own_error_types(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        qlorapp.AutoModelForCausalLM.from_pretrained("/no/such/folder")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(qlorapp.FormatError, match=r"model\.safetensors") as error:
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(error.value, ValueError)


def test_a_four_bit_model_goes_to_the_gpu_by_itself_and_any_other_where_it_is_sent(monkeypatch):
    from qlorapp.hf.placement import device_of

    for here in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
        gpu = torch.device("cuda", 0) if here else torch.device("cpu")
        assert device_of(None, quantized=True) == device_of("auto", quantized=False) == gpu
        assert device_of(None, quantized=False) == device_of("cpu", quantized=True) == torch.device("cpu")
        assert device_of({"": 0}, quantized=True) == gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device_map asks for cuda:2; this machine has 2 GPU"):
        device_of("cuda:2", quantized=True)
    with pytest.raises(ValueError, match="one device"):
        device_of({"a": 0, "b": "cpu"}, quantized=True)
