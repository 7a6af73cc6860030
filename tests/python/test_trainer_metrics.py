# SPDX-License-Identifier: Apache-2.0
"""evaluate() and predict() over the engine, beside transformers' Trainer over transformers' model of the same weights."""

import numpy as np
import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import adapted, made, rows

EVAL_ROWS = rows(7, seed=2)


def best(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def both(folder, tmp_path, more, **options):
    """(transformers' trainer, ours) over the float checkpoint."""
    theirs = adapted(transformers.LlamaForCausalLM.from_pretrained(folder))
    ours = adapted(qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    options = {"per_device_eval_batch_size": 3, **options}
    more = {"eval_dataset": EVAL_ROWS, **more}
    return [
        made(kind, folder, tmp_path, model=model, more=more, **options)
        for kind, model in ((transformers.Trainer, theirs), (qlorapp.Trainer, ours))
    ]


def assert_same(mine, reference):
    assert mine.keys() == reference.keys()
    for key, value in reference.items():
        if not any(part in key for part in ("runtime", "second", "preparation")):
            assert mine[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("preprocess", [None, best])
def test_metrics_and_predictions_are_transformers(folder, tmp_path, preprocess):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"inputs": float(prediction.inputs.sum()), "losses": prediction.losses.tolist()}

    more = {"compute_metrics": metrics, "preprocess_logits_for_metrics": preprocess}
    trainers = both(folder, tmp_path, more, include_for_metrics=["inputs", "loss"])
    theirs, ours = (trainer.evaluate() for trainer in trainers)
    assert_same(ours, theirs)
    predicted, mine = (trainer.predict(rows(4, seed=3)) for trainer in trainers)
    assert_same(mine.metrics, predicted.metrics)
    for found, expected in ((seen[1], seen[0]), (mine, predicted)):
        assert np.array_equal(found.label_ids, expected.label_ids) and found.predictions.shape == expected.predictions.shape
        real = expected.label_ids != -100  # logits at padding mean nothing, and are zeros here
        assert np.allclose(found.predictions[real], expected.predictions[real], atol=1e-4)


def test_a_loss_alone_forms_no_logits_and_is_the_same(folder, tmp_path, monkeypatch):
    theirs, ours = both(folder, tmp_path, {})
    expected = theirs.evaluate()
    monkeypatch.setattr("qlorapp.hf.output.CausalLMOutput._settle", lambda self: pytest.fail("logits were made"))
    assert_same(ours.evaluate(), expected)


def test_rows_without_labels_are_predicted_without_a_loss(folder, tmp_path):
    more = {"data_collator": lambda batch: {"input_ids": torch.tensor([row["input_ids"] for row in batch])}}
    data = [{"input_ids": row["input_ids"][:6]} for row in rows(4, seed=3)]
    reference, mine = (trainer.predict(data) for trainer in both(folder, tmp_path, more))
    assert_same(mine.metrics, reference.metrics)
    assert mine.label_ids is None and "test_loss" not in mine.metrics
    assert np.allclose(mine.predictions, reference.predictions, atol=1e-4)
