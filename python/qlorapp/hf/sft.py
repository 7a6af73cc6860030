# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer: TRL's over the C++ loop."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import transformers
from trl.trainer import sft_config, sft_trainer

from .auto_model import AutoModelForCausalLM
from .cpp_loop import CppLoop
from .loop_predicate import levels_of
from .sample import FirstRow
from .training_arguments import SFTConfig


@contextlib.contextmanager
def _adapters_in_float32(model: Any) -> Iterator[None]:
    """Hides the four-bit flag from TRL, which would round adapters to bfloat16 and lose small updates."""
    base = levels_of(model)[-1]
    hidden = vars(base).pop("is_loaded_in_4bit", None)
    try:
        yield
    finally:
        if hidden is not None:
            base.is_loaded_in_4bit = hidden


class SFTTrainer(CppLoop, sft_trainer.SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer. Rows, templates, masks and packing are TRL's; train() runs in C++ as Trainer's does.

    This library loads a model given by name. Adapters stay in float32. The first row is shown before the first step, unless disable_tqdm is
    set.
    """

    def __init__(
        self, model: Any, args: Any = None, *more: Any, peft_config: Any = None, tokenizer: Any = None, **options: Any
    ) -> None:
        """TRL's arguments. tokenizer: the older name of processing_class."""
        if isinstance(args, transformers.TrainingArguments) and not isinstance(args, sft_config.SFTConfig):
            args = SFTConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init})
        if isinstance(model, str):
            load = dict(getattr(args, "model_init_kwargs", None) or {})
            load.setdefault("quantization_config", options.pop("quantization_config", None))
            model = AutoModelForCausalLM.from_pretrained(model, **load)
        if tokenizer is not None:
            options.setdefault("processing_class", tokenizer)
        if peft_config is not None:
            options["peft_config"] = peft_config
        with _adapters_in_float32(model):
            super().__init__(model, args, *more, **options)
        if not self.args.disable_tqdm:
            self.add_callback(FirstRow())

    def _note_tokens(self, tokens: int, to_log: bool) -> None:
        """Stores the counts that TRL's log() reads."""
        self._total_train_tokens = tokens
        if to_log:
            self._metrics["train"]["num_tokens"] = [tokens]
