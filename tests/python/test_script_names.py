# SPDX-License-Identifier: Apache-2.0
"""Scripts of others with nothing changed but the package they import from: names, outputs, layer classes, autocast, adapters."""

import json
import subprocess
import sys
import threading
import types

import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, ROOT, os
from tiny_llama import folder, load, ragged_batch  # noqa: F401  (folder is a fixture)

PHI = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def four_bit(folder, **options):
    config = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    path = tmp_path_factory.mktemp("phi")
    torch.manual_seed(2)
    transformers.PhiForCausalLM(transformers.PhiConfig(**PHI)).save_pretrained(path)
    return path


# --- imports


@pytest.mark.parametrize("name", sorted(qlorapp.passed_through.FROM_TRANSFORMERS - {"logging"}))
def test_what_transformers_has_is_its_own(name):
    assert getattr(qlorapp, name) is getattr(transformers, name) and name in dir(qlorapp)


def test_its_logging_module_is_passed_on():
    from qlorapp import logging

    assert logging is transformers.utils.logging


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys, qlorapp; assert 'transformers' not in sys.modules; from qlorapp import *; assert 'transformers' not in sys.modules; "
        "from qlorapp import get_linear_schedule_with_warmup, set_seed; assert 'transformers' in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("DPOTrainer", "training here is supervised: use SFTTrainer"),
        ("AutoModelForSequenceClassification", "Use AutoModelForCausalLM"),
        ("PrefixTuningConfig", "adapters here are LoRA: use LoraConfig"),
        ("DataCollatorForCompletionOnlyLM", "assistant_only_loss=True"),
    ],
)
def test_what_is_not_here_says_what_to_use(name, says):
    with pytest.raises(ImportError, match=f"qlorapp has no {name}: .*{says}"):
        exec(f"from qlorapp import {name}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("AdamW", "use torch.optim.AdamW"),
        ("setup_chat_format", "Set tokenizer.chat_template"),
        ("replace_lora_weights_loftq", "init_lora_weights='loftq'"),
        ("clone_chat_template", r"SFTConfig\(chat_template_path=…\)"),
        ("ConstantLengthDataset", r"TRL took it away: use SFTConfig\(packing=True"),
        ("DefaultFlowCallback", "the flags of control in a TrainerCallback"),
        ("GPTQConfig", r"Use BitsAndBytesConfig\(load_in_4bit=True\) on the float checkpoint"),
        ("AwqConfig", r"Use BitsAndBytesConfig\(load_in_4bit=True\) on the float checkpoint"),
    ],
)
def test_what_was_taken_away_or_is_of_no_use_says_what_to_use(name, says):
    with pytest.raises(ImportError, match=f"qlorapp has no {name}: .*{says}") as told:
        exec(f"from qlorapp import {name}")
    assert "\n" not in str(told.value)


def test_an_older_name_of_transformers_is_the_newer_one():
    from qlorapp import BatchEncoding, EvaluationStrategy

    assert EvaluationStrategy is transformers.IntervalStrategy and BatchEncoding is transformers.BatchEncoding
    assert qlorapp.TrainingArguments(eval_strategy=EvaluationStrategy.EPOCH).eval_strategy == "epoch"


def test_what_peft_and_transformers_modules_have_is_their_own(folder, tmp_path):
    from qlorapp import PeftType, get_last_checkpoint, load_peft_weights, trainer_utils
    from qlorapp.trainer_utils import EvalPrediction, set_seed
    from qlorapp.trainer_utils import get_last_checkpoint as by_module

    assert PeftType is peft.PeftType and load_peft_weights is peft.load_peft_weights
    assert get_last_checkpoint is by_module is transformers.trainer_utils.get_last_checkpoint
    assert trainer_utils.IntervalStrategy is transformers.IntervalStrategy
    assert set_seed is qlorapp.set_seed and EvalPrediction is qlorapp.EvalPrediction  # what is here goes before
    with pytest.raises(ImportError, match="cannot import name 'Trainor'"):
        exec("from qlorapp.trainer_utils import Trainor")
    model = load(folder)
    model.save_pretrained(tmp_path)
    assert load_peft_weights(tmp_path, device="cpu").keys() == qlorapp.get_peft_model_state_dict(model).keys()


def test_a_peft_config_is_made_of_a_dict_or_of_trls_model_config(monkeypatch):
    from qlorapp import get_peft_config

    made = get_peft_config(peft.LoraConfig(r=3, target_modules=["q_proj"]).to_dict())
    assert isinstance(made, qlorapp.LoraConfig) and (made.r, list(made.target_modules)) == (3, ["q_proj"])
    with pytest.raises(ValueError, match="peft_type must be 'LORA'; got .*IA3.*Adapters here are LoRA: use LoraConfig"):
        get_peft_config(peft.IA3Config().to_dict())
    with pytest.raises(TypeError, match="must be a dict .* or TRL's ModelConfig; got int. Use LoraConfig"):
        get_peft_config(3)
    trl = types.ModuleType("trl")
    trl.get_peft_config = lambda config: ("TRL's", config)
    monkeypatch.setitem(sys.modules, "trl", trl)
    config = types.SimpleNamespace(use_peft=True)
    assert get_peft_config(config) == ("TRL's", config)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="pip install trl, or do without: use LoraConfig"):
        get_peft_config(config)


@pytest.mark.parametrize(
    ("name", "optim"),
    [
        ("AdamW8bit", "adamw_8bit"),
        ("PagedAdamW8bit", "paged_adamw_8bit"),
        ("AdamW", "adamw_torch"),
        ("PagedAdamW", "paged_adamw_32bit"),
    ],
)
def test_bitsandbytes_optimizers_say_what_to_use(name, optim):
    says = rf'qlorapp.optim has no {name}: .*Use TrainingArguments\(optim="{optim}"\)'
    with pytest.raises(ImportError, match=says):
        getattr(qlorapp.optim, name)
    with pytest.raises(ImportError, match=says):
        exec(f"from qlorapp.optim import {name}")
    assert qlorapp.TrainingArguments(optim=optim).optim == optim
    with pytest.raises(ImportError, match=r"no Lion8bit: .*adamw_8bit.*optimizers=\(torch.optim.…, None\)"):
        qlorapp.optim.Lion8bit  # noqa: B018


TRL_ONLY = sorted(name for name, (module, _) in qlorapp.passed_through.FROM_OTHERS.items() if module == "trl")


@pytest.mark.parametrize("name", TRL_ONLY)
def test_what_trl_has_is_its_own_where_it_is_installed(name, monkeypatch):
    trl = types.ModuleType("trl")
    setattr(trl, name, object())
    monkeypatch.setitem(sys.modules, "trl", trl)
    assert qlorapp.passed_through.find(name) is getattr(trl, name) and name in dir(qlorapp)
    delattr(trl, name)
    with pytest.raises(
        ImportError, match=f"qlorapp.{name} is trl's own, and the release that is installed lacks it, or do without: "
    ):
        qlorapp.passed_through.find(name)
    monkeypatch.setitem(sys.modules, "trl", None)  # not installed
    with pytest.raises(ImportError, match=f"qlorapp.{name} is trl's own: pip install trl, or do without: "):
        qlorapp.passed_through.find(name)


def test_loraplus_of_peft_sees_our_adapters(folder):
    optimizer = qlorapp.create_loraplus_optimizer(load(folder), torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    rates = {group["lr"]: len(group["params"]) for group in optimizer.param_groups if group["params"]}
    layers = sum("lora_B" in name for name, _ in load(folder).named_parameters())
    assert rates == {1e-3: layers, 16e-3: layers}


def test_another_name_is_no_attribute():
    assert not hasattr(qlorapp, "Trainor")
    assert not set(qlorapp.passed_through.NOT_HERE) & {*dir(qlorapp)}


def test_old_names_of_options_are_parsed_from_the_command_line(tmp_path):
    parser = qlorapp.HfArgumentParser((qlorapp.TrainingArguments, qlorapp.LoraConfig))
    words = [
        "--output_dir",
        str(tmp_path),
        "--evaluation_strategy",
        "steps",
        "--no_cuda",
        "--per-gpu-train-batch-size=3",
        "--r",
        "4",
    ]
    args, lora = parser.parse_args_into_dataclasses(words)
    assert (args.eval_strategy, args.use_cpu, args.per_device_train_batch_size, lora.r) == ("steps", True, 3, 4)
    (args,) = qlorapp.HfArgumentParser(qlorapp.SFTConfig).parse_dict({"output_dir": "x", "max_seq_length": 77})
    assert args.max_length == 77
    with pytest.raises(ValueError, match="evaluation_strateg"):
        parser.parse_args_into_dataclasses([*words, "--evaluation_strategie", "no"])


TINY = ROOT / "examples" / "data" / "tiny-llama"


def test_code_of_a_tokenizers_checkpoint_is_never_run(tmp_path, caplog, monkeypatch):
    """Nor is anybody asked whether it may be."""
    qlorapp.AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "of_their_own"}')
    path = tmp_path / "tokenizer_config.json"
    config = {
        **json.loads(path.read_text()),
        "tokenizer_class": "OfTheirOwn",
        "auto_map": {"AutoTokenizer": ["theirs.OfTheirOwn", None]},
    }
    path.write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass OfTheirOwn: pass\n")
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("it asks"))
    for options in ({"trust_remote_code": True}, {}):
        caplog.clear()
        with pytest.raises(
            ValueError, match="is code of the checkpoint, and code of a checkpoint is never run. Use a checkpoint with"
        ) as told:
            qlorapp.AutoTokenizer.from_pretrained(tmp_path, **options)
        assert "\n" not in str(told.value)
        said = "[AutoTokenizer] trust_remote_code has no effect: code of a checkpoint is never run." in caplog.text
        assert said == bool(options)
    assert not (tmp_path / "was_run").exists()


def test_a_text_is_streamed_into_another_thread():
    model, tokenizer = four_bit(TINY), qlorapp.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer("Mia, put the kite", return_tensors="pt")["input_ids"]
    streamer = qlorapp.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": 6, "do_sample": False}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs={"streamer": streamer, **options})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])


@pytest.mark.parametrize("kind", ["DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "default_data_collator"])
def test_collators_and_schedules_of_transformers_serve_the_trainer(tmp_path, kind):
    """Rows of one length, so that padding plays no part: the losses are those of the trainer's own collator and schedule."""
    tokenizer = qlorapp.AutoTokenizer.from_pretrained(TINY)
    ids = [[5 + (7 * i + j) % 40 for j in range(12)] for i in range(16)]
    rows = [{"input_ids": row, "attention_mask": [1] * 12, "labels": list(row)} for row in ids]
    losses = []
    for own in (False, True):
        model = qlorapp.get_peft_model(four_bit(TINY), qlorapp.LoraConfig(r=4), seed=1)
        args = qlorapp.TrainingArguments(str(tmp_path), learning_rate=0.01, warmup_steps=2, num_train_epochs=2, logging_steps=1,
                                         save_strategy="no", optim="adamw_torch", disable_tqdm=True, report_to="none")  # fmt: skip
        more = {}
        if own:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
            more["optimizers"] = (optimizer, qlorapp.get_linear_schedule_with_warmup(optimizer, 2, 4))
            if kind == "default_data_collator":
                more["data_collator"] = qlorapp.default_data_collator
            else:
                options = {"mlm": False} if kind == "DataCollatorForLanguageModeling" else {"model": model}
                more["data_collator"] = getattr(qlorapp, kind)(tokenizer, **options)
        trainer = qlorapp.Trainer(model, args, train_dataset=rows, **more)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)


# --- a model's output


def test_an_output_is_what_transformers_output_is(folder):
    batch = ragged_batch()
    model, theirs = load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    for labels in ({}, {"labels": batch["labels"]}):
        out = model(batch["input_ids"], batch["attention_mask"], **labels)
        reference = theirs(batch["input_ids"], batch["attention_mask"], use_cache=False, **labels)
        assert list(out.keys()) == list(out) == list(reference.keys()) and len(out) == len(reference)
        assert [(name, value.shape) for name, value in out.items()] == [(n, v.shape) for n, v in reference.items()]
        assert [v.shape for v in out.values()] == [v.shape for v in out.to_tuple()] == [v.shape for v in reference.to_tuple()]
        assert out.get("loss") is out.loss and out.get("past_key_values", 5) == 5 and ("loss" in out) == ("loss" in reference)
        assert type(out[:2]) is tuple and len(out[:2]) == len(reference[:2]) and out[:1][0] is out[0] and out[-1] is out.logits
        assert dict(**out).keys() == dict(**reference).keys()
        with pytest.raises(KeyError):
            out["hidden_states"]
    loss, logits = model(**batch, return_dict=False)
    assert torch.equal(loss, out.loss) and torch.equal(logits, out.logits)


def test_an_output_is_made_again_from_its_values_as_accelerate_does(folder):
    batch = ragged_batch()
    out = load(folder)(**batch)
    again = type(out)({name: value.double() for name, value in out.items()})
    assert again.loss.dtype == again.logits.dtype == torch.float64 and list(again) == ["loss", "logits"]
    assert torch.equal(again.logits, out.logits.double()) and list(type(out)({"logits": out.logits})) == ["logits"]
    assert type(out)(logits=out.logits)[0] is out.logits
    with pytest.raises(TypeError, match="must have loss and logits alone; got 'hidden_states'"):
        type(out)({"logits": out.logits, "hidden_states": out.logits})
    with pytest.raises(TypeError, match="logits must be there; got none"):
        type(out)({"loss": out.loss})


def test_a_model_that_accelerate_prepared_for_mixed_precision_trains(folder):
    accelerate = pytest.importorskip("accelerate")
    batch, model = ragged_batch(), load(folder).train()
    expected = model(**batch).loss
    (reset := accelerate.state.AcceleratorState._reset_state)(reset_partial_state=True)  # what another test has set
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    loss = prepared(**batch).loss
    assert torch.equal(loss.detach(), expected.detach().float())
    accelerator.backward(loss)
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradients and all(g is not None for g in gradients) and any(g.abs().max() > 0 for g in gradients)
    reset(reset_partial_state=True)


# --- layers


def linear_names(model, bnb):
    """What QLoRA's own script does, and half of those after it."""
    return {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


def test_layers_in_four_bits_are_found_by_their_class(folder, phi):
    projections = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert linear_names(four_bit(folder), qlorapp) == projections
    assert linear_names(four_bit(phi), qlorapp) == {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"}
    assert linear_names(qlorapp.AutoModelForCausalLM.from_pretrained(folder), qlorapp) == set()


def test_no_target_is_an_error_that_names_the_layers(folder, phi):
    for base, names in (
        (folder, "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (phi, "dense, fc1, fc2, k_proj, q_proj"),
    ):
        with pytest.raises(
            ValueError, match=f"target_modules must name at least one layer; .*The model has {names}.*'all-linear'"
        ):
            qlorapp.get_peft_model(four_bit(base), qlorapp.LoraConfig(target_modules=[]))


# --- autocast


@pytest.mark.parametrize("kind", ["native", "foreign"])
@pytest.mark.parametrize("quantized", [False, True])
def test_autocast_changes_nothing(folder, phi, kind, quantized):
    """The numbers are those without it; the adapters' updates in a foreign model are PEFT's, so its bound is bfloat16's."""
    if kind == "foreign" and not quantized:
        pytest.skip("all of it is transformers' and PEFT's own")
    place = folder if kind == "native" else phi
    base = four_bit(place) if quantized else qlorapp.AutoModelForCausalLM.from_pretrained(place)
    model = qlorapp.get_peft_model(base, qlorapp.LoraConfig(r=4, target_modules="all-linear"), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    ids = torch.arange(3, 43).view(2, 20)

    def run(**cast):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, **cast):
            out = model(ids, labels=ids)
            text = model.generate(input_ids=ids[:1], max_new_tokens=4, do_sample=False)
            values = [out.loss.detach(), out.logits.detach().float()]
            if kind == "native":
                out.loss.backward()  # against the advice, and by many scripts: the adapters' products stay in their dtype, too
        if kind == "foreign":
            out.loss.backward()
        return [*values, *(p.grad.clone() for p in model.parameters() if p.requires_grad), text]

    plain, cast = run(enabled=False), run()
    if kind == "native":
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
    else:
        assert abs(plain[0] - cast[0]) <= 0.02 * plain[0] and cast[-1].shape == (1, 24)


@pytest.mark.parametrize("quantized", [False, True])
def test_autocast_changes_no_layer_of_its_own(folder, quantized):
    torch.manual_seed(1)
    weight = torch.randn(64, 64)
    layer = qlorapp.LoraLinear(qlorapp.Quantizer().quantize(weight) if quantized else weight, r=4, seed=1)
    module = four_bit(folder).model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64)
    for one in (layer, module):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = one(x)
        assert inside.dtype == torch.float32 and torch.equal(inside, one(x))


# --- adapters


def saved(folder, tmp_path, **options):
    torch.manual_seed(1)
    model = qlorapp.get_peft_model(four_bit(folder, **options), qlorapp.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(tmp_path)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 43).view(2, 20)).logits


@pytest.mark.parametrize("kind", ["native", "foreign"])
def test_an_adapters_folder_gives_its_base_and_itself(folder, phi, tmp_path, kind):
    place = folder if kind == "native" else phi
    model = saved(place, tmp_path)
    alone = four_bit(tmp_path)
    assert not hasattr(alone, "get_base_model") and not any(p.requires_grad for p in alone.parameters())
    config = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    auto = qlorapp.AutoPeftModelForCausalLM.from_pretrained(tmp_path, is_trainable=True, quantization_config=config)
    assert any(p.requires_grad for p in auto.parameters())
    wrapped = qlorapp.PeftModel.from_pretrained(
        four_bit(place), tmp_path, torch_dtype=torch.float16, device_map="auto", is_trainable=True
    )
    for other in (alone, auto.eval(), wrapped.eval()):
        assert torch.allclose(logits(other), logits(model), rtol=1e-5, atol=1e-6)


def test_an_adapter_without_a_base_says_so(folder, tmp_path):
    saved(folder, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{folder}"', "null"))
    for take in (qlorapp.AutoModelForCausalLM, qlorapp.AutoPeftModelForCausalLM):
        with pytest.raises(ValueError, match="base_model_name_or_path .* must name the base"):
            take.from_pretrained(tmp_path)


def test_a_peft_model_is_made_with_its_config_as_well(folder):
    config = qlorapp.LoraConfig(r=4, target_modules=["q_proj"])
    torch.manual_seed(3)
    made = qlorapp.PeftModel(four_bit(folder), config, adapter_name="one")
    torch.manual_seed(3)
    other = qlorapp.get_peft_model(four_bit(folder), config, adapter_name="one")
    assert made.training and made.active_adapter == "one"
    mine, theirs = (dict(model.named_parameters()) for model in (made, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {name for name, p in mine.items() if p.requires_grad} == {name for name, p in theirs.items() if p.requires_grad}


def test_a_peft_model_of_a_foreign_model_is_pefts(phi):
    made = qlorapp.PeftModel(four_bit(phi), qlorapp.LoraConfig(r=4, target_modules=["q_proj"]), "one")
    assert isinstance(made, peft.PeftModel) and made.active_adapter == "one"
    with pytest.raises(TypeError, match="model must be a qlorapp.CausalLM; got PhiForCausalLM. Give peft_config too"):
        qlorapp.PeftModel(four_bit(phi))


def test_a_merge_that_is_not_there_says_what_to_do(folder, phi, tmp_path):
    model = qlorapp.get_peft_model(four_bit(folder), qlorapp.LoraConfig(r=4))
    with pytest.raises(NotImplementedError, match=r"a merge cannot stay exact in place.*qlorapp\.merge\(model_folder"):
        model.merge_and_unload()
    foreign = saved(phi, tmp_path)
    for merge in (foreign.merge_and_unload, foreign.merge_adapter):
        with pytest.raises(NotImplementedError, match="merging into four-bit weights would quantize them a second time"):
            merge()
    dense = qlorapp.AutoModelForCausalLM.from_pretrained(phi)
    merged = qlorapp.PeftModel.from_pretrained(dense, tmp_path).merge_and_unload()  # as the message says
    reference = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(phi), tmp_path).eval()
    assert torch.allclose(logits(merged), logits(reference), rtol=1e-4, atol=1e-5)


# --- families


def test_a_native_family_with_something_that_is_not_built_goes_by_transformers(tmp_path, caplog):
    sizes = {**PHI, "num_key_value_heads": 2, "max_position_embeddings": 128}
    kinds = {
        "attention_bias=True": {"attention_bias": True},
        "rope_type='yarn'": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    }
    for said, more in kinds.items():
        place = tmp_path / said
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).save_pretrained(place)
        caplog.clear()
        model = four_bit(place)
        assert f"LlamaForCausalLM with {said}: transformers' own code, with linear layers in four bits" in caplog.text
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            place, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        )
        assert torch.allclose(logits(model), logits(reference.train()), rtol=1e-4, atol=1e-5)


def test_an_architecture_that_is_refused_says_what_there_is(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM, which are computed here, or any …ForCausalLM .*; got BertForMaskedLM"
    ):
        four_bit(tmp_path)
