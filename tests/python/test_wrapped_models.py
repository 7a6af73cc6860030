# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that also read images: C++ computes their text, transformers what has images, and adapters have the names that PEFT gives them."""

import copy
import json
import logging

import peer
import pytest
import torch
import transformers

pytest.importorskip("bitsandbytes")
import bitsandbytes
import peft
import qlorapp
from engine_checks import NF4, assert_same_pass, base, losses_and_gradients, reasons, with_lora
from families import batch, relative
from qlorapp import _C
from qlorapp.nn import Linear4bit
from safetensors.torch import load_file, save_file
from tiny_trainer import arguments, rows, tokenizer
from wrapped import WRAPPED, with_image, write

TARGETS = r".*language_model.*\.(q_proj|v_proj|down_proj)"


@pytest.fixture(scope="module", params=WRAPPED)
def setting(request, tmp_path_factory):
    """(name, folder, transformers' model)"""
    folder = tmp_path_factory.mktemp("wrapped")
    return request.param, folder, write(folder / "float", request.param)


def load(folder, four_bit=True, **options):
    config = qlorapp.BitsAndBytesConfig(**NF4) if four_bit else None
    return qlorapp.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=config, **options
    )


def test_every_wrapper_is_here():
    assert {
        type(write_config()).__name__.replace("Config", "ForConditionalGeneration") for write_config in WRAPPED.values()
    } == set(_C.wrapped_architectures())


def test_text_is_computed_by_the_engine_as_by_transformers(setting, caplog):
    name, folder, theirs = setting
    with caplog.at_level(logging.INFO, "qlorapp"):
        model = load(folder / "float", four_bit=False)
    assert (
        "C++ computes its text, and transformers calls with images (model." in caplog.text and "Not read here: " in caplog.text
    )
    for path, parameter in theirs.named_parameters():
        assert torch.equal(parameter, model.get_parameter(path)), path
    model.requires_grad_(False)
    rows = batch()
    marks = {"token_type_ids": torch.zeros_like(rows["input_ids"])} if name == "Gemma 3" else {}
    with torch.no_grad():
        ours, expected = model(**rows, **marks), theirs(**rows, **marks)
        assert not reasons(model), "the engine did not compute"
        present = rows["attention_mask"] == 1
        assert relative(ours.logits[present], expected.logits[present]) <= 1e-5
        assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    wanted = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = rows["input_ids"][:, :8]
    assert model.generate(prompts, **wanted).tolist() == theirs.generate(prompts, **wanted).tolist()
    assert not reasons(model), "the engine did not generate"


def dequantized(model, theirs):
    """transformers' model with the text that the four-bit one has."""
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, Linear4bit):
                theirs.get_submodule(path.replace(".base_layer", "")).weight.copy_(module.dequantize())
    return theirs


def test_adapters_over_four_bits_train_on_text_and_on_images(setting):
    name, folder, _ = setting
    model = with_lora(load(folder / "float"), target_modules=TARGETS)
    assert_same_pass(model, batch() | ({"token_type_ids": torch.zeros(2, 24, dtype=torch.long)} if name == "Gemma 3" else {}))
    four_bit = [path for path, module in base(model).named_modules() if isinstance(module, Linear4bit)]
    assert four_bit and all(".language_model.layers." in path for path in four_bit)
    theirs = type(base(model)).from_pretrained(folder / "float", dtype=torch.float32)
    theirs = with_lora(dequantized(base(model), theirs), target_modules=TARGETS)
    # The very adapter of PEFT over transformers' model, by names and shapes.
    assert peft.get_peft_model_state_dict(model).keys() == peft.get_peft_model_state_dict(theirs).keys()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            theirs.get_parameter(path).data.copy_(parameter)
    ours, expected = (losses_and_gradients(m.train(), with_image(name)) for m in (model, theirs))
    assert any("pixel_values" in reason for reason in reasons(model))
    assert ours[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    for path, gradient in expected[2].items():
        torch.testing.assert_close(ours[2][path], gradient, rtol=1e-3, atol=1e-5)
    wanted = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = {key: value for key, value in with_image(name).items() if key != "labels"}
    assert model.eval().generate(**prompt, **wanted).tolist() == theirs.eval().generate(**prompt, **wanted).tolist()


def test_the_command_trains_an_adapter_that_peft_loads(setting):
    name, folder, _ = setting
    rows = peer.write_rows(folder / "rows.jsonl", 12)
    lora = ("--lora_target_modules", "q_proj,down_proj", "--modules_to_save", "embed_tokens") if name == "Qwen3-VL" else ()
    run = peer.run_cli(
        "train", "--model", folder / "float", "--data", folder / "rows.jsonl", "--output", folder / "run", "--max_steps", 3,
        "--learning_rate", 1e-2, "--dtype", "float32", "--save_strategy", "no", "--overwrite_output_dir", "true", *lora,
    )  # fmt: skip
    assert "Not read here: " in run.stdout + run.stderr
    model = load(folder / "float")
    theirs = dequantized(model, type(model).from_pretrained(folder / "float", dtype=torch.float32))
    theirs = peft.PeftModel.from_pretrained(theirs, folder / "run").eval()
    assert not any(".vision_tower." in path or ".visual." in path for path in theirs.state_dict() if "lora_" in path)
    stored = load_file(folder / "run/adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(theirs)
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(loaded[key], value) for key, value in stored.items())
    text = peer.collate(rows[:3])
    model = peft.PeftModel.from_pretrained(model, folder / "run").eval()
    with torch.no_grad():
        ours, expected = model(**text).loss, theirs(**text).loss
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    if lora:
        return  # a whole table is merged, too, which test_merge shows
    peer.run_cli(
        "merge", "--model", folder / "float", "--adapter", folder / "run", "--output", folder / "merged", "--dtype", "float32"
    )
    merged = type(base(model)).from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    untouched = type(base(model)).from_pretrained(folder / "float", dtype=torch.float32)
    for key, value in peft.PeftModel.from_pretrained(untouched, folder / "run").merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[key], value, rtol=1e-6, atol=1e-6)


def test_a_folder_in_four_bits_goes_both_ways(setting):
    _, folder, theirs = setting
    peer.run_cli("quantize", "--model", folder / "float", "--output", folder / "ours")
    load(folder / "float").save_pretrained(folder / "saved")
    for name in ("ours", "saved"):
        again = load(folder / name, four_bit=False)
        reference = peer.load_4bit(folder / name)
        with torch.no_grad():
            ours, expected = (
                m(**batch()).logits[batch()["attention_mask"] == 1]
                for m in (again, dequantized(again, reference_of(reference, theirs)))
            )
        assert relative(ours, expected) <= 1e-5, name
        for path, parameter in theirs.named_parameters():
            if "language_model" not in path and not path.startswith("lm_head"):
                assert torch.equal(reference.get_parameter(path), parameter), path


def reference_of(four_bit, theirs):
    """transformers' float model with what bitsandbytes reads from a four-bit folder."""
    model = copy.deepcopy(theirs)
    with torch.no_grad():
        for path, module in four_bit.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                model.get_submodule(path).weight.copy_(
                    bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                )
    return model


def test_what_the_folder_lacks_is_named(setting, tmp_path):
    _, folder, _ = setting
    for file in (folder / "float").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "vis" in name and name.endswith("weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(_C.FormatError, match="lacks model\\.vis.*, which its config.json asks for"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": 3}, "text_config must be a JSON object; got 3"),
        ({"quantisation_config": {}}, "'quantisation_config' is not a key of a model. Did you mean 'quantization_config'"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map must be absent: code from a model folder is never run"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong_around_its_text_is_refused(tmp_path, change, message):
    write(tmp_path, "Gemma 3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    refused = peer.run_cli("inspect", tmp_path, check=False)
    assert message in refused.stdout + refused.stderr


def test_the_trainer_trains_the_text_in_cpp(setting, tmp_path, caplog):
    _, folder, _ = setting
    model = qlorapp.get_peft_model(load(folder / "float"), qlorapp.LoraConfig(r=4, target_modules=TARGETS))
    args = arguments(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=3)
    with caplog.at_level(logging.INFO, "qlorapp"):
        qlorapp.Trainer(
            model=model, args=args, train_dataset=rows(), data_collator=transformers.DataCollatorForSeq2Seq(tokenizer())
        ).train()
    assert "transformers' loop runs this training" not in caplog.text
    stored = load_file(tmp_path / "run/checkpoint-3/adapter_model.safetensors")
    assert stored.keys() == peft.get_peft_model_state_dict(model).keys()
    assert any(value.any() for key, value in stored.items() if "lora_B" in key)
