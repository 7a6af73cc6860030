# SPDX-License-Identifier: Apache-2.0
"""Trainer: transformers' interface over the C++ training loop."""

import contextlib
import copy
import inspect
import json
import logging
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _C
from .autograd_step import Accelerator, AutogradStep, overridden, scaler_of
from .base_parameters import why_not_trained
from .batches import (
    LABELS_ARE_KEPT,
    PadRight,
    check_one_data_set,
    is_stream,
    rewrites_labels,
    rows_of,
    say_that_labels_are_kept,
    training_rows,
)
from .field_table import plain
from .foreign_model import ForeignModel
from .modeling import CausalLM, refuse_unknown
from .out_of_memory import InParts
from .peft import PeftModel
from .precision import own_dtypes
from .process_state import refuse_several_processes
from .progress import default_progress, reporting_callbacks
from .random import set_seed
from .trainer_callback import CallbackHandler, TrainerCallback, TrainerState
from .trainer_evaluation import EvaluationMethods
from .trainer_hooks import HookMethods
from .trainer_parts import MadeOf
from .trainer_reports import ReportMethods
from .trainer_steps import ROW_METHODS, StepMethods
from .training_arguments import TrainingArguments

_log = logging.getLogger("qlorapp")


#: Fields of TrainingArguments that memory_budget decides.
CHOSEN_BY_BUDGET = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "checkpoint_keep", "loss_chunk_rows",
    "mlp_tile_rows", "weight_workspace", "embedding_on_host",
)  # fmt: skip

#: What these buy is built for the families that are computed here.
FOR_NATIVE_MODELS = ("checkpoint_keep", "loss_chunk_rows", "mlp_tile_rows", "weight_workspace", "embedding_on_host")


def trained_model(model: Any) -> CausalLM | ForeignModel:
    """What a trainer knows of a model: the native one, without PEFT's level, or what stands for one of transformers."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model if isinstance(model, CausalLM) else ForeignModel(model)


def uncompiled(model: Any) -> Any:
    """A native model that torch.compile has wrapped, without that: C++ computes, and there is nothing to trace."""
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, (CausalLM, PeftModel)) else model


class TrainOutput(NamedTuple):
    """What train() returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(HookMethods, StepMethods, EvaluationMethods, ReportMethods):
    """Epochs, accumulation, logging, evaluation, checkpoints. Rows are {"input_ids", "labels"(, "attention_mask")}.

    The loop runs in C++ without the GIL; Ctrl-C stops it between two micro-batches. transformers' names and semantics, callbacks
    and subclassing among them: where a part of the step is overridden (compute_loss, training_step, get_train_dataloader,
    create_optimizer …, compute_loss_func, optimizers, a data_collator of one's own, hooks on the model or on parameters) the
    steps are computed by torch's autograd in Python, which is said once; a method that would never be called is refused
    (trainer_overrides.py).
    """

    _labels_are_kept = LABELS_ARE_KEPT
    _checked_model: Any = None

    def __init__(
        self,
        model: CausalLM | PeftModel | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., CausalLM | PeftModel] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        **ignored: Any,
    ) -> None:
        refuse_unknown("Trainer", ignored, {}, Trainer)
        if tokenizer is not None:
            _C.say_older_name("Trainer", "tokenizer", "processing_class")
        self.model_init = model_init
        if model is None:
            if model_init is None:
                raise ValueError("[Trainer] give a model, or model_init, which makes one.")
            model = self.call_model_init()
        self.model = self.model_wrapped = model
        if args is not None and not isinstance(args, TrainingArguments):
            raise TypeError(
                f"[Trainer] args must be a qlorapp.TrainingArguments; got {type(args).__module__}.{type(args).__name__}. Import it from qlorapp: "
                "its options have the same names."
            )
        self.args = args if args is not None else TrainingArguments()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = self.tokenizer = processing_class if processing_class is not None else tokenizer
        pad = PadRight(getattr(self.processing_class, "pad_token_id", None))
        self.data_collator = data_collator if data_collator is not None else pad  # which overridden data loaders read
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers if optimizers is not None else (None, None)
        self._made_optimizer = self._made_scheduler = None
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.label_names = self.args.label_names or ["labels"]
        self.is_in_train = False
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.accelerator = Accelerator(self)
        self._loss_was_scaled = False
        self._said: set[str] = set()
        self._train_loader: Any = None
        self.eval_dataloader: Any = None
        self._check()
        self._take_model()
        self._check_model()
        self._refuse_a_trained_base()
        if rewrites_labels(data_collator) and not self._own_collator:
            say_that_labels_are_kept(self.train_dataset, self._labels_are_kept)
        if self.args.log_level != "passive":
            _log.setLevel(self.args.log_level.upper())
        progress = [default_progress(self.args.disable_tqdm)]
        self.callback_handler = CallbackHandler(
            [*reporting_callbacks(self.args.report_to), *(callbacks or []), *progress], self
        )
        self._make_core()
        self.callback_handler.call("init_end", self.control)

    def _check(self) -> None:
        args = self.args
        refuse_several_processes()
        check_one_data_set(self.train_dataset, "train_dataset")
        if (
            args.eval_strategy != "no"
            and self.eval_dataset is None
            and not overridden(self, EvaluationMethods, ("get_eval_dataloader", "evaluate"))
        ):
            raise ValueError(
                f"[Trainer] eval_strategy is {args.eval_strategy!r}, but there is no eval_dataset. Give one, or leave it 'no'."
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise ValueError(
                "[Trainer] optimizers and optimizer_cls_and_kwargs are two ways to say one thing. Give one of them."
            )

    def _take_model(self) -> None:
        """self.model, at construction and where a script has put another one there."""
        self.model = self.model_wrapped = uncompiled(self.model)
        self._lm = trained_model(self.model)
        self._lm._rebind()
        self._evaluation_in_parts = InParts("evaluate", torch.device(self._lm.device))
        self._known_model = self.model

    def _take_exchanged_model(self) -> None:
        if self.model is not self._known_model and not self.is_in_train:
            self._take_model()

    def _check_model(self) -> None:
        """Once a model, as some of it is said and no error."""
        if self.model is self._checked_model:
            return
        args, lm = self.args, self._lm
        if isinstance(lm, CausalLM) and not lm.core.has_adapters:
            raise ValueError(
                "[Trainer] there is nothing to train: the base is frozen. Add adapters: get_peft_model(model, LoraConfig(…))."
            )
        if isinstance(lm, CausalLM) and not any(parameter.requires_grad for _, parameter in lm.adapter_parameters()):
            raise ValueError(
                f"[Trainer] there is nothing to train: every tensor of the adapter {lm.core.active_adapter!r} is frozen. Load it with "
                "is_trainable=True, or call requires_grad_() on what is to be trained."
            )
        if args.use_cpu and lm.device.type != "cpu":
            raise ValueError(f"[Trainer] use_cpu=True, but the model is on {lm.device}. Load it with device_map='cpu'.")
        if isinstance(lm, ForeignModel):
            for option in FOR_NATIVE_MODELS:
                if plain(getattr(args, option)) != plain(getattr(TrainingArguments(), option)):
                    _log.warning("[Trainer] %s has no effect: the model is transformers' own.", option)
        for option, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if getattr(args, option) and lm.dtype != _C.dtype_on(str(lm.device), dtype):  # float16 on a GPU without bfloat16
                _log.warning("[Trainer] %s=True, but the model computes in %s. Load it with dtype=%s.", option, lm.dtype, dtype)
        self._checked_model = self.model

    def _refuse_a_trained_base(self) -> None:
        """The own loop's warning would come after hours here: nobody looks at .grad."""
        if isinstance(self._lm, CausalLM) and (name := self._lm._base_parameters.trainable()) is not None:
            raise ValueError(f"[Trainer] {why_not_trained(name)}")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.warning("[Trainer] %s", line)

    def _take_what_the_budget_chose(self) -> None:
        chosen = json.loads(self._core.arguments())
        self.args = copy.copy(self.args)  # the caller's own may be used again
        for name in CHOSEN_BY_BUDGET:
            setattr(self.args, name, chosen[name])
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps

    # --- the C++ trainer and what it asks for

    def _core_arguments(self) -> str:
        """JSON of what the C++ loop is told."""
        return self._told(self.args)

    def _told(self, args: TrainingArguments) -> str:
        told = args.to_dict()
        if is_stream(self.train_dataset):  # whose rows come in its own order, as transformers has it
            told["train_sampling_strategy"] = "sequential"
        return json.dumps(told)

    def _is_outdated(self) -> bool:
        """Has the C++ trainer a run behind it, or was it made of what is no more?"""
        now = (self.model, self.train_dataset, self.eval_dataset)
        return (
            self._has_run
            or any(one is not other for one, other in zip(self._made_of, now, strict=True))
            or self._why_autograd() != self._autograd_reasons
            or self._core_arguments() != self._made_with
        )

    def _make_core(self) -> None:
        self._made_with = ""  # until it is made: what fails below is to be tried again
        self._made_of = MadeOf(self.model, self.train_dataset, self.eval_dataset)
        self._has_run, self._train_loader = False, None
        reasons = self._autograd_reasons = self._why_autograd()
        if self.args.packing and (taken := [name for name in ROW_METHODS if name in reasons]):
            raise ValueError(
                f"[Trainer] packing=True packs the rows that {taken[0]} gives out, which is overridden. Leave one of them out."
            )
        hooks = self._hooks(steps_in_python=bool(reasons))
        eval_rows = (
            []
            if isinstance(self.eval_dataset, dict) or self._evaluates_in_python()
            else rows_of(self.eval_dataset, "eval_dataset")
        )
        self._has_eval_rows = bool(eval_rows)
        if isinstance(self._lm, ForeignModel):
            self._core = self._lm.make_core(self._core_arguments(), hooks)
        else:
            self._core = _C.Trainer(
                self._lm.core,
                self._core_arguments(),
                [] if reasons else training_rows(self.train_dataset, self.args),
                eval_rows,
                self._lm.name_or_path,
                hooks,
            )
        if self.args.memory_budget or self.args.auto_find_batch_size:
            self._take_what_the_budget_chose()
        self._made_with = self._core_arguments()
        self._step: AutogradStep | None = None
        self._scaler = scaler_of(self._core)
        self._session = (0, 0)  # tokens at the beginning of train()
        args = self.args
        self.state = TrainerState(train_batch_size=args.per_device_train_batch_size)
        self._sync_state()
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            if (steps := getattr(args, kind)) is not None:
                setattr(self.state, kind, math.ceil(self.state.max_steps * steps) if steps < 1 else steps)
        self._lm._memory_changed()
        if args.gradient_checkpointing:
            if isinstance(self._lm, ForeignModel):
                self._lm.enable_checkpointing(args.gradient_checkpointing_kwargs)
            else:
                keep = args.checkpoint_keep
                self._lm._keep = keep if isinstance(keep, str) else ",".join(keep)

    def _shown_train_loader(self) -> Any:
        """What callbacks get: none before a run, as a subclass may not be ready to make one."""
        return self.train_dataloader if self.is_in_train else self._train_loader

    @property
    def train_dataloader(self) -> Any:
        if self._train_loader is None and self.train_dataset is not None:
            self._train_loader = self.get_train_dataloader()
        return self._train_loader

    def call_model_init(self, trial: Any = None) -> Any:
        """A model of model_init, which may take the trial, None here."""
        assert self.model_init is not None
        return self.model_init(trial) if inspect.signature(self.model_init).parameters else self.model_init()

    # --- callbacks

    def add_callback(self, callback: TrainerCallback | type) -> None:
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type) -> Any:
        """The first callback that is this one or of this class, which is called no more; or None."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type) -> None:
        self.callback_handler.pop_callback(callback)

    # --- training

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Runs to the end, or from a checkpoint folder on; True takes the newest in output_dir.

        Called again, it begins anew, with the adapters as they are: steps, schedule, order of rows, moments and log.
        """
        if trial is not None:
            raise ValueError("[Trainer] trial is not supported: there is no hyper-parameter search. Leave it out.")
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint is True or resume_from_checkpoint == "true":
            resume_from_checkpoint = _C.latest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"[Trainer] there is no checkpoint in {self.args.output_dir} to resume from.")
        folder = os.fspath(resume_from_checkpoint) if resume_from_checkpoint else None
        self._ignore_keys = ignore_keys_for_eval
        if self._has_run and self.model_init is not None:
            set_seed(self.args.seed)
            self.model = self.call_model_init()
        self._take_exchanged_model()
        self._check_model()
        self._refuse_a_trained_base()  # what a script did after the trainer was made
        if isinstance(self._lm, CausalLM):
            self._lm._rebind()
        if self._is_outdated():
            self._make_core()
            self._core.zero_grad()  # of a run that an exception ended
        self._prepare_steps()
        self._sync_state()
        self._session = (self.state.num_input_tokens_seen, self.state.global_step)
        self.is_in_train = self._has_run = True
        ask = self._stop_on_sigterm() if self.args.enable_jit_checkpoint else None
        try:
            with own_dtypes(self._lm.device) if isinstance(self._lm, CausalLM) else contextlib.nullcontext():
                output = TrainOutput(*self._core.train(folder))
        except KeyboardInterrupt:
            self._leave_checkpoint()
            raise
        finally:
            self.is_in_train = False
            if ask is not None:
                signal.signal(signal.SIGTERM, ask)
            self._sync_state()
            self._show_rate()
        if not self.args.skip_memory_metrics:
            output.metrics["train_mem_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if self._lm.device.type == "cuda":
                output.metrics["train_mem_gpu_peak"] = torch.cuda.max_memory_allocated(self._lm.device)
        return output

    def _leave_checkpoint(self) -> None:
        """After Ctrl-C or a notebook's stop button: the whole steps so far are not lost."""
        self._sync_state()
        if self.state.global_step > 0:
            self._core.save_checkpoint()
            _log.warning(
                "[Trainer] stopped after step %d of %d, saved in %s; go on with train(resume_from_checkpoint=True).",
                self.state.global_step, self.state.max_steps, _C.latest_checkpoint(self.args.output_dir),
            )  # fmt: skip

    def _stop_on_sigterm(self) -> Any:
        """@returns the handler that was there, or None where only the main thread could set one."""
        if threading.current_thread() is not threading.main_thread():
            return None
        self._stop_asked = False

        def ask(number: int, frame: Any) -> None:
            self._stop_asked = True

        return signal.signal(signal.SIGTERM, ask)
