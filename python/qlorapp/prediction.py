# SPDX-License-Identifier: Apache-2.0
"""Evaluation that looks at logits: compute_metrics, predict(), and prediction_step as people override it.

Without any of these the C++ trainer evaluates, and no logits are formed. Here each batch's logits leave the device at once, go
through preprocess_logits_for_metrics if there is one, and are kept only where compute_metrics or predict() wants them.
"""

import logging
import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from .autograd_step import count_targets
from .batches import length_of
from .out_of_memory import Work, parts_of, rows_in

_log = logging.getLogger("qlorapp")


class EvalPrediction:
    """What compute_metrics gets: predictions and label_ids, as arrays padded with -100; inputs and losses where asked for."""

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses
        self.elements = tuple(part for part in (predictions, label_ids, inputs, losses) if part is not None)

    def __iter__(self) -> Any:
        return iter(self.elements)

    def __getitem__(self, i: int) -> Any:
        return self.elements[i]


class EvalLoopOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int


class PredictionOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, Any] | None


def on_host(value: Any) -> Any:
    """Arrays for tensors, at any depth; bfloat16, which numpy lacks, as float32."""
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(entry) for entry in value)
    if isinstance(value, dict):
        return {key: on_host(entry) for key, entry in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def concatenated(parts: list[Any], fill: float = -100) -> Any:
    """Arrays of each batch as one, the second axis padded to the longest; tuples part by part."""
    if not parts:
        return None
    if isinstance(parts[0], (list, tuple)):
        return type(parts[0])(concatenated([part[i] for part in parts], fill) for i in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {key: concatenated([part[key] for part in parts], fill) for key in parts[0]}
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return np.concatenate([np.atleast_1d(part) for part in parts])
    width = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        whole = np.full((part.shape[0], width, *part.shape[2:]), fill, dtype=part.dtype)
        whole[:, : part.shape[1]] = part
        padded.append(whole)
    return np.concatenate(padded)


def as_numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Python's numbers for numpy's and torch's."""
    single = {key: value for key, value in metrics.items() if isinstance(value, (np.generic, np.ndarray, torch.Tensor))}
    return {**metrics, **{key: value.item() for key, value in single.items() if np.size(on_host(value)) == 1}}


def speed(prefix: str, start: float, samples: int, steps: int) -> dict[str, float]:
    """transformers' keys and roundings."""
    seconds = time.time() - start
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }


def _rows_in(batch: Any) -> int:
    for value in batch.values() if hasattr(batch, "values") else batch:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    return 1


def _not_per_row(value: Any, rows: int) -> str | None:
    """What of a part's result has no entry a row, and so cannot be joined with those of other parts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for entry in value if (found := _not_per_row(entry, rows))), None)
    shape = tuple(getattr(value, "shape", ()))
    return None if value is None or shape[:1] == (rows,) else f"{type(value).__name__} of shape {shape}"


def _joined(values: list[Any]) -> Any:
    """What parts of a batch gave, as the batch would have: one after the other on the host, at any depth."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([value.cpu() for value in values])
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined([value[i] for value in values]) for i in range(len(first)))
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values]) for key in first}
    return first


class Prediction(Work):
    """(loss, preprocessed logits, labels) of a batch."""

    def __init__(self, trainer: Any, inputs: Any, only_loss: bool, ignore_keys: Any) -> None:
        self.batches = [inputs]
        self._trainer, self._only_loss, self._ignore_keys = trainer, only_loss, ignore_keys
        self._joins = True

    def attempt(self) -> tuple[Any, Any, Any]:
        trainer = self._trainer
        parts = parts_of(self.batches[0], trainer._evaluation_in_parts.most)
        if len(parts) == 1:
            return self._of(parts[0])
        results, counts = [], []
        for part in parts:
            rows = rows_in(part) or 0
            counts.append(count_targets([part], trainer.args.count_position_zero) or 0)
            loss, logits, labels = self._of(part)
            if (found := _not_per_row([logits, labels], rows)) is not None:
                self._joins = False
                raise torch.OutOfMemoryError(
                    f"[evaluate] a batch does not fit whole, and its predictions cannot be joined from parts: {found} has no entry for each of "
                    f"{rows} rows. {_WAY_OUT}"
                )
            results.append((loss, _joined([logits]), _joined([labels])))
        losses = [(result[0], count) for result, count in zip(results, counts, strict=True) if count > 0]
        loss = sum(loss * (count / sum(counts)) for loss, count in losses) if losses else results[0][0]
        return loss, _joined([result[1] for result in results]), _joined([result[2] for result in results])

    def _of(self, inputs: Any) -> tuple[Any, Any, Any]:
        trainer = self._trainer
        loss, logits, labels = trainer.prediction_step(trainer.model, inputs, self._only_loss, ignore_keys=self._ignore_keys)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return loss, logits, labels

    def may_repeat(self) -> bool:
        return self._joins  # fewer rows would not help

    def why_whole(self) -> str | None:
        why: str | None = self._trainer._why_predicted_whole(self.batches[0])
        return why

    def way_out(self, rows: int) -> str:
        return _WAY_OUT


_WAY_OUT = "Lower per_device_eval_batch_size, give preprocess_logits_for_metrics, or shorten the rows."


def run(trainer: Any, loader: Any, prediction_loss_only: bool, ignore_keys: Any, prefix: str, keep: bool) -> EvalLoopOutput:
    """Trainer.evaluation_loop. keep: predictions and labels are returned, with compute_metrics or without."""
    args = trainer.args
    wanted = {*args.include_for_metrics, *(["inputs"] if args.include_inputs_for_metrics else [])}
    was_training = trainer.model.training
    trainer.model.eval()
    losses, predictions, labels_of, inputs_of = [], [], [], []
    weighted, tokens, samples, metrics = 0.0, 0, 0, None
    batches = length_of(loader)
    try:
        for step, inputs in enumerate(loader):
            rows = _rows_in(inputs)
            samples += rows
            loss, logits, labels = trainer._evaluation_in_parts.run(
                Prediction(trainer, inputs, prediction_loss_only, ignore_keys)
            )
            if loss is not None:
                mean = float(loss.mean())
                losses += [mean] * rows
                if isinstance(labels_given := inputs.get("labels"), torch.Tensor) and math.isfinite(mean):
                    count = int((labels_given[..., 1:] != -100).sum())
                    weighted, tokens = weighted + mean * count, tokens + count
            trainer.callback_handler.call("prediction_step", trainer.control)
            if args.batch_eval_metrics and trainer.compute_metrics is not None and not keep:
                if logits is not None and labels is not None:
                    extra = {"inputs": inputs if "inputs" in wanted else None, "losses": loss if "loss" in wanted else None}
                    last = batches is not None and step == batches - 1
                    metrics = trainer.compute_metrics(EvalPrediction(logits, labels, **extra), compute_result=last)
                continue
            if logits is not None:
                predictions.append(on_host(logits))
            if labels is not None:
                labels_of.append(on_host(labels))
            if "inputs" in wanted:
                inputs_of.append(on_host(inputs["input_ids"]))
    finally:
        trainer.model.train(was_training)
    join = concatenated if args.eval_do_concat_batches else (lambda parts: parts or None)
    all_predictions, all_labels = join(predictions), join(labels_of)
    if metrics is None and trainer.compute_metrics is not None and all_predictions is not None and all_labels is not None:
        extra = {
            "inputs": join(inputs_of) if "inputs" in wanted else None,
            "losses": np.array(losses) if "loss" in wanted else None,
        }
        metrics = trainer.compute_metrics(EvalPrediction(all_predictions, all_labels, **extra))
    metrics = as_numbers(dict(metrics or {}))
    if losses:
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) < len(losses):
            _log.warning("[evaluate] the loss of %d rows is not finite.", len(losses) - len(finite))
        counted = finite if args.logging_nan_inf_filter and finite else losses
        metrics[f"{prefix}_loss"] = float(np.mean(counted))
        if tokens > 0:
            metrics[f"{prefix}_loss_token_weighted"] = weighted / tokens
    metrics = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
    return EvalLoopOutput(all_predictions, all_labels, metrics, samples)
