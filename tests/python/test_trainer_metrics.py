# SPDX-License-Identifier: Apache-2.0
"""compute_metrics, preprocess_logits_for_metrics and predict(), beside transformers' Trainer on the same weights."""

import numpy as np
import peer
import pytest
import qlorapp
import torch
import transformers
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import arguments, rows


def accuracy(prediction):
    guessed = prediction.predictions[:, :-1].argmax(-1) if prediction.predictions.ndim == 3 else prediction.predictions[:, :-1]
    wanted = prediction.label_ids[:, 1:]
    scored = wanted != -100
    return {"accuracy": np.float64((guessed == wanted)[scored].mean()), "count": scored.sum()}


def best(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def both(folder, tmp_path, options=None, **more):
    """(transformers' trainer, ours) over the float checkpoint."""
    options = {"per_device_eval_batch_size": 3, **(options or {})}
    theirs = transformers.Trainer(
        transformers.LlamaForCausalLM.from_pretrained(folder),
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **options),
        data_collator=peer.collate, eval_dataset=rows(7), **more,
    )  # fmt: skip
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=2))  # B is zero: the same logits
    ours = qlorapp.Trainer(model, arguments(tmp_path, **options), eval_dataset=rows(7), **more)
    return theirs, ours


def assert_same(ours, theirs):
    extra = {
        "eval_loss_token_weighted",
        "test_loss_token_weighted",
        "eval_model_preparation_time",
        "test_model_preparation_time",
    }
    assert set(ours) - extra == set(theirs) - extra
    for key, value in theirs.items():
        if key not in extra and "runtime" not in key and "second" not in key:
            assert ours[key] == pytest.approx(value, rel=1e-5), key


def test_eval_loss_is_transformers_and_the_token_weighted_one_is_the_mean_over_targets(folder, tmp_path):
    theirs, ours = both(folder, tmp_path)
    assert_same(ours.evaluate(), theirs.evaluate())
    one = [both(folder, tmp_path, {"per_device_eval_batch_size": size})[1].evaluate() for size in (1, 7)]
    assert one[0]["eval_loss_token_weighted"] == pytest.approx(one[1]["eval_loss"], rel=1e-5)
    assert one[0]["eval_loss"] != pytest.approx(one[1]["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("metrics", [None, accuracy])
def test_data_sets_in_a_dict_are_evaluated_under_their_names(folder, tmp_path, metrics):
    theirs, ours = both(folder, tmp_path, compute_metrics=metrics)
    parts = {"short": rows(4), "long": rows(7, seed=2)}
    theirs.eval_dataset = ours.eval_dataset = parts
    expected = theirs.evaluate()
    for found in (ours.evaluate(), ours.evaluate(parts)):
        for key, value in expected.items():
            if "runtime" not in key and "second" not in key and "preparation" not in key:
                assert found[key] == pytest.approx(value, rel=1e-5), key
    assert {"eval_short_loss", "eval_long_loss", "eval_long_loss_token_weighted"} <= set(found)
    assert ours.evaluate("long")["eval_loss"] == pytest.approx(expected["eval_long_loss"], rel=1e-5)


def test_a_run_evaluates_each_data_set_and_the_best_is_by_the_metric_of_one(folder, tmp_path):
    model = qlorapp.get_peft_model(qlorapp.AutoModelForCausalLM.from_pretrained(folder), qlorapp.LoraConfig(r=2))
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    parts = {"a": rows(4), "b": rows(7, seed=2)}
    args = arguments(tmp_path, metric_for_best_model="eval_b_loss", **options)
    trainer = qlorapp.Trainer(model, args, train_dataset=rows(12), eval_dataset=parts)
    trainer.train()
    found = [entry["eval_b_loss"] for entry in trainer.state.log_history if "eval_b_loss" in entry]
    assert len(found) == 2 and trainer.state.best_metric == min(found)
    assert sum("eval_a_loss" in entry for entry in trainer.state.log_history) == 2
    by_default = arguments(tmp_path, **options)
    with pytest.raises(ValueError, match="an evaluation has no 'eval_loss', but .*eval_a_loss"):
        qlorapp.Trainer(model, by_default, train_dataset=rows(12), eval_dataset=parts).train()


@pytest.mark.parametrize("preprocess", [None, best])
def test_compute_metrics_sees_what_transformers_shows_it(folder, tmp_path, preprocess):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return accuracy(prediction)

    theirs, ours = both(folder, tmp_path, compute_metrics=metrics, preprocess_logits_for_metrics=preprocess)
    assert_same(ours.evaluate(), theirs.evaluate())
    mine, reference = seen
    real = reference.label_ids != -100
    assert np.array_equal(mine.label_ids, reference.label_ids) and mine.predictions.shape == reference.predictions.shape
    assert np.allclose(mine.predictions[real], reference.predictions[real], atol=1e-4)
    assert ours.state.log_history[-1]["eval_accuracy"] == pytest.approx(theirs.state.log_history[-1]["eval_accuracy"])


def test_inputs_and_losses_come_where_include_for_metrics_asks(folder, tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {}

    theirs, ours = both(folder, tmp_path, {"include_for_metrics": ["inputs", "loss"]}, compute_metrics=metrics)
    ours.evaluate(), theirs.evaluate()
    real = seen[1].label_ids != -100
    assert np.array_equal(seen[0].inputs[real], seen[1].inputs[real])
    assert seen[0].losses == pytest.approx(seen[1].losses, rel=1e-5)
    older = qlorapp.Trainer(
        ours.model, arguments(tmp_path, include_inputs_for_metrics=True), eval_dataset=rows(7), compute_metrics=metrics
    )
    older.evaluate()
    assert seen[-1].inputs is not None and seen[-1].losses is None


def test_batch_eval_metrics_hands_over_batch_by_batch(folder, tmp_path):
    calls = []

    def metrics(prediction, compute_result):
        calls.append((prediction.label_ids.shape[0], compute_result))
        return {"batches": float(len(calls))} if compute_result else {}

    theirs, ours = both(folder, tmp_path, {"batch_eval_metrics": True}, compute_metrics=metrics)
    mine = ours.evaluate()
    ours_called, calls[:] = list(calls), []
    theirs.evaluate()
    assert ours_called == calls == [(3, False), (3, False), (1, True)] and mine["eval_batches"] == 3


def test_eval_do_concat_batches_false_keeps_a_list(folder, tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {}

    theirs, ours = both(folder, tmp_path, {"eval_do_concat_batches": False}, compute_metrics=metrics)
    ours.evaluate(), theirs.evaluate()
    assert [part.shape for part in seen[0].predictions] == [part.shape for part in seen[1].predictions]


def test_prediction_loss_only_forms_no_logits(folder, tmp_path):
    _, ours = both(folder, tmp_path, {"prediction_loss_only": True}, compute_metrics=accuracy)
    assert "eval_accuracy" not in ours.evaluate()
    assert ours.predict(rows(3)).predictions is None


def test_predict_is_transformers(folder, tmp_path):
    told = []

    class Listens(qlorapp.TrainerCallback):
        def on_predict(self, args, state, control, metrics=None, **kwargs):
            told.append(metrics)

    theirs, ours = both(folder, tmp_path, compute_metrics=accuracy)
    ours.add_callback(Listens)
    mine, reference = ours.predict(rows(4, seed=3)), theirs.predict(rows(4, seed=3))
    assert_same(mine.metrics, reference.metrics)
    assert told == [mine.metrics] and np.array_equal(mine.label_ids, reference.label_ids)
    logits = reference.predictions[0] if isinstance(reference.predictions, tuple) else reference.predictions
    real = reference.label_ids != -100
    assert np.allclose(mine.predictions[real], logits[real], atol=1e-4)
    assert [entry for entry in ours.state.log_history if "test_loss" in entry] == []


def test_several_sets_are_evaluated_under_their_names(folder, tmp_path):
    theirs, ours = both(folder, tmp_path)
    sets = {"a": rows(3), "b": rows(4, seed=2)}
    mine, reference = ours.evaluate(sets), theirs.evaluate(sets)
    extra = {key for key in mine if key.endswith("token_weighted")} | {key for key in reference if "preparation" in key}
    assert set(mine) - extra == set(reference) - extra
    assert mine["eval_b_loss"] == pytest.approx(reference["eval_b_loss"], rel=1e-5)


@pytest.mark.parametrize("makes_labels", [False, True])
def test_rows_without_labels_are_predicted_without_a_loss_unless_the_collator_makes_labels(folder, tmp_path, makes_labels):
    class Tokenizer:
        pad_token_id = 0

    def collate(batch):
        batch = peer.collate([{**row, "labels": row["input_ids"]} for row in batch])
        return batch if makes_labels else {key: value for key, value in batch.items() if key != "labels"}

    theirs, ours = both(folder, tmp_path)
    theirs.data_collator = collate
    if makes_labels:
        ours.data_collator = transformers.DataCollatorForLanguageModeling(Tokenizer(), mlm=False)
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(4, seed=3)]
    mine, reference = ours.predict(unlabelled), theirs.predict(unlabelled)
    assert_same(mine.metrics, reference.metrics)
    assert (mine.label_ids is None) == (reference.label_ids is None) == (not makes_labels)
    logits = reference.predictions[0] if isinstance(reference.predictions, tuple) else reference.predictions
    assert mine.predictions.shape == logits.shape


@pytest.mark.parametrize("half", [True, False])
def test_logits_are_float32_where_a_run_computes_in_bfloat16_as_in_transformers(folder, tmp_path, half):
    seen = {}
    for side in ("theirs", "ours"):

        def note(logits, labels, side=side):
            seen[side] = (logits[0] if isinstance(logits, tuple) else logits).dtype
            return logits.argmax(-1)

        trainer = both(folder, tmp_path, {"bf16": half}, compute_metrics=lambda p: {}, preprocess_logits_for_metrics=note)
        if side == "theirs":
            trainer[0].evaluate()
        else:
            model = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if half else torch.float32)
            trainer[1].model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=2))
            trainer[1].evaluate()
    assert seen["ours"] == seen["theirs"] == torch.float32


def test_metrics_are_written_for_people_as_in_transformers(folder, tmp_path):
    _, ours = both(folder, tmp_path)
    metrics = {"epoch": 2.0, "total_flos": 5.4e9, "train_runtime": 3723.4567, "train_loss": 1.23456, "eval_samples": 7,
               "train_mem_gpu_peak": 3 << 30, "train_samples_per_second": 12.34567}  # fmt: skip
    assert ours.metrics_format(metrics) == transformers.trainer_pt_utils.metrics_format(metrics)
    assert ours.metrics_format(metrics)["total_flos"] == "5GF"
