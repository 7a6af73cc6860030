# SPDX-License-Identifier: Apache-2.0
"""What scripts written for transformers, PEFT and TRL reach for beside the main road: it is there, or says what to do instead."""

import json
import logging
import os
import subprocess
import sys

import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, ROOT
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import arguments, rows, trained

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def four_bit(folder, config=None):
    config = config or qlorapp.BitsAndBytesConfig(**NF4)
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def test_configs_that_were_imported_from_the_peers_are_taken(folder):
    ours, theirs = four_bit(folder), four_bit(folder, transformers.BitsAndBytesConfig(**NF4))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    models = []
    for model, config in ((ours, qlorapp.LoraConfig), (theirs, peft.LoraConfig)):
        models.append(
            qlorapp.get_peft_model(model, config(r=4, lora_alpha=3, target_modules=["q_proj"], use_rslora=True), seed=1)
        )
    shown = [{name: parameter.shape for name, parameter in model.named_parameters()} for model in models]
    with pytest.raises(
        TypeError, match=r"peft_config must be a qlorapp.LoraConfig; got peft\..*PrefixTuningConfig. Adapters here are LoRA"
    ):
        qlorapp.get_peft_model(four_bit(folder), peft.PrefixTuningConfig())
    assert shown[0] == shown[1]
    made, given = (model.peft_config["default"].to_dict() for model in models)
    assert {key: made[key] for key in made if made[key] != given[key]}.keys() <= {
        "task_type",
        "peft_version",
    }  # PEFT fills them in


def test_callbacks_that_were_imported_from_transformers_are_called(folder, tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    assert trained(folder, tmp_path, more={"callbacks": [Stop()]}).output.global_step == 2
    stopping = {"callbacks": [transformers.EarlyStoppingCallback(1)], "eval_dataset": rows(4)}
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
               "learning_rate": 30.0}  # fmt: skip
    assert trained(folder, tmp_path, more=stopping, **options).output.global_step < 6


def test_what_a_loaded_model_says_of_itself(folder):
    model = four_bit(folder)
    assert model.is_loaded_in_4bit and model.is_quantized and not model.is_loaded_in_8bit and model.can_generate()
    assert model.hf_device_map == {"": torch.device("cpu")} and model.config.quantization_config.bnb_4bit_quant_type == "nf4"
    assert json.loads(model.config.to_json_string())["quantization_config"]["bnb_4bit_compute_dtype"] == "float32"
    assert model.config.get_text_config() is model.config
    model.warnings_issued["estimate_tokens"] = True
    dense = qlorapp.AutoModelForCausalLM.from_pretrained(folder)
    assert not dense.is_loaded_in_4bit and not hasattr(dense.config, "quantization_config")


def test_tables_keep_their_rows(folder):
    model = load(folder)
    assert model.resize_token_embeddings(96) is model.get_input_embeddings() is model.resize_token_embeddings()
    with pytest.raises(ValueError, match=r"tables have 96 rows and keep them; 97 were asked for.*tokenizer.pad_token = "):
        model.resize_token_embeddings(97)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_8bit": True}, "load_in_8bit is not supported: layers are stored in four bits"),
        ({"load_in_4bits": True}, "Did you mean 'load_in_4bit'"),
    ],
)
def test_other_bases_are_refused(folder, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        qlorapp.AutoModelForCausalLM.from_pretrained(folder, **options)


def test_code_of_a_checkpoint_is_never_run_and_that_is_said(folder, caplog):
    with caplog.at_level(logging.WARNING, "qlorapp"):
        qlorapp.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "trust_remote_code has no effect: code of a checkpoint is never run" in caplog.text


def test_an_eos_that_was_masked_as_padding_is_learnt(folder):
    """As transformers does: attention_mask=input_ids.ne(pad_token_id) where EOS is the padding, labels padded with -100 (Alpaca, QLoRA)."""
    ids = torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 2]])
    labels = torch.tensor([[-100, 6, 2, -100, -100], [-100, -100, 7, 8, 2]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(2), "labels": labels}
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert ours(**batch).loss.item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-5)


def test_labels_on_padding_are_said_to_be_left_out(folder):
    code = f"""
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import qlorapp
model = qlorapp.AutoModelForCausalLM.from_pretrained({str(folder)!r})
ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
masked = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
print("now")
assert all(torch.equal(model(ids, attention_mask=mask, labels=ids).loss, masked) for _ in range(2))
"""  # a process of its own: it is said once in each
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    before, after = out.split("now")
    assert "padding" not in before and after.count("labels on padding are left out of the loss") == 1


def test_nothing_uploads(folder, tmp_path):
    model = load(folder)
    for held in (model, model.get_base_model()):
        with pytest.raises(NotImplementedError, match="upload_folder"):
            held.push_to_hub("somebody/something")


@pytest.mark.parametrize("adapted", [False, True])
def test_transformers_pipeline_knows_the_models_by_their_class(folder, caplog, adapted):
    """It compares the name, and lists over a hundred others where it does not know it."""
    model = load(folder)
    model = model if adapted else model.get_base_model()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        tokenizer = qlorapp.AutoTokenizer.from_pretrained(ROOT / "examples" / "data" / "tiny-llama")
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    finally:
        logger.removeHandler(caplog.handler)
    assert "is not supported" not in caplog.text
    assert isinstance(model, qlorapp.PeftModel if adapted else qlorapp.CausalLM)
    assert type(model).__name__ == ("PeftModelForCausalLM" if adapted else "LlamaForCausalLM")
    assert type(load(folder).get_base_model()) is type(load(folder).get_base_model())


def test_transformers_pipeline_generates():
    place = ROOT / "examples" / "data" / "tiny-llama"
    model, tokenizer = four_bit(place), transformers.AutoTokenizer.from_pretrained(place)
    (answer,) = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)(
        "Mia, put", max_new_tokens=4, do_sample=False
    )
    ids = tokenizer("Mia, put", return_tensors="pt")["input_ids"]
    assert answer["generated_text"] == tokenizer.decode(model.generate(ids, max_new_tokens=4)[0], skip_special_tokens=True)


def test_a_trainer_that_cannot_be_made_says_why(folder, tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"\[Trainer\] there is nothing to train: the base is frozen. Add adapters"):
        qlorapp.Trainer(four_bit(folder), args, train_dataset=rows(4))
    with pytest.raises(
        TypeError, match="args must be a qlorapp.TrainingArguments; got transformers.training_args.TrainingArguments"
    ):
        qlorapp.Trainer(load(folder), transformers.TrainingArguments(str(tmp_path)), train_dataset=rows(4))
    with pytest.raises(TypeError, match=r"row 0 has \['text'\]. Tokenize the rows, or use SFTTrainer"):
        qlorapp.Trainer(load(folder), args, train_dataset=[{"text": "one"}])
    with pytest.raises(TypeError, match="unknown option 'train_data'. Did you mean 'train_dataset'"):
        qlorapp.Trainer(load(folder), args, train_data=rows(4))


def test_what_people_ask_a_trainer_for(folder, tmp_path):
    trainer = qlorapp.Trainer(load(folder), arguments(tmp_path), train_dataset=rows(12))
    with pytest.raises(ValueError, match="there is no optimizer yet"):
        trainer.get_learning_rates()
    trainer.train()
    assert trainer.get_learning_rates() == [0.0]  # the schedule has run out
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["TrainingArguments", "SFTConfig", "LoraConfig", "BitsAndBytesConfig"])
def test_help_of_a_config_shows_every_option(name):
    config = getattr(qlorapp, name)
    lines = config.__doc__.splitlines()
    for field, kind, default, text, _, reason in config.field_rows:
        at = lines.index(f"    {field}: {kind} = {json.loads(default)!r}")
        assert text in lines[at + 1] and reason in lines[at + 1]


def test_a_generation_config_refuses_what_the_constructor_does(folder):
    """Set on the model, an option that is not built would change nothing, and nobody would know."""
    model = load(folder).get_base_model()
    config = model.generation_config
    for name, value in (("num_beams", 4), ("no_repeat_ngram_size", 2), ("output_attentions", True)):
        with pytest.raises(ValueError, match=rf"\[GenerationConfig\] {name}={value!r} is not supported"):
            setattr(config, name, value)
        with pytest.raises(ValueError, match=rf"{name}={value!r} is not supported"):
            config.update(**{name: value})
    with pytest.raises(TypeError, match="unknown option 'max_new_token'. Did you mean 'max_new_tokens'"):
        config.max_new_token = 3
    config.num_beams, config.use_cache = 1, False  # which mean nothing here
    assert config.update(max_new_tokens=3, do_sample=False, of_their_own=1) == {"of_their_own": 1}
    assert (config.max_new_tokens, config.do_sample) == (3, False)
    ids = torch.arange(3, 9).view(1, 6)
    assert model.generate(ids, eos_token_id=[]).shape == (1, 9)
    model.generation_config = transformers.GenerationConfig(num_beams=4)
    with pytest.raises(ValueError, match=r"\[generate\] num_beams=4 is not supported"):
        model.generate(ids)


def test_a_models_config_says_what_does_nothing_and_is_written(folder, tmp_path):
    code = (
        "import logging, qlorapp\n"
        f"config = qlorapp.AutoModelForCausalLM.from_pretrained({str(folder)!r}).config\n"
        "config.output_hidden_states = True\nconfig.output_hidden_states = True\nconfig.output_attentions = False\n"
    )
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("[config] output_hidden_states=True has no effect: ") == 1
    config = four_bit(folder).config
    assert (
        config.get("hidden_size") == config.hidden_size and config.get("of_their_own", 5) == 5 and config.get("nothing") is None
    )
    assert config.to_diff_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "new")
    back = transformers.AutoConfig.from_pretrained(tmp_path / "new")
    assert isinstance(back, transformers.LlamaConfig) and back.hidden_size == config.hidden_size
    assert back.quantization_config["bnb_4bit_quant_type"] == "nf4" and back.dtype == torch.float32
    with pytest.raises(ValueError, match="push_to_hub=True. Leave out the option"):
        config.save_pretrained(tmp_path, push_to_hub=True)


def test_a_base_model_takes_adapters_as_transformers_do(folder, tmp_path):
    model = load(folder).unload()
    ids = torch.arange(5, 25)[None]
    with pytest.raises(ValueError, match=r"\[active_adapters\] the model has no adapter\. Add one"):
        model.active_adapters()
    with pytest.raises(TypeError, match=r"peft_config must be a qlorapp\.LoraConfig; got builtins\.str"):
        model.add_adapter("first")
    before = model(ids).logits
    model.add_adapter(qlorapp.LoraConfig(r=4, target_modules="all-linear"))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]), "second")
    assert model.active_adapters() == ["second"] and list(model.peft_config) == ["default", "second"]
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"second"}
    model.set_adapter("default")
    qlorapp.Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows(24)).train()
    trained = model.eval()(ids).logits
    assert not torch.equal(trained, before)
    model.disable_adapters()
    assert torch.equal(model(ids).logits, before)
    model.enable_adapters()
    assert torch.equal(model(ids).logits, trained)
    assert qlorapp.PeftModel(model).active_adapters == ["default"]


def test_dir_shows_public_names_alone():
    names = dir(qlorapp)
    assert set(qlorapp.__all__) <= set(names) and len(names) == len(set(names))
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    modules = {path.stem for path in (ROOT / "python" / "qlorapp").glob("*.py")} & set(names)
    assert modules - {"merge"} <= {
        "nn",
        "optim",
        "plan",
        "trainer_utils",
    }  # plan and merge are functions; scripts import from the others


@pytest.mark.parametrize(
    "name", ["Accumulator", "GradScaler", "QuantizedTensor", "Quantizer", "LoraLinear", "CheckpointedBlock"]
)
def test_the_docstrings_of_the_classes_are_complete_by_themselves(name):
    """A pip user has no header to look into."""
    kind = getattr(qlorapp, name)
    assert len(kind.__doc__.splitlines()) >= 3 and ".hpp" not in kind.__doc__
    for member in ("quantize", "dequantize", "weigh", "add", "mean_loss"):
        assert not hasattr(kind, member) or len(getattr(kind, member).__doc__.splitlines()) >= 3, member
