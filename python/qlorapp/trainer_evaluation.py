# SPDX-License-Identifier: Apache-2.0
"""The part of Trainer that evaluates and predicts: in C++, or in Python where logits are looked at or a part is overridden."""

import time
from typing import Any

import torch

from . import prediction
from .autograd_step import count_targets, overridden
from .batches import length_of, rewrites_labels, rows_of
from .foreign_model import ForeignModel
from .prediction import EvalLoopOutput, PredictionOutput
from .trainer_parts import TrainerParts
from .trainer_steps import EVALUATED_METHODS

_METHODS = ("prediction_step", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler")


class EvaluationMethods(TrainerParts):
    """Mixed into Trainer."""

    def _evaluates_in_python(self) -> bool:
        return (
            self.model is not self._made_of.model  # exchanged since
            or (self.compute_metrics is not None and not self.args.prediction_loss_only)
            or self.compute_loss_func is not None
            or self._own_collator
            or bool(overridden(self, EvaluationMethods, _METHODS))
            or not set(self._why_autograd()).isdisjoint(EVALUATED_METHODS)
            or isinstance(self._lm, ForeignModel)
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss, speed and compute_metrics over eval_dataset, logged.

        eval_dataset: rows, or a dict of data sets, which are evaluated one by one as eval_<name>_…, or one's name.
        """
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(rows, dict):
            every: dict[str, Any] = {}
            for name, dataset in rows.items():
                given = dataset if eval_dataset is not None else name  # an overridden get_eval_dataloader is told the name
                every |= self.evaluate(given, ignore_keys, f"{metric_key_prefix}_{name}")
            return every
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        self._take_exchanged_model()
        self._sync_state()
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            rows = eval_dataset = self._rows_given(eval_dataset, "eval_dataset", keep_all=False)
        if self._evaluates_in_python():
            loader = self.eval_dataloader = self.get_eval_dataloader(eval_dataset)
            start = time.time()
            only_loss = True if self.compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", only_loss, ignore_keys, metric_key_prefix)
            metrics = output.metrics | prediction.speed(
                metric_key_prefix, start, output.num_samples, self._steps_of(loader, output)
            )
        else:
            if rows is None:
                raise ValueError("[Trainer] evaluation needs an eval_dataset.")
            self._show_eval_batches(rows)
            own = eval_dataset is None and rows is self._made_of.eval_dataset and self._has_eval_rows
            metrics = self._core.metrics_of(None if own else rows_of(rows, "eval_dataset"), metric_key_prefix)
        self.log(metrics)
        self.control.should_evaluate = False
        self.callback_handler.call("evaluate", self.control, metrics=metrics)
        return metrics

    def _rows_given(self, dataset: Any, name: str, keep_all: bool) -> Any:
        """The rows of a data set that evaluate() or predict() is given: here it must have tokens. keep_all: each, in its place."""
        return dataset

    def _steps_of(self, loader: Any, output: EvalLoopOutput) -> int:
        return length_of(loader) or -(-output.num_samples // self.args.per_device_eval_batch_size)

    def _show_eval_batches(self, rows: Any) -> None:
        """For callbacks, which ask for the number of batches: C++ makes its own of as many rows."""
        batch_size = self.args.per_device_eval_batch_size
        self.eval_dataloader = torch.utils.data.DataLoader(rows, batch_size, collate_fn=self._collate())

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Batches through prediction_step, and what compute_metrics makes of them."""
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return prediction.run(self, dataloader, only_loss, ignore_keys, metric_key_prefix, keep=description == "Prediction")

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(loss, logits, labels) of a batch; logits and labels None with prediction_loss_only."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            if labels is None:
                loss, outputs = None, model(**inputs)
            else:
                count = count_targets([inputs], self.args.count_position_zero)
                loss, outputs = self._loss_of(model, inputs, True, count)
                loss = loss.detach().mean()
            if prediction_loss_only:
                return loss, None, None
            logits = outputs["logits"].detach()
            return loss, logits.float() if self.args.bf16 or self.args.fp16 else logits, labels  # as accelerate hands them on

    def _why_predicted_whole(self, inputs: Any) -> str | None:
        """Why a batch's prediction is not those of its parts; None if it is."""
        if overridden(self, EvaluationMethods, ("prediction_step",)):
            return "prediction_step is overridden"
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        return None if labels is None else self._why_whole(inputs, count_targets([inputs], self.args.count_position_zero))

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits (or what preprocess_logits_for_metrics makes of them), labels and metrics of a data set."""
        self._take_exchanged_model()
        rows = self._rows_given(test_dataset, "test_dataset", keep_all=True)
        loader = self.eval_dataloader = self.get_test_dataloader(rows)
        start = time.time()
        output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        metrics = output.metrics | prediction.speed(
            metric_key_prefix, start, output.num_samples, self._steps_of(loader, output)
        )
        self.callback_handler.call("predict", self.control, metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader[Any]:
        """Padded batches of a data set, of one by its name, or of eval_dataset."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        if rows is None:
            raise ValueError("[Trainer] evaluation needs an eval_dataset.")
        return self._evaluated_batches(rows, "evaluation", self._collate())

    def _evaluated_batches(self, rows: Any, description: str, collate: Any) -> torch.utils.data.DataLoader[Any]:
        rows = self._remove_unused_columns(rows, description) if self._own_collator else rows
        sampler = self._get_eval_sampler(rows)
        return torch.utils.data.DataLoader(rows, self.args.per_device_eval_batch_size, collate_fn=collate, sampler=sampler)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """One after another."""
        return torch.utils.data.SequentialSampler(eval_dataset) if hasattr(eval_dataset, "__len__") else None

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader[Any]:
        """Padded batches. Rows without labels stay so, but for a collator that makes some."""
        return self._evaluated_batches(test_dataset, "test", self._collate(self._makes_labels()))

    def _makes_labels(self) -> bool:
        return rewrites_labels(self.data_collator)

    def num_examples(self, dataloader: Any) -> int:
        return len(dataloader.dataset)
