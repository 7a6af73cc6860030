# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer under TRL's names: what it trains on, and what it says. Its config is in test_sft_config.py."""

import gc
import json
import logging
import weakref

import conftest
import datasets
import peft
import pytest
import qlorapp
import torch
import transformers

MODEL = conftest.ROOT / "examples" / "data" / "tiny-llama"
ROWS = [json.loads(line) for line in (conftest.ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()[:24]]
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "float32",
}


def lora(**options):
    return qlorapp.LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})


def config(out, **options):
    return qlorapp.SFTConfig(str(out), **{"max_steps": 2, "logging_steps": 1, "save_strategy": "no", **options})


def trainer(out, rows=ROWS, config_options=None, **options):
    settings = {"model": str(MODEL), "peft_config": lora(), "quantization_config": qlorapp.BitsAndBytesConfig(**NF4)}
    return qlorapp.SFTTrainer(**{**settings, "args": config(out, **config_options or {}), "train_dataset": rows, **options})


def test_a_model_by_name_trains_on_conversations_and_logs_trl_s_keys(tmp_path):
    run = trainer(tmp_path, config_options={"assistant_only_loss": True, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
                                            "max_steps": 12, "lr_scheduler_type": "constant"})  # fmt: skip
    output = run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert output.global_step == len(losses) == 12 and losses[-1] < losses[0]
    assert run.args.assistant_only_loss and run.processing_class.pad_token is not None
    lengths = [len(row["input_ids"]) for row in run.train_dataset]
    assert run.args.training_arguments().log_num_tokens
    seen = [entry["num_tokens"] for entry in run.state.log_history if "loss" in entry]
    assert seen[5] == sum(lengths) and seen[11] == 2 * sum(lengths)  # six steps are an epoch
    run.save_model()
    assert {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in tmp_path.iterdir()}


def test_the_first_loss_is_transformers_loss_of_the_same_labels(tmp_path):
    """Four-bit codes are ours, read back in float32: what is compared is rows, masks and the count."""
    run = trainer(tmp_path, config_options={"assistant_only_loss": True, "per_device_train_batch_size": 4, "max_steps": 1,
                                            "train_sampling_strategy": "sequential"})  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    quantized = run.model.get_base_model().core.named_weights()
    weights = {name: qlorapp.Quantizer().dequantize(w, torch.float32) if isinstance(w, qlorapp.QuantizedTensor) else w.float()
               for name, w in quantized}  # fmt: skip
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in weights:
                module.weight.copy_(weights[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    )
    batch = tokenizer.apply_chat_template([row["messages"] for row in ROWS[:4]], tokenize=True, return_dict=True, padding=True,
                                          padding_side="right", return_assistant_tokens_mask=True, return_tensors="pt")  # fmt: skip
    labels = batch["input_ids"].masked_fill(torch.as_tensor(batch.pop("assistant_masks")) == 0, -100)
    with torch.no_grad():
        expected = model(**batch, labels=labels).loss.item()
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("packing", [{}, {"packing": True, "max_length": 128}])
def test_every_kind_of_rows_trains(tmp_path, packing):
    tokens = transformers.AutoTokenizer.from_pretrained(MODEL)
    texts = [row["messages"][1]["content"] for row in ROWS]
    kinds = {
        "messages": ROWS,
        "text": [{"text": text} for text in texts],
        "pairs": [
            {"prompt": row["messages"][0]["content"], "completion": " " + text} for row, text in zip(ROWS, texts, strict=True)
        ],
        "chat pairs": [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in ROWS],
        "tokens": [{"input_ids": tokens(text)["input_ids"]} for text in texts],
    }
    for name, rows in kinds.items():
        run = trainer(tmp_path / name, rows, packing, eval_dataset=rows[:4])
        assert run.train().training_loss > 0
        assert run.evaluate()["eval_loss"] > 0


def test_options_of_older_releases_are_taken_by_the_trainer_itself(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rows = [{"body": row["messages"][1]["content"]} for row in ROWS]
    run = trainer(
        tmp_path, rows, tokenizer=tokenizer, max_seq_length=9, dataset_text_field="body", packing=False, dataset_num_proc=2
    )
    assert run.processing_class is tokenizer and run.args.max_length == 9
    assert max(len(row["input_ids"]) for row in run.train_dataset) == 9
    with pytest.raises(TypeError, match="unknown option 'max_sequence_length'"):
        trainer(tmp_path, rows, max_sequence_length=9)


def test_prepared_rows_are_left_as_they_are(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}] * 8
    run = trainer(tmp_path, rows, {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 2})
    assert run.train_dataset is rows and run.train().global_step == 2
    masks = [{"input_ids": [5, 6], "completion_mask": [0, 1]}]
    with pytest.raises(ValueError, match="train_dataset has masks but no labels"):
        trainer(tmp_path, masks, {"dataset_kwargs": {"skip_prepare_dataset": True}})


def test_a_template_and_an_eos_token_of_one_s_own(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|eot_id|>' }}{% endfor %}")
    run = trainer(tmp_path, config_options={"chat_template_path": str(path), "eos_token": "<|eot_id|>"})
    text = run.processing_class.decode(run.train_dataset[0]["input_ids"])
    assert text.startswith("user: ") and text.endswith("<|eot_id|>")
    assert run.model.generation_config.eos_token_id[0] == run.processing_class.eos_token_id
    with pytest.raises(ValueError, match="eos_token must be a token of the tokenizer; it has no '<end>'"):
        trainer(tmp_path, config_options={"eos_token": "<end>"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_follows_the_model_where_the_config_leaves_it_open(tmp_path, dtype, caplog):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=qlorapp.BitsAndBytesConfig(**NF4), dtype=dtype
    )
    run = trainer(tmp_path, model=model, quantization_config=None)
    assert run.train().training_loss > 0
    assert "computes in" not in caplog.text


def test_offloading_activations_is_our_input_on_host(tmp_path):
    run = trainer(tmp_path, config_options={"activation_offloading": True})
    assert {kept for _, _, kept in run.model.get_base_model().core.segments} == {"input_on_host"}
    plain = trainer(tmp_path)
    assert run.train().training_loss == plain.train().training_loss


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_dataset": None}, ValueError, "train_dataset is required"),
        ({"peft_config": None}, ValueError, "there is nothing to train"),
        ({"args": object()}, TypeError, "args must be a qlorapp.SFTConfig"),
        ({"config_options": {"completion_only_loss": True}}, ValueError, "completion_only_loss needs rows of 'prompt'"),
        ({"config_options": {"model_init_kwargs": {"quantization_config": {}}}}, ValueError, "given twice"),
        (
            {"config_options": {"completion_only_loss": True}, "formatting_func": str},
            ValueError,
            "formatting_func makes one text",
        ),
    ],
)
def test_what_the_trainer_cannot_do_is_said_in_one_line(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        trainer(tmp_path, **options)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_second_adapter_on_top_is_refused_and_going_on_is_not(tmp_path, caplog, wrapped):
    base = qlorapp.AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=qlorapp.BitsAndBytesConfig(**NF4))
    model = qlorapp.get_peft_model(base, lora()) if wrapped else base
    if not wrapped:
        base.add_adapter(lora())
    given = {"model": model, "quantization_config": None}
    with pytest.raises(
        ValueError, match=r"adapters already, and those of 'default' differ from peft_config in r, lora_dropout\."
    ):
        trainer(tmp_path, **given, peft_config=lora(r=5, lora_dropout=0.25))
    assert trainer(tmp_path, **given, peft_config=None).train().global_step == 2
    learnt = {name: held.clone() for name, held in base.core.adapter_tensors("default")}
    assert any("lora_B" in name and held.any() for name, held in learnt.items())
    for config in (lora(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")):
        with caplog.at_level("INFO", logger="qlorapp"):
            trainer(tmp_path, **given, peft_config=config)
        assert "has the adapters of peft_config already: 'default' is trained on" in caplog.text
        assert all(torch.equal(held, learnt[name]) for name, held in base.core.adapter_tensors("default"))
        caplog.clear()
    with pytest.raises(ValueError, match="differ from peft_config in target_modules"):
        trainer(tmp_path, **given, peft_config=lora(target_modules=["q_proj"]))


def test_seeds_repeat_a_run(tmp_path):
    def losses(seed):
        run = trainer(tmp_path, config_options={"seed": seed})
        run.train()
        return [entry["loss"] for entry in run.state.log_history if "loss" in entry]

    assert losses(1) == losses(1) != losses(2)


def test_a_training_arguments_object_becomes_an_sft_config(tmp_path, caplog):
    caplog.set_level(logging.INFO, "qlorapp")
    run = trainer(tmp_path, args=qlorapp.TrainingArguments(output_dir=str(tmp_path), max_steps=1, learning_rate=3e-4))
    assert isinstance(run.args, qlorapp.SFTConfig) and run.args.learning_rate == 3e-4 and run.args.max_steps == 1
    assert "24 rows, " in caplog.text


def test_a_deleted_trainer_and_model_leave_nothing_behind(tmp_path):
    run = trainer(tmp_path, callbacks=[qlorapp.TrainerCallback()])
    run.train()
    alive = [weakref.ref(run), weakref.ref(run.model), weakref.ref(run.model.get_base_model())]
    parameter = weakref.ref(next(iter(run.model.parameters())))
    del run
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3 and parameter() is None


def test_a_dataset_stays_one_and_its_rows_may_be_exchanged(tmp_path):
    import datasets

    given = datasets.Dataset.from_list(ROWS)
    held_out = {"a": datasets.Dataset.from_list(ROWS[:3]), "b": ROWS[:2]}
    options = {"assistant_only_loss": True, "max_steps": 1, "per_device_train_batch_size": 4}
    run = trainer(tmp_path, given, options, eval_dataset=held_out)
    plain = trainer(tmp_path / "plain", ROWS, options)
    assert isinstance(run.train_dataset, datasets.Dataset) and isinstance(run.eval_dataset["a"], datasets.Dataset)
    assert isinstance(run.eval_dataset["b"], list) and isinstance(plain.train_dataset, list)
    assert run.train_dataset.to_list() == plain.train_dataset and run.sample() == plain.sample()

    def last_token_alone(row):
        return {"labels": [-100] * (len(row["labels"]) - 1) + row["input_ids"][-1:]}

    def losses(of):
        return [entry["loss"] for entry in of.state.log_history if "loss" in entry]

    run.train(), plain.train()
    assert losses(run) == losses(plain)
    run.train_dataset = run.train_dataset.map(last_token_alone)
    assert {"input_ids", "labels"} <= set(run.train_dataset.column_names) and len(run.train_dataset.select(range(3))) == 3
    run.train()
    assert losses(run) != losses(plain) and len(losses(run)) == 1


def test_labels_that_a_collator_would_replace_are_said_in_the_words_of_rows_that_were_read_here(tmp_path, caplog):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer(tmp_path, data_collator=collator, config_options={"assistant_only_loss": True})
    assert "[SFTTrainer] DataCollatorForLanguageModeling: the labels that were made of the rows are kept" in caplog.text
    assert "transformers' Trainer would" not in caplog.text


KINDS_OF_ROWS = {
    "conversations": [row for row in ROWS[:6]],
    "prompts": [
        {"prompt": "Mia, put the kite", "completion": " near the mill."},
        {"prompt": "Una, put", "completion": " it down."},
    ],
    "text": [{"text": "Mia, put the kite near the mill."}, {"text": "Una has a kite."}],
}


@pytest.mark.parametrize("kind", KINDS_OF_ROWS)
@pytest.mark.parametrize("in_python", [False, True])
def test_rows_are_evaluated_and_predicted_as_the_constructor_would_have_read_them(tmp_path, kind, in_python):
    def accuracy(prediction):
        return {"rows": len(prediction.label_ids)}

    given = KINDS_OF_ROWS[kind]
    more = {"compute_metrics": accuracy} if in_python else {}
    run = trainer(tmp_path, rows=given, eval_dataset=given, config_options={"max_length": 24}, **more)
    known = run.evaluate()
    for again in (given, run.eval_dataset, datasets.Dataset.from_list(given)):
        metrics = run.evaluate(again)
        assert metrics["eval_loss"] == pytest.approx(known["eval_loss"], rel=1e-6)
        assert not in_python or metrics["eval_rows"] == len(given)
    assert run.evaluate({"some": given})["eval_some_loss"] == pytest.approx(known["eval_loss"], rel=1e-6)
    predicted = run.predict(given)
    assert predicted.metrics["test_loss"] == pytest.approx(known["eval_loss"], rel=1e-5)
    width = max(len(row["input_ids"]) for row in run.eval_dataset)
    assert predicted.label_ids.shape == (len(given), width) and width <= 24
    for labels, row in zip(predicted.label_ids, run.eval_dataset, strict=True):
        assert [label for label in labels if label != -100] == [label for label in row["labels"] if label != -100]


def test_predictions_are_of_every_row_in_its_place(tmp_path):
    """A row that is cut before its completion teaches nothing, and is predicted all the same; shuffle_dataset is for training."""
    given = [
        {"prompt": "one two three four five six seven eight nine ten eleven twelve", "completion": " end"},
        {"prompt": "Mia", "completion": " has a kite."},
        {"prompt": "Una", "completion": " has a mill."},
    ]
    run = trainer(tmp_path, rows=given, config_options={"max_length": 10, "shuffle_dataset": True, "seed": 3})
    labels = run.predict(given).label_ids
    assert len(run.train_dataset) == 2 and len(labels) == 3
    assert [bool((row[1:] != -100).any()) for row in labels] == [False, True, True]
    decoded = [run.processing_class.decode([i for i in row if i != -100]) for row in labels[1:]]
    assert "kite" in decoded[0] and "mill" in decoded[1]


def test_what_cannot_be_read_is_named_by_its_data_set(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match=r"\[SFTTrainer\] eval_dataset, row 0: must have 'text'.*it has \['question'\]"):
        run.evaluate([{"question": "?"}])
    with pytest.raises(ValueError, match=r"\[SFTTrainer\] test_dataset, row 0: must have 'text'"):
        run.predict([{"question": "?"}])
