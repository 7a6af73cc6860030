# SPDX-License-Identifier: Apache-2.0
"""Our Trainer and SFTTrainer on models that transformers computes, beside transformers' own Trainer on the same layers."""

import json
import logging

import conftest
import peer
import pytest
import test_hf_models
import torch
import transformers

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from tiny_trainer import losses, rows

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1,
    "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "eval_strategy": "epoch", "warmup_steps": 2,
}  # fmt: skip


def write(folder, kind="Phi", **sizes):
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "vocab_size": 128, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() == 2 else 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["GPTNeoX", "Phi", "GPT2", "Gemma3"])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    return write(place, request.param) if request.param in ("GPTNeoX", "Phi") else test_hf_models.write(place, request.param)


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    return write(tmp_path_factory.mktemp("Phi"))


def load(folder, **lora):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
    torch.manual_seed(5)
    return qlorapp.get_peft_model(model, qlorapp.LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))


def ours(folder, output, kind=qlorapp.Trainer, lora=None, resume=None, more=None, **options):
    args = qlorapp.TrainingArguments(str(output), **{**COMMON, **options})
    trainer = kind(load(folder, **(lora or {})), args, train_dataset=rows(26), eval_dataset=rows(5, seed=3), **(more or {}))
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        ({}, {}),
        ({"gradient_checkpointing": True, "weight_decay": 0.1, "max_grad_norm": 0.2}, {}),
        ({"weight_decay": 5.0}, {"bias": "all"}),  # biases do not decay
    ],
    ids=str,
)
def test_losses_rates_and_evaluations_are_those_of_transformers_trainer(folder, tmp_path, options, lora):
    trainer = ours(folder, tmp_path / "ours", lora=lora, **options)
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), use_cpu=True, label_names=["labels"], **{**COMMON, **options}
    )
    reference = transformers.Trainer(
        load(folder, **lora), args, data_collator=peer.collate, train_dataset=rows(26), eval_dataset=rows(5, seed=3)
    )
    reference.train()
    mine, theirs = trainer.state.log_history, reference.state.log_history
    assert [set(entry) - {"eval_loss_token_weighted"} for entry in mine] == [set(entry) for entry in theirs]
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "eval_loss", "train_loss", "learning_rate", "epoch", "step"):
            assert a.get(key) == (pytest.approx(b[key], rel=1e-5) if key in b else None), key
        assert a.get("grad_norm", 0) == pytest.approx(b.get("grad_norm", 0), rel=1e-3)
    for name, value in trained(reference.model).items():
        if "vision_tower" in name:  # text gives it no gradient: torch leaves it alone, an arena's optimizer lets it decay
            continue
        assert torch.linalg.norm(trained(trainer.model)[name] - value) <= 1e-3 * torch.linalg.norm(value) + 1e-6, name


def test_the_way_is_said_in_one_line(phi, tmp_path, caplog):
    ours(phi, tmp_path, max_steps=1, checkpoint_keep=["attention_only"])
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[Trainer]")]
    assert said == [
        "[Trainer] checkpoint_keep has no effect: the model is transformers' own.",
        "[Trainer] PhiForCausalLM is transformers' own code: forward and backward run there, by torch's autograd; batches, "
        "optimizer, schedule, evaluation and checkpoints are this library's.",
    ]


@pytest.mark.parametrize("at", [1, 3])  # in the middle of an epoch, and at its end
def test_a_run_resumes_with_the_same_bits(phi, tmp_path, at):
    options = {"lora": {"lora_dropout": 0.2}, "optim": "paged_adamw_8bit"}
    whole = ours(phi, tmp_path, save_strategy="steps", save_steps=1, **options)
    resumed = ours(phi, tmp_path, resume=tmp_path / f"checkpoint-{at}", **options)
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 6
    assert all(torch.equal(value, trained(resumed.model)[name]) for name, value in trained(whole.model).items())


def test_another_base_is_noticed_on_resume(phi, tmp_path):
    ours(phi, tmp_path / "run", save_strategy="steps", save_steps=1, max_steps=1)
    other = write(tmp_path / "other")
    model = transformers.PhiForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[0].mlp.fc1.weight[3, 5] += 1.0
        model.model.layers[0].mlp.fc1.weight.mul_(1.5)
    model.save_pretrained(other)
    with pytest.raises(qlorapp.FormatError, match="belongs to another base model"):
        ours(other, tmp_path / "run", resume=tmp_path / "run" / "checkpoint-1")


def test_saved_adapters_load_in_peft_and_the_best_one_comes_back(phi, tmp_path):
    trainer = ours(phi, tmp_path, save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.3)
    best = trainer.state.best_model_checkpoint
    assert json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["global_step"] == 6
    trainer.save_model(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(phi, quantization_config=transformers.BitsAndBytesConfig(**NF4))
    ids = torch.arange(3, 51).view(2, 24)
    with torch.no_grad():
        mine = trainer.model.eval()(ids).logits
        for place in (best, tmp_path / "adapter"):
            other = peft.PeftModel.from_pretrained(base, place).train()  # evaluating, bitsandbytes rounds to 16 bits
            assert (mine - other(ids).logits).abs().max() <= 1e-4 * mine.abs().max()
            base = other.unload()


class OwnLoss(qlorapp.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class MeanLoss(qlorapp.Trainer):
    """As people wrote it before num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_parts_may_be_overridden(phi, tmp_path, caplog):
    plain = ours(phi, tmp_path / "plain")
    assert losses(ours(phi, tmp_path / "own", OwnLoss)) == losses(plain)
    assert "compute_loss: steps are computed by torch's autograd" in caplog.text
    assert losses(ours(phi, tmp_path / "mean", MeanLoss)) == pytest.approx(losses(plain), rel=0.05)
    accuracy = ours(phi, tmp_path / "metrics", more={"compute_metrics": lambda p: {"rows": len(p.label_ids)}}, max_steps=3)
    assert [entry["eval_rows"] for entry in accuracy.state.log_history if "eval_rows" in entry] == [5]


def test_a_forward_that_takes_no_count_gets_none(phi, tmp_path, monkeypatch):
    """transformers' rule: such a loss is the mean of a micro-batch, and averaged over those of a step."""
    monkeypatch.setattr(transformers.PhiForCausalLM, "accepts_loss_kwargs", False, raising=False)
    counted = losses(ours(phi, tmp_path / "plain", MeanLoss))
    assert losses(ours(phi, tmp_path / "mean")) == counted


def test_what_only_native_models_have_is_refused_and_so_is_a_model_without_adapters(phi, tmp_path):
    with pytest.raises(ValueError, match="memory_budget and auto_find_batch_size plan the families"):
        ours(phi, tmp_path, auto_find_batch_size=True)
    bare = qlorapp.AutoModelForCausalLM.from_pretrained(phi, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
    with pytest.raises(TypeError, match="the model must have adapters: .*; got PhiForCausalLM"):
        qlorapp.Trainer(bare, qlorapp.TrainingArguments(str(tmp_path)), train_dataset=rows(4))
    frozen = load(phi)
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing of the model is trainable"):
        qlorapp.Trainer(frozen, qlorapp.TrainingArguments(str(tmp_path)), train_dataset=rows(4))
    half = load(phi)
    next(p for p in half.parameters() if p.requires_grad).data = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="what is trained must be float32 on one device; '.*' is BFloat16 on cpu"):
        qlorapp.Trainer(half, qlorapp.TrainingArguments(str(tmp_path)), train_dataset=rows(4))


def test_another_active_adapter_is_noticed(phi, tmp_path):
    model = load(phi)
    trainer = qlorapp.Trainer(model, qlorapp.TrainingArguments(str(tmp_path), **{**COMMON, "max_steps": 1, "eval_strategy": "no"}),
                              train_dataset=rows(12))  # fmt: skip
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("second")
    with pytest.raises(ValueError, match="other parameters are trainable than those"):
        trainer.train()
    model.set_adapter("default")
    assert trainer.train().global_step == 1


def test_a_deleted_trainer_leaves_the_adapters_whole(phi, tmp_path):
    trainer = ours(phi, tmp_path, max_steps=2)
    model, before = trainer.model, trained(trainer.model)
    del trainer
    again = qlorapp.Trainer(model, qlorapp.TrainingArguments(str(tmp_path), **{**COMMON, "max_steps": 1, "warmup_steps": 0}), train_dataset=rows(12),
                            eval_dataset=rows(5))  # fmt: skip
    assert all(torch.equal(value, trained(model)[name]) for name, value in before.items())
    again.train()
    assert not all(torch.equal(value, trained(model)[name]) for name, value in before.items())


def test_sft_trainer_takes_such_a_model_by_name(tmp_path, caplog):
    """The tokenizer of the bundled model beside a Phi of its vocabulary."""
    tiny = conftest.ROOT / "examples" / "data" / "tiny-llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    folder = write(tmp_path / "model", vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
                   eos_token_id=tokenizer.eos_token_id, pad_token_id=None)  # fmt: skip
    tokenizer.save_pretrained(folder)
    chats = [json.loads(line) for line in (conftest.ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()[:24]]

    def run(output, **options):
        config = qlorapp.SFTConfig(str(tmp_path / output), **{"max_steps": 4, "logging_steps": 1, "save_strategy": "no",
                                   "learning_rate": 1e-2, "assistant_only_loss": True, "disable_tqdm": True, **options})  # fmt: skip
        trainer = qlorapp.SFTTrainer(str(folder), config, train_dataset=chats, eval_dataset={"a": chats[:4], "b": chats[4:7]},
                                     quantization_config=qlorapp.BitsAndBytesConfig(**NF4),
                                     peft_config=qlorapp.LoraConfig(r=4, target_modules="all-linear"))  # fmt: skip
        trainer.train()
        return trainer

    with caplog.at_level(logging.INFO, "qlorapp"):
        trainer = run("plain")
    assert "PhiForCausalLM is transformers' own code" in caplog.text and "24 rows, " in caplog.text
    found = losses(trainer)
    assert len(found) == 4 and found[-1] < found[0] - 0.1
    assert {"eval_a_loss", "eval_b_loss"} <= set(trainer.evaluate())
    packed = run("packed", packing=True, max_length=128, max_steps=1, per_device_train_batch_size=100)
    together = run("together", max_steps=1, per_device_train_batch_size=100)
    assert losses(packed) == pytest.approx(losses(together), rel=1e-5)


def test_prepare_model_for_kbit_training_leaves_nothing_of_the_base_trainable(folder):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
    assert any(p.requires_grad for p in model.parameters())  # norms, biases, embeddings: as transformers loads them
    assert qlorapp.prepare_model_for_kbit_training(model) is model
    assert not any(p.requires_grad for p in model.parameters()) and model.is_gradient_checkpointing


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_adapters_learn_on_a_prepared_base_in_each_kind_of_checkpointing(phi, options):
    ids = torch.tensor([rows(1)[0]["input_ids"]])
    gradients = []
    for prepared in (False, True):
        model = qlorapp.AutoModelForCausalLM.from_pretrained(phi, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
        if prepared:
            model = qlorapp.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
        torch.manual_seed(5)
        model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear")).train()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "lora_" in name})
        assert not prepared or all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    for name, expected in gradients[0].items():
        assert torch.allclose(gradients[1][name], expected, rtol=1e-4, atol=1e-7), name


def test_adapters_that_are_there_stay_trainable_when_a_model_is_prepared(phi):
    model = qlorapp.prepare_model_for_kbit_training(load(phi))
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_our_lora_config_makes_a_second_adapter_too(folder, tmp_path):
    """As PEFT's own does, on a model that get_peft_model has made and on one that was read."""
    made = load(folder)
    made.save_pretrained(tmp_path)
    base = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
    for model in (made, qlorapp.PeftModel.from_pretrained(base, tmp_path)):
        model.add_adapter("ours", qlorapp.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_rslora=True))
        model.add_adapter("theirs", peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_rslora=True))
        configs = [model.peft_config[name].to_dict() for name in ("ours", "theirs")]
        assert {key for key in configs[1] if configs[0][key] != configs[1][key]} <= {"task_type", "peft_version"}
        model.set_adapter("ours")
        assert model.active_adapter == "ours" and type(model).__name__ == type(made).__name__
        assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"ours"}
        with pytest.raises(ValueError, match=r"\[get_peft_model\] use_dora=True is not supported"):
            model.add_adapter("third", qlorapp.LoraConfig(use_dora=True, target_modules="all-linear"))
