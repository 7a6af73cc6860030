# SPDX-License-Identifier: Apache-2.0
"""Trainer: transformers' interface over the C++ training loop."""

import json
import logging
import os
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import _C
from .configs import TrainingArguments
from .modeling import CausalLM, refuse_unknown
from .peft import PeftModel

_log = logging.getLogger("qlorapp")


class TrainOutput(NamedTuple):
    """What train() returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainerCallback:
    """Methods that the trainer calls; override those you need. `control` has should_training_stop, should_save,
    should_evaluate and should_log, to be set by the callback."""

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None: ...
    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None: ...
    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None: ...
    def on_evaluate(
        self, args: TrainingArguments, state: Any, control: Any, metrics: dict | None = None, **kwargs: Any
    ) -> None: ...
    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None: ...
    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None: ...


def _ids(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _rows(dataset: Iterable[Any] | None, name: str) -> list[tuple[list[int], list[int]]]:
    """(input_ids, labels) of every row, without the padding that an attention_mask of 0 marks."""
    rows = []
    for i, row in enumerate(dataset if dataset is not None else ()):
        if not hasattr(row, "keys") or "input_ids" not in row:
            raise TypeError(
                f"[Trainer] {name}: a row must be a dict with input_ids (and labels); row {i} is {type(row).__name__}."
            )
        ids = _ids(row["input_ids"])
        labels = _ids(row["labels"]) if row.get("labels") is not None else ids
        if len(labels) != len(ids):
            raise ValueError(f"[Trainer] {name}: row {i} has {len(ids)} input_ids and {len(labels)} labels. They must pair up.")
        if (mask := row.get("attention_mask")) is not None:
            keep = [m != 0 for m in _ids(mask)]
            ids = [token for token, kept in zip(ids, keep, strict=True) if kept]
            labels = [label for label, kept in zip(labels, keep, strict=True) if kept]
        rows.append((ids, labels))
    return rows


#: Collators that do what batching here does anyway: pad rows (here: lay them end to end) and take labels as they are.
_DEFAULT_COLLATORS = (
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
    "default_data_collator",
)


class Trainer:
    """Epochs, accumulation, logging, evaluation, checkpoints. Rows are {"input_ids", "labels"(, "attention_mask")}.

    The loop runs in C++ without the GIL; Ctrl-C stops it between two micro-batches. transformers' names and semantics:
    state.log_history, save_model, evaluate, train(resume_from_checkpoint=…).
    """

    def __init__(
        self,
        model: CausalLM | PeftModel,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Sequence[dict[str, Any]] | None = None,
        eval_dataset: Sequence[dict[str, Any]] | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        tokenizer: Any = None,
        **ignored: Any,
    ) -> None:
        for name in ("compute_metrics", "optimizers", "model_init", "compute_loss_func", "preprocess_logits_for_metrics"):
            if ignored.pop(name, None) not in (None, (None, None)):
                raise ValueError(
                    f"[Trainer] {name} is not supported: the loop is compiled. Leave it out, or write a loop by hand."
                )
        refuse_unknown("Trainer", ignored, {}, type(self))
        name = type(data_collator).__name__ if not isinstance(data_collator, types.FunctionType) else data_collator.__name__
        if data_collator is not None and name not in _DEFAULT_COLLATORS:
            raise ValueError(f"[Trainer] data_collator {name} is not supported: rows are batched without padding.")
        if getattr(data_collator, "mlm", False):
            raise ValueError(
                "[Trainer] a masked-language-model collator (mlm=True) is not supported; this library trains causal models."
            )
        self.model = model
        self.args = args if args is not None else TrainingArguments()
        self.processing_class = self.tokenizer = processing_class if processing_class is not None else tokenizer
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        lm = model.get_base_model() if isinstance(model, PeftModel) else model
        lm._rebind()
        for option, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if getattr(self.args, option) and lm.dtype != dtype:
                _log.warning("[Trainer] %s=True, but the model computes in %s. Load it with dtype=%s.", option, lm.dtype, dtype)
        handler = weakref.WeakMethod(self._event)  # or the two would keep each other alive

        def events(name: str, payload: Any, control: Any) -> None:
            if (handle := handler()) is not None:
                handle(name, payload, control)

        self._core = _C.Trainer(
            lm.core,
            json.dumps(self.args.to_dict()),
            _rows(train_dataset, "train_dataset"),
            _rows(eval_dataset, "eval_dataset"),
            lm.name_or_path,
            events,
        )
        lm._memory_changed()
        if self.args.gradient_checkpointing:
            keep = self.args.checkpoint_keep
            lm._keep = keep if isinstance(keep, str) else ",".join(keep)

    @property
    def state(self) -> types.SimpleNamespace:
        """global_step, max_steps, log_history …: as of now."""
        return types.SimpleNamespace(**self._core.state())

    def add_callback(self, callback: TrainerCallback) -> None:
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def _event(self, name: str, payload: Any, control: Any) -> None:
        if not self._callbacks:
            return
        extra = {"log": {"logs": payload}, "evaluate": {"metrics": payload}}.get(name, {})
        for callback in self._callbacks:
            method = getattr(callback, f"on_{name}", None)
            if method is not None:
                method(self.args, self.state, control, model=self.model, **extra)

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None) -> TrainOutput:
        """Runs to the end, or from a checkpoint folder on; True takes the newest in output_dir."""
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint is True or resume_from_checkpoint == "true":
            resume_from_checkpoint = _C.latest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"[Trainer] there is no checkpoint in {self.args.output_dir} to resume from.")
        folder = os.fspath(resume_from_checkpoint) if resume_from_checkpoint else None
        control = _C.TrainerControl()
        self._event("train_begin", None, control)
        output = TrainOutput(*self._core.train(folder))
        self._event("train_end", None, control)
        return output

    def evaluate(self) -> dict[str, float]:
        """eval_loss and speed over eval_dataset."""
        return self._core.evaluate()

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """The adapter, with trainer_state.json and the tokenizer's files beside it."""
        folder = os.fspath(output_dir if output_dir is not None else self.args.output_dir)
        self._core.save_model(folder)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder)

    def save_state(self) -> None:
        """trainer_state.json and the adapter into output_dir."""
        self.save_model()
