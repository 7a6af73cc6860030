# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer: TRL's, with steps in C++."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from trl.trainer import sft_config, sft_trainer

from . import assistant_turns
from .auto_model import AutoModelForCausalLM
from .loop import TrainingLoop
from .loop_predicate import levels_of
from .older_names import modern
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


class _ByName(AutoModelForCausalLM):
    """As TRL loads a model by name: float weights in float32."""

    _dtype = torch.float32


#: Windows without a log, whose statistics are in small tensors of the device.
_MOST_UNREAD = 256
_OWN_ARGUMENTS = list(inspect.signature(sft_trainer.SFTTrainer.__init__).parameters)


@contextlib.contextmanager
def _assistant_turns(model: Any, args: Any, options: dict[str, Any]) -> Iterator[None]:
    """Tokenizes conversations of assistant_only_loss here if TRL knows no template for them, and hides the option from TRL."""
    tokenizer = options.get("processing_class")
    if tokenizer is None and getattr(args, "assistant_only_loss", False):
        processor: Any = transformers.AutoProcessor
        tokenizer = processor.from_pretrained(model.config._name_or_path)  # as TRL
    is_text = options.get("formatting_func") is not None
    if is_text or not assistant_turns.is_needed(args, tokenizer) or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        yield
        return
    options["processing_class"] = tokenizer
    for name in ("train_dataset", "eval_dataset"):
        given = options.get(name)
        if isinstance(given, dict) and not hasattr(given, "column_names"):
            options[name] = {key: assistant_turns.prepared(one, args, tokenizer) for key, one in given.items()}
        elif given is not None:
            options[name] = assistant_turns.prepared(given, args, tokenizer)
    args.assistant_only_loss = False  # the rows have their masks
    try:
        yield
    finally:
        args.assistant_only_loss = True


class SFTTrainer(TrainingLoop, sft_trainer.SFTTrainer):
    """TRL's SFTTrainer. Rows, templates, masks and packing are TRL's; train() runs in C++ as Trainer's does.

    This library loads a model given by name. Adapters stay in float32. The first row is shown before the first step, unless disable_tqdm is
    set or the data set is streamed.
    """

    _counts_tokens = True

    def __init__(
        self, model: Any, args: Any = None, *more: Any, peft_config: Any = None, tokenizer: Any = None, **options: Any
    ) -> None:
        """TRL's arguments, and those of its older versions: tokenizer is processing_class, options of SFTConfig are put into args."""
        options.update(zip(_OWN_ARGUMENTS[3:], more, strict=False))
        of_args = {name: options.pop(name) for name in set(options) - set(_OWN_ARGUMENTS)}
        is_config = isinstance(args, sft_config.SFTConfig)
        if of_args or (args is not None and not is_config):
            of_args = modern("SFTTrainer", {field.name for field in dataclasses.fields(SFTConfig)}, of_args)
            fields = [] if args is None or is_config else dataclasses.fields(args)
            given = {field.name: getattr(args, field.name) for field in fields if field.init}
            args = dataclasses.replace(args, **of_args) if is_config else SFTConfig(**{**given, **of_args})
        if isinstance(model, str):
            load = dict(getattr(args, "model_init_kwargs", None) or {})
            load.setdefault("quantization_config", options.pop("quantization_config", None))
            load.setdefault("device_map", "cpu" if getattr(args, "use_cpu", False) else "auto")  # as TRL
            model = _ByName.from_pretrained(model, **load)
        if tokenizer is not None:
            options.setdefault("processing_class", tokenizer)
        if peft_config is not None:
            options["peft_config"] = peft_config
        #: (micro-batches, 3) of each window that no log has shown: C++'s token_statistics.
        self._unread: list[torch.Tensor] = []
        with _adapters_in_float32(model), _assistant_turns(model, args, options):
            super().__init__(model, args, **options)
        if not self.args.disable_tqdm:
            self.add_callback(FirstRow())

    def _note_window(self, runner: Any) -> None:
        """As TRL's compute_loss notes a micro-batch, without a read that makes a GPU wait."""
        self._total_train_tokens += runner.input_tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        self._unread.append(runner.token_statistics)
        if len(self._unread) >= _MOST_UNREAD:
            self._read_windows()

    def _read_windows(self) -> None:
        for entropy, correct, targets in torch.cat(self._unread).tolist() if self._unread else []:
            self._metrics["train"]["entropy"].append(entropy / targets if targets else 0.0)
            self._metrics["train"]["mean_token_accuracy"].append(correct / targets if targets else 0.0)
        self._unread.clear()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's method."""
        self._read_windows()
        super().log(logs, start_time)
