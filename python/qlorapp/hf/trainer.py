# SPDX-License-Identifier: Apache-2.0
"""Trainer: transformers', with steps in C++."""

import inspect
from typing import Any

import torch
import transformers

from .loop import TrainingLoop
from .rows import OfOneLength


class Trainer(TrainingLoop, transformers.Trainer):
    """transformers' Trainer. C++ computes the steps of train() if it computes everything that they need; otherwise the reason is logged.

    Data, callbacks, logs, evaluation and checkpoints are transformers'.
    """

    def __init__(self, *args: Any, tokenizer: Any = None, **options: Any) -> None:
        """transformers' arguments. tokenizer: the older name of processing_class. Without a data_collator, labels are padded, too."""
        if tokenizer is not None:
            options.setdefault("processing_class", tokenizer)
        super().__init__(*args, **options)
        if inspect.signature(transformers.Trainer.__init__).bind(self, *args, **options).arguments.get("data_collator") is None:
            self.data_collator = OfOneLength(self.data_collator, getattr(self.processing_class, "pad_token_id", None) or 0)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """transformers' step, without computing logits that it would discard."""
        if not prediction_loss_only or inputs.get("labels") is None or self.label_names != ["labels"]:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            count = self._get_num_items_in_batch([inputs], self.args.device)
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=count)
        return loss.detach().mean(), None, None
