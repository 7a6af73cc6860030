# SPDX-License-Identifier: Apache-2.0
"""Generation that transformers' own code asks for: pipeline(), and a trainer that evaluates what the model writes."""

import qlorapp
import transformers
from qlorapp.hf.forward import engine_of
from tiny_trainer import TINY, adapted, tokenizer

TEXTS = ["Mia, put the kite near the mill.", "A dog"]


def model():
    made = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, quantization_config=qlorapp.BitsAndBytesConfig(load_in_4bit=True))
    return adapted(made).eval()


def test_a_pipeline_over_a_batch_writes_what_generate_does():
    made, text = model(), tokenizer()
    text.padding_side = "left"
    writer = transformers.pipeline("text-generation", model=made, tokenizer=text, batch_size=2)
    options = {"max_new_tokens": 6, "do_sample": False}
    found = writer(TEXTS, return_full_text=False, **options)
    for prompt, (answer,) in zip(TEXTS, found, strict=True):
        given = text(prompt, return_tensors="pt")
        expected = made.generate(**given, **options)[0, given["input_ids"].shape[1] :]
        assert answer["generated_text"] == text.decode(expected, skip_special_tokens=True) != ""
    assert not engine_of(made.get_base_model())._told


def test_a_trainer_evaluates_what_the_model_writes(tmp_path):
    seen = []
    args = transformers.Seq2SeqTrainingArguments(
        tmp_path,
        predict_with_generate=True,
        generation_max_length=14,
        use_cpu=True,
        report_to="none",
        per_device_eval_batch_size=2,
    )
    made, rows = model(), [{"input_ids": [5, 9, 11, 13 + i], "labels": [5, 9, 11, 13 + i]} for i in range(3)]
    for by_engine in (True, False):
        engine_of(made.get_base_model()).enabled = by_engine
        trainer = qlorapp.Seq2SeqTrainer(
            made, args, eval_dataset=rows, processing_class=tokenizer(), compute_metrics=lambda found: seen.append(found) or {}
        )
        trainer.evaluate()
    assert seen[0].predictions.shape[1] > 4 and (seen[0].predictions == seen[1].predictions).all()
    assert not engine_of(made.get_base_model())._told
