# SPDX-License-Identifier: Apache-2.0
"""The part of Trainer that a step in Python consists of: what people override to change what is trained, and how."""

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .autograd_step import ArenaAdamW, AutogradStep, accepts, count_targets, overridden, takes
from .batches import USED_COLUMNS, EpochSampler, PadRight, RowsOfPacks, UsedColumns, packs_of, row_lengths
from .foreign_model import ForeignModel
from .out_of_memory import RandomState, is_out_of_memory, parts_of
from .trainer_overrides import NEVER_CALLED, check_overrides, overrides_of_the_model
from .trainer_parts import TrainerParts

#: Whoever overrides one of these gets its steps computed in Python.
STEP_METHODS = (
    "compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "create_scheduler",
    "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names", "_prepare_inputs", "_prepare_input",
    "_get_train_sampler", "get_batch_samples", "_get_num_items_in_batch", "compute_loss_context_manager",
    "autocast_smart_context_manager",
)  # fmt: skip
#: Of these, what an evaluation runs through as well.
EVALUATED_METHODS = (
    "compute_loss", "_prepare_inputs", "_prepare_input", "compute_loss_context_manager", "autocast_smart_context_manager",
    "model.forward", "forward hooks",
)  # fmt: skip
#: What a collator of one's own is shown; the default one shows the model input_ids, labels and attention_mask, whatever there is.
COLUMN_METHODS = ("_set_signature_columns_if_needed", "_get_collator_with_removed_columns", "_remove_unused_columns")
#: And those that a pack, which is several rows, has no place in.
ROW_METHODS = ("get_train_dataloader", "_get_train_sampler")


class Rates:
    """The C++ loop's schedule, for callbacks to read."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def get_last_lr(self) -> list[float]:
        return [self._core.learning_rate]


class StepMethods(TrainerParts):
    """Mixed into Trainer."""

    _never_called = NEVER_CALLED
    #: Set it to tell whether the loss of an overridden compute_loss is scaled for the whole window already.
    loss_is_scaled_for_ga: bool | None = None

    def _why_autograd(self) -> list[str]:
        """What asks for steps in Python. @raises TypeError for an overridden method that has no part in either way."""
        check_overrides(self, self._never_called)
        if (
            (columns := overridden(self, StepMethods, COLUMN_METHODS))
            and not self._own_collator
            and not overridden(self, StepMethods, ("get_train_dataloader",))
        ):
            raise TypeError(
                f"[Trainer] {type(self).__name__}.{columns[0]} would never be called: without a data_collator batches are input_ids, labels and "
                "attention_mask. Pass one, or override get_train_dataloader."
            )
        reasons = overridden(self, StepMethods, STEP_METHODS)
        if isinstance(self._lm, ForeignModel):
            reasons.insert(0, type(self._lm.lm).__name__)
        else:
            reasons += overrides_of_the_model(self.model, self._trainable())
        given = {"compute_loss_func": self.compute_loss_func is not None, "optimizers": self._has_own_optimizers(),
                 "data_collator": self._own_collator, "requires_grad=False": bool(self._frozen())}  # fmt: skip
        return reasons + [name for name, is_given in given.items() if is_given]

    def _has_own_optimizers(self) -> bool:
        """Are there others than those that train() makes? Given to the trainer, set later, or the C++ one with another rate."""
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        if isinstance(optimizer, ArenaAdamW):
            own = optimizer.has_another_rate()
        else:
            own = optimizer is not None and optimizer is not self._made_optimizer
        return (
            own
            or (scheduler is not None and scheduler is not self._made_scheduler)
            or self.optimizer_cls_and_kwargs is not None
        )

    def _forget_made_optimizers(self) -> None:
        """Those of a run before this one; what somebody has given stays."""
        optimizer = self.optimizer
        if optimizer is self._made_optimizer and not (isinstance(optimizer, ArenaAdamW) and optimizer.has_another_rate()):
            self.optimizer = None
        if self.lr_scheduler is self._made_scheduler:
            self.lr_scheduler = None

    def _prepare_steps(self) -> None:
        """Optimizer and schedule: the C++ ones to look at, or those of steps in Python."""
        if isinstance(self.optimizer, ArenaAdamW):
            self.optimizer.refuse_edits()
        self._forget_made_optimizers()
        if not self._autograd_reasons:
            self.optimizer = self._made_optimizer = ArenaAdamW(self._core, self._trainable(), self.args)
            self.optimizer.param_groups[0]["initial_lr"] = self.args.learning_rate  # as any schedule leaves it
            self.lr_scheduler = self._made_scheduler = Rates(self._core)
            return
        overriding = self._autograd_reasons
        if isinstance(self._lm, ForeignModel):
            self._say_once(self._lm.line)
            overriding = overriding[1:]
        if overriding:
            self._say_once(
                f"{', '.join(overriding)}: steps are computed by torch's autograd in Python. Losses are the same; "
                "the C++ step is faster."
            )
        loader = self._train_loader = self.get_train_dataloader()
        try:
            batches = len(loader)
        except TypeError:
            batches = self.args.max_steps * self.args.gradient_accumulation_steps
            if batches <= 0:
                raise ValueError("[Trainer] max_steps must be set where the train dataloader has no length.") from None
        self._core.use_own_batches(batches)
        self._step = AutogradStep(self, loader)
        given = (self.optimizer, self.lr_scheduler)
        if isinstance(self.optimizer, ArenaAdamW):
            self.optimizer.move_to(self._core)
        self.create_optimizer_and_scheduler(self._core.state()["max_steps"])
        self._made_optimizer = self.optimizer if given[0] is None else None
        self._made_scheduler = self.lr_scheduler if given[1] is None else None
        if isinstance(self.optimizer, ArenaAdamW):
            self.optimizer.refuse_edits()

    def _frozen(self) -> list[torch.nn.Parameter]:
        """What somebody has frozen of the adapter that trains."""
        if isinstance(self._lm, ForeignModel):
            return []
        return [parameter for _, parameter in self._lm.adapter_parameters() if not parameter.requires_grad]

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that `optim` names, or of the class that is given, unless there is one already."""
        if self.optimizer is None:
            kind, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            spared = [*self._parameter_groups()[1]["params"], *self._frozen()] if self.args.weight_decay else []
            if kind is ArenaAdamW and spared:
                self._say_once(
                    f"weight_decay is not for {len(spared)} of the adapter's tensors (biases, norms, frozen ones): torch.optim.AdamW takes "
                    f"the place of optim={self.args.optim!r}, which decays all alike."
                )
                kind, kwargs = torch.optim.AdamW, {
                    "lr": self.args.learning_rate, "betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon,
                }  # fmt: skip
            if kind is ArenaAdamW:
                self.optimizer = ArenaAdamW(self._core, self._trainable(), self.args)
            else:
                self.optimizer = kind(**{"params": self._parameter_groups(), **kwargs})
        made: torch.optim.Optimizer = self.optimizer
        return made

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """What create_optimizer makes. The C++ optimizers, which `optim` names, take their options from `args`."""
        return ArenaAdamW, {}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """transformers' two: what weight_decay is for, and what it is not."""
        decaying = set(self.get_decay_parameter_names(self.model))
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return [
            {"params": [p for name, p in trained if (name in decaying) == decays], "weight_decay": rate}
            for decays, rate in ((True, self.args.weight_decay), (False, 0.0))
        ]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that lr_scheduler_type names, over num_training_steps, unless there is one already.

        @raises ValueError unless num_training_steps is positive.
        """
        if self.lr_scheduler is None:
            optimizer = optimizer if optimizer is not None else self.optimizer
            core = self._core

            def factor(step: int) -> float:
                return core.rate_factor(step, num_training_steps)

            self.lr_scheduler = self._made_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """All trainable ones but biases and norms; adapters are neither."""
        return [
            name for name, parameter in model.named_parameters()
            if parameter.requires_grad and "bias" not in name and "norm" not in name.rsplit(".", 2)[-2]
        ]  # fmt: skip

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; its share of the step's loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        self._loss_was_scaled = False
        with self.compute_loss_context_manager():
            loss = self._loss_of(model, inputs, False, num_items_in_batch)
        if not self._is_scaled():
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def _loss_of(self, model: Any, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any) -> Any:
        extra = {"num_items_in_batch": num_items_in_batch} if self._takes_count() else {}
        return self.compute_loss(model, inputs, return_outputs=return_outputs, **extra)

    def _takes_count(self) -> bool:
        parameters = inspect.signature(self.compute_loss).parameters
        return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def _is_scaled(self) -> bool:
        """Is the loss that was just computed a share of the window's, or the mean of its micro-batch?"""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        if self._loss_was_scaled or self._promises_a_share():
            return True
        self._say_once(
            "compute_loss does not divide by num_items_in_batch: its loss is taken for the mean of a micro-batch, and averaged "
            "over those of a step."
        )
        return False

    def _promises_a_share(self) -> bool:
        """An overridden compute_loss that asks for the window's count divides by it, by transformers' contract."""
        return bool(overridden(self, StepMethods, ("compute_loss",))) and takes(self.compute_loss, "num_items_in_batch")

    def _why_whole(self, batch: Any, targets: Any) -> str | None:
        """Why a batch's loss is not the sum of its parts'; None if it is."""
        if targets is None:
            return "its labels cannot be counted"
        if not accepts(self.training_step, self.model, batch, targets):
            return "training_step does not take num_items_in_batch"
        if overridden(self, StepMethods, ("compute_loss",)):
            name, takes_count = "compute_loss", self.loss_is_scaled_for_ga is not False and self._takes_count()
        elif self.compute_loss_func is not None:
            name, takes_count = "compute_loss_func", accepts(self.compute_loss_func, None, None, num_items_in_batch=targets)
        else:
            return None if self.model_accepts_loss_kwargs else f"{type(self._lm.lm).__name__} averages its loss itself"
        return None if takes_count and self._divides(batch, targets) else f"{name} does not divide by num_items_in_batch"

    def _divides(self, batch: Any, targets: Any) -> bool:
        """Is the loss half of it, divided by twice as much? Asked of one row, where a signature alone promises it."""
        state = RandomState(torch.device(self._lm.device))
        row, values = parts_of(batch, 1)[0], []
        for count in (targets, targets * 2):
            try:
                with torch.no_grad(), self.compute_loss_context_manager():
                    values.append(float(self._loss_of(self.model, self._prepare_inputs(parts_of(row, 0)[0]), False, count)))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return True  # not even one row fits: the error for that is better than this one's
            finally:
                state.restore()
        whole, half = values
        return math.isfinite(whole) and whole != 0 and abs(2 * half - whole) <= 1e-2 * abs(whole)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss, summed over targets and divided by num_items_in_batch; compute_loss_func's, if there is one."""
        inputs = dict(inputs)
        labels = inputs.pop("labels", None) if self.compute_loss_func is not None else None
        counted = num_items_in_batch is not None and not (isinstance(self._lm, ForeignModel) and not self._lm.takes_count())
        if counted and self.compute_loss_func is None:
            inputs["num_items_in_batch"] = num_items_in_batch
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            counts = accepts(self.compute_loss_func, outputs, labels, num_items_in_batch=num_items_in_batch)
            extra = {"num_items_in_batch": num_items_in_batch} if counts else {}
            loss = self.compute_loss_func(outputs, labels, **extra)
            self._loss_was_scaled = counts and num_items_in_batch is not None
        else:
            if "loss" not in outputs:
                raise ValueError("[Trainer] a batch has no labels, so there is no loss. Let the collator make labels.")
            loss = outputs["loss"]
            self._loss_was_scaled = counted
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """What compute_loss runs in, in steps and evaluations."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager[Any]:
        """Nothing: the model computes in the dtype that it was loaded in."""
        return contextlib.nullcontext()

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch on the model's device."""
        prepared: dict[str, Any] = self._prepare_input(inputs)
        return prepared

    def _prepare_input(self, data: Any) -> Any:
        """A tensor on the model's device, or every one in a mapping, list or tuple."""
        if isinstance(data, Mapping):
            return {key: self._prepare_input(value) for key, value in data.items()}
        if type(data) in (list, tuple):
            return type(data)(self._prepare_input(value) for value in data)
        return data.to(self._lm.device) if isinstance(data, torch.Tensor) else data

    # --- data

    def _collate(self, makes_labels: bool = True) -> Callable[[list[Any]], Any]:
        if not self._own_collator:
            return PadRight(getattr(self.processing_class, "pad_token_id", None), makes_labels)
        return self._get_collator_with_removed_columns(self.data_collator)

    _signature_columns: list[str] | None = None

    def _set_signature_columns_if_needed(self) -> None:
        """_signature_columns: what a collator of one's own is shown with remove_unused_columns, the columns that the model takes."""
        if self._signature_columns is not None:
            return
        self._signature_columns = list(USED_COLUMNS)
        if isinstance(self._lm, ForeignModel):  # which may read images, too
            self._signature_columns = [
                *inspect.signature(self._lm.lm.forward).parameters,
                "label",
                "label_ids",
                *self.label_names,
            ]

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator, shown those columns alone."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return UsedColumns(data_collator, self._signature_columns or ())

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A datasets.Dataset of those columns alone; raw rows, which a collator tokenizes, and other data sets as they are."""
        names = getattr(dataset, "column_names", None)
        if not self.args.remove_unused_columns or not isinstance(names, list) or "input_ids" not in names:
            return dataset
        self._set_signature_columns_if_needed()
        return dataset.remove_columns([name for name in names if name not in (self._signature_columns or ())])

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Padded batches in the order of the C++ loop. With packing a place holds the rows of a pack, each padded by itself."""
        args, rows = self.args, self.train_dataset
        if rows is None:
            raise ValueError("[Trainer] training needs a train_dataset.")
        rows = self._remove_unused_columns(rows, "training") if self._own_collator else rows
        common: dict[str, Any] = {
            "batch_size": args.per_device_train_batch_size,
            "collate_fn": self._collate(),
            "drop_last": args.dataloader_drop_last,
        }
        packs = packs_of(rows, "train_dataset", args.max_length, args.packing_strategy) if args.packing else None
        if packs is None and not hasattr(rows, "__len__"):
            return torch.utils.data.DataLoader(rows, **common)
        if packs is not None:
            rows, common["collate_fn"] = packs, RowsOfPacks(common["collate_fn"])
        given = (rows,) if accepts(self._get_train_sampler, rows) else ()  # overrides for version 4.46 take nothing
        return torch.utils.data.DataLoader(rows, sampler=self._get_train_sampler(*given), **common)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of rows in each epoch: that of the C++ loop, which is transformers'. train_dataset: rows or packs."""
        args, rows = self.args, train_dataset if train_dataset is not None else self.train_dataset
        if not hasattr(rows, "__len__"):
            return None
        strategy = "group_by_length" if args.group_by_length else args.train_sampling_strategy
        lengths = row_lengths(rows, args.length_column_name) if strategy == "group_by_length" else []
        seed = args.data_seed if args.data_seed is not None else args.seed
        group = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return EpochSampler(len(rows), strategy, seed, group, lengths)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of a step, fewer where an epoch ends, and what its summed loss is divided by."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> int | torch.Tensor | None:
        return count_targets(batch_samples, self.args.count_position_zero)
