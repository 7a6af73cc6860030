# SPDX-License-Identifier: Apache-2.0
"""Trainer: transformers' over the C++ loop."""

import inspect
from typing import Any

import torch
import transformers

from .cpp_loop import CppLoop
from .rows import OfOneLength


class Trainer(CppLoop, transformers.Trainer):
    """transformers' Trainer. train() runs in C++ if the C++ loop computes everything that the run needs.

    Otherwise transformers' loop runs, and the reason is logged; C++ computes its steps where it computes the model. In all cases callbacks,
    logs, evaluation and checkpoints are transformers'.
    """

    _gives_windows = True

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
