# SPDX-License-Identifier: Apache-2.0
"""What the parts of Trainer, each in a file of its own, know of the whole."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _C
from .autograd_step import Accelerator, AutogradStep
from .batches import is_default_collator
from .foreign_model import ForeignModel
from .modeling import CausalLM
from .out_of_memory import InParts
from .trainer_callback import TrainerState
from .training_arguments import TrainingArguments


class MadeOf(NamedTuple):
    """What a C++ trainer was made of. A script may put others into the trainer's attributes."""

    model: Any
    train_dataset: Any
    eval_dataset: Any


class TrainerParts:
    """The attributes that Trainer sets and its parts read; people who override methods read them too."""

    model: Any
    args: TrainingArguments
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None
    label_names: list[str]
    current_gradient_accumulation_steps: int
    accelerator: Accelerator
    callback_handler: Any
    eval_dataloader: Any
    _lm: CausalLM | ForeignModel
    _core: _C.Trainer
    _step: AutogradStep | None
    _train_loader: Any
    _made_of: MadeOf
    _take_exchanged_model: Callable[[], None]
    _why_autograd: Callable[[], list[str]]
    _made_optimizer: Any
    _made_scheduler: Any
    _autograd_reasons: list[str]
    _loss_was_scaled: bool
    _has_eval_rows: bool
    _session: tuple[int, int]
    _shown_rate: float
    state: TrainerState
    _say_once: Callable[[str], None]
    log: Callable[..., None]
    _sync_state: Callable[[], None]
    _prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]]
    compute_loss_context_manager: Callable[[], contextlib.AbstractContextManager[Any]]
    save_model: Callable[..., None]
    _save_processing_class: Callable[[str], None]
    evaluate: Callable[..., dict[str, float]]
    _core_arguments: Callable[[], str]
    _loss_of: Callable[..., Any]
    _why_whole: Callable[[Any, Any], str | None]
    _evaluation_in_parts: InParts
    _remove_unused_columns: Callable[..., Any]
    _collate: Callable[..., Callable[[list[Any]], Any]]

    #: What overrides copied from transformers ask for.
    is_deepspeed_enabled = is_fsdp_enabled = is_tp_enabled = is_model_parallel = place_model_on_device = False
    can_return_loss = True
    hp_search_backend = None

    @property
    def _own_collator(self) -> bool:
        """Does the collator do what batching here would not do anyway?"""
        return not is_default_collator(self.data_collator)

    @property
    def _train_batch_size(self) -> int:
        return self.args.train_batch_size

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Does the model divide its loss by num_items_in_batch?"""
        return not isinstance(self._lm, ForeignModel) or self._lm.takes_count()

    @property
    def control(self) -> Any:
        """The flags of the C++ trainer, which callbacks read and set."""
        return self._core.control
