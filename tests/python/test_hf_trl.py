# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer over TRL's own, and the trainers of transformers, TRL and accelerate, unmodified, over models of this library."""

from typing import ClassVar

import accelerate
import datasets
import peer
import pytest
import qlorapp
import torch
import transformers
import trl
from qlorapp.hf.forward import engine_of
from tiny_trainer import TINY, adapted, adapters, in_cpp, losses
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TEMPLATE = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
)
NUMBERS = [(i, 3 * i + 2) for i in range(12)]
TEXT = [{"text": f"Item {i} of the list is {n}. " + "Good. " * (i % 4)} for i, n in NUMBERS]
COMPLETIONS = [{"prompt": f"What is item {i}? ", "completion": f"It is {n}." + " Yes." * (i % 3)} for i, n in NUMBERS]
MESSAGES = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in COMPLETIONS
]
COMMON = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1,
          "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    peer.write_llama(path, vocab_size=704, num_hidden_layers=2, bos_token_id=694, eos_token_id=695, max_position_embeddings=512)
    return path


def tokenizer():
    made = transformers.AutoTokenizer.from_pretrained(TINY)
    made.pad_token = made.convert_ids_to_tokens(0)
    made.chat_template = TEMPLATE
    return made


def four_bits(double_quant=False):
    return qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant)


def ours(folder, four_bit=True):
    config = four_bits() if four_bit else None
    return adapted(qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)).train()


def theirs(folder):
    """bitsandbytes' layers over the same codes and scales."""
    return adapted(peer.load_4bit(folder, bnb_4bit_use_double_quant=False)).train()


class TestSFT:
    KINDS: ClassVar = {
        "text": (TEXT, {}),
        "prompt and completion": (COMPLETIONS, {}),
        "completions that are not all": (COMPLETIONS, {"completion_only_loss": False, "max_length": 12}),
        "messages": (MESSAGES, {"assistant_only_loss": True}),
        "packed": (TEXT, {"packing": True, "max_length": 48}),
        "packed and cut": (TEXT, {"packing": True, "packing_strategy": "wrapped", "max_length": 24}),
        "without padding": (TEXT, {"padding_free": True, "max_length": None}),
    }  # fmt: skip

    @pytest.mark.parametrize("kind", KINDS)
    def test_cpp_and_trl_train_the_same(self, folder, tmp_path, kind):
        data, options = self.KINDS[kind]
        trainers = []
        for trainer_class in (qlorapp.SFTTrainer, trl.SFTTrainer):
            config = qlorapp.SFTConfig(output_dir=str(tmp_path), **COMMON, **options)
            trainer = trainer_class(
                ours(folder, four_bit=False),
                config,
                train_dataset=datasets.Dataset.from_list(data),
                processing_class=tokenizer(),
            )
            trainer.train()
            trainers.append(trainer)
        assert in_cpp(trainers[0])
        torch.testing.assert_close(torch.tensor(losses(trainers[0])), torch.tensor(losses(trainers[1])), rtol=0, atol=1e-5)
        values, others = (adapters(trainer) for trainer in trainers)
        for name, value in others.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        for mine, other in zip(trainers[0].state.log_history, trainers[1].state.log_history, strict=True):
            for name in ("entropy", "mean_token_accuracy"):
                assert mine.get(name) == pytest.approx(other.get(name), abs=1e-5), name
            assert set(mine) == set(other)
            if "num_tokens" in other and kind != "packed and cut":
                assert mine["num_tokens"] == other["num_tokens"]

    def test_four_bits_a_peft_config_and_evaluation(self, folder, tmp_path):
        """Adapters stay float32, and TRL's own evaluation, checkpoints and model card are there."""
        import peft

        config = qlorapp.SFTConfig(
            output_dir=str(tmp_path), **{**COMMON, "save_strategy": "steps"}, eval_strategy="steps", eval_steps=2, save_steps=2
        )
        model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits(True))
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        data = datasets.Dataset.from_list(COMPLETIONS)
        trainer = qlorapp.SFTTrainer(
            model, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), peft_config=lora
        )
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad) and model.is_loaded_in_4bit
        trainer.train()
        assert in_cpp(trainer)
        evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(evaluated) == 2 and {"eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= set(evaluated[0])
        assert evaluated[0]["eval_num_tokens"] == trainer.state.log_history[1]["num_tokens"]
        assert (tmp_path / "checkpoint-2" / "optimizer.pt").is_file() and (tmp_path / "README.md").is_file()
        resumed = qlorapp.SFTTrainer(
            adapted(qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits(True))),
            config, train_dataset=data, eval_dataset=data, processing_class=tokenizer(),
        )  # fmt: skip
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert losses(resumed) == losses(trainer)
        counts = [[entry["num_tokens"] for entry in t.state.log_history if "loss" in entry] for t in (trainer, resumed)]
        assert counts[0] == counts[1]  # TRL's trainer counts from 0 again
        for name, value in adapters(trainer).items():
            assert torch.equal(adapters(resumed)[name], value), name

    def test_by_name_and_older_arguments(self, folder, tmp_path):
        tokenizer().save_pretrained(folder)
        config = qlorapp.SFTConfig(
            output_dir=str(tmp_path), max_seq_length=64, model_init_kwargs={"quantization_config": four_bits()}, **COMMON
        )
        assert config.max_length == 64
        import peft

        trainer = qlorapp.SFTTrainer(
            str(folder),
            config,
            train_dataset=datasets.Dataset.from_list(TEXT),
            tokenizer=tokenizer(),
            peft_config=peft.LoraConfig(r=2),
        )
        assert trainer.model.get_base_model().is_loaded_in_4bit
        trainer.train()
        assert in_cpp(trainer) and trainer.processing_class.pad_token == tokenizer().pad_token

    def test_training_arguments_become_a_config(self, folder, tmp_path):
        args = qlorapp.TrainingArguments(output_dir=str(tmp_path), loss_chunk_rows=64, **COMMON)
        trainer = qlorapp.SFTTrainer(
            ours(folder), args, train_dataset=datasets.Dataset.from_list(TEXT), processing_class=tokenizer()
        )
        assert (
            isinstance(trainer.args, qlorapp.SFTConfig) and trainer.args.loss_chunk_rows == 64 and trainer.args.max_steps == 3
        )
        trainer.train()
        assert in_cpp(trainer)

    def test_dft_is_trls(self, folder, tmp_path, caplog):
        config = qlorapp.SFTConfig(output_dir=str(tmp_path), loss_type="dft", **COMMON)
        trainer = qlorapp.SFTTrainer(
            ours(folder), config, train_dataset=datasets.Dataset.from_list(TEXT), processing_class=tokenizer()
        )
        trainer.train()
        assert (
            not in_cpp(trainer) and "loss_type='dft'" in caplog.text and "mean_token_accuracy" in trainer.state.log_history[0]
        )


def _trainer(kind, config, data):
    def script(model, out):
        trainer = kind(
            model=model,
            args=config(output_dir=out, **COMMON),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(),
        )
        trainer.train()
        return losses(trainer)

    return script


def _transformers(model, out):
    made = tokenizer()
    data = [made(row["text"]) for row in TEXT]
    args = transformers.TrainingArguments(output_dir=out, **COMMON)
    collator = transformers.DataCollatorForLanguageModeling(made, mlm=False)
    trainer = transformers.Trainer(model, args, train_dataset=data, data_collator=collator)
    trainer.train()
    return losses(trainer)


def _by_hand(model, out):
    """A loop over accelerate."""
    made = tokenizer()
    collate = transformers.DataCollatorForLanguageModeling(made, mlm=False)
    loader = torch.utils.data.DataLoader([made(row["text"]) for row in TEXT], batch_size=3, collate_fn=collate)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(loss))
    return found


PAIRS = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "No idea."} for r in COMPLETIONS]
LIKED = [{"prompt": r["prompt"], "completion": r["completion"], "label": i % 2 == 0} for i, r in enumerate(COMPLETIONS)]
SCRIPTS = {
    "transformers.Trainer": _transformers,
    "accelerate": _by_hand,
    "trl.SFTTrainer": _trainer(trl.SFTTrainer, trl.SFTConfig, COMPLETIONS),
    "trl.DPOTrainer": _trainer(trl.DPOTrainer, trl.DPOConfig, PAIRS),
    "trl.KTOTrainer": _trainer(trl.KTOTrainer, trl.KTOConfig, LIKED),
    "ORPOTrainer": _trainer(ORPOTrainer, ORPOConfig, PAIRS),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_unmodified_trainers_beside_bitsandbytes(folder, tmp_path, name):
    pytest.importorskip("bitsandbytes")
    script = SCRIPTS[name]
    models = ours(folder), theirs(folder)
    for (
        model
    ) in models:  # or TRL rounds the adapters of both to bfloat16, and one rounding that falls otherwise is 1e-5 of a loss
        model.get_base_model().is_loaded_in_4bit = False
    mine, other = (script(model, str(tmp_path)) for model in models)
    assert not engine_of(models[0].get_base_model())._told
    assert len(mine) >= 3 and len(set(mine)) > 1
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["trl.DPOTrainer", "trl.KTOTrainer", "ORPOTrainer"])
def test_unmodified_trainers_run_in_cpp(folder, tmp_path, name):
    """TRL rounds the adapters of both to bfloat16; ours train on in float32."""
    pytest.importorskip("bitsandbytes")
    models = ours(folder), theirs(folder)
    mine, other = (SCRIPTS[name](model, str(tmp_path)) for model in models)
    assert not engine_of(models[0].get_base_model())._told
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=5e-3)


def test_reward_models(folder, tmp_path):
    """The head is new and in float; the backbone is in four bits, in transformers' code."""
    torch.manual_seed(3)
    made = tokenizer()
    model = qlorapp.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, quantization_config=four_bits(), pad_token_id=made.pad_token_id
    )
    assert type(model) is transformers.LlamaForSequenceClassification and isinstance(
        model.model.layers[0].mlp.up_proj, qlorapp.nn.Linear4bit
    )
    pairs = [{"chosen": r["prompt"] + r["completion"], "rejected": r["prompt"] + "No idea."} for r in COMPLETIONS]
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(output_dir=str(tmp_path), **{**COMMON, "max_steps": 6, "bf16": True}),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=made,
        peft_config=qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS"),
    )
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
