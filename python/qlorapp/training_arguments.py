# SPDX-License-Identifier: Apache-2.0
"""TrainingArguments: transformers' names, from the field table of the C++ side (include/qlorapp/train/training_arguments.hpp)."""

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from . import _C
from .argument_groups import ArgumentGroups
from .field_table import Table, dataclass_of_table, plain
from .process_state import ProcessState, parallel_mode


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: {an optimizer that transformers took away or never had under this name: the one that it was}
_SAME_OPTIMIZER = {"adamw_hf": "adamw_torch", "paged_adamw": "paged_adamw_32bit"}
#: What does what a name from a list does not, by the beginning of the message that refuses it.
_WAYS_OUT = {
    "[TrainingArguments] optim must be one of": "For another optimizer leave it out and give Trainer(optimizers=(torch.optim.SGD(parameters, lr=…), "
    "None)), or any other of torch's.",
    "[TrainingArguments] lr_scheduler_type must be one of": "For another schedule leave it out and give Trainer(optimizers=(optimizer, scheduler)), "
    "with a scheduler of torch's whose step() takes no metrics.",
}


def check_values(values: str) -> None:
    """Validates the JSON of an object.  @raises ValueError, for names from a list with the way to what is not in it."""
    try:
        _C.check_training_arguments(values)
    except ValueError as error:
        way_out = next((text for begin, text in _WAYS_OUT.items() if str(error).startswith(begin)), None)
        if way_out is None:
            raise
        raise ValueError(f"{error} {way_out}") from None


class TrainingTable(ArgumentGroups, Table):
    """What TrainingArguments and its kin have beside their fields: what transformers derives from them."""

    gone: ClassVar[dict[str, tuple[str, str]]] = {
        "sharded_ddp": (
            "refused",
            "training runs in one process. Leave it out; four bits and paged optimizers save the memory.",
        ),
        "xpu_backend": ("accepted_and_said", "training runs in one process."),
    }

    def _settle(self) -> None:
        """The values that transformers fills in, so that scripts and callbacks read what they expect."""
        fields: Any = self  # which there are is the table's to say
        fields.output_dir = os.path.expanduser(os.fspath(fields.output_dir))
        for field in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "fsdp_config", "accelerator_config"):
            if isinstance(value := getattr(fields, field), str) and value.startswith("{"):
                setattr(fields, field, json.loads(value))
        self._settle_what_is_off()
        fields.do_eval = fields.do_eval or fields.eval_strategy not in ("no", "NO")
        if plain(fields.eval_strategy) == "steps" and not fields.eval_steps:
            fields.eval_steps = fields.logging_steps
        if isinstance(fields.report_to, str):
            fields.report_to = [fields.report_to]
        for field in ("lr_scheduler_type", "optim", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy"):
            setattr(fields, field, plain(getattr(fields, field)))
        if (same := _SAME_OPTIMIZER.get(fields.optim)) is not None:
            _C.log_warning_once(f"[TrainingArguments] optim={fields.optim!r} is run as {same!r}, which is the same rule.")
            fields.optim = same
        if fields.metric_for_best_model is None and fields.load_best_model_at_end:
            fields.metric_for_best_model = "loss"
        if fields.greater_is_better is None and fields.metric_for_best_model is not None:
            fields.greater_is_better = not str(fields.metric_for_best_model).endswith("loss")

    def _settle_what_is_off(self) -> None:
        """transformers' ways to say that an option is not used, as the one that the loop knows."""
        fields: Any = self
        if fields.max_grad_norm is None:
            fields.max_grad_norm = 0.0
        if isinstance(fields.resume_from_checkpoint, bool):
            fields.resume_from_checkpoint = "true" if fields.resume_from_checkpoint else None
        if fields.max_steps is None or (_is_number(fields.max_steps) and fields.max_steps <= 0):
            if fields.max_steps not in (None, -1):
                _C.log_warning_once(
                    f"[TrainingArguments] max_steps={fields.max_steps} is as good as none: num_train_epochs says how long a run is."
                )
            fields.max_steps = -1
        if fields.num_train_epochs is None or (_is_number(fields.num_train_epochs) and fields.num_train_epochs <= 0):
            if not (_is_number(fields.max_steps) and fields.max_steps > 0):
                raise ValueError(
                    f"[TrainingArguments] num_train_epochs must be > 0 unless max_steps is set; got {fields.num_train_epochs}. To evaluate alone, "
                    "leave it out and do not call train()."
                )
            fields.num_train_epochs = float(self._default_of("num_train_epochs"))  # which max_steps goes before

    def _default_of(self: Any, name: str) -> Any:
        return next(json.loads(row[2]) for row in self.field_rows if row[0] == name)

    @property
    def device(self: Any) -> torch.device:
        """Where a model goes that device_map="auto" places."""
        return torch.device("cpu" if self.use_cpu or not torch.cuda.is_available() else "cuda:0")

    @property
    def train_batch_size(self: Any) -> int:
        return int(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self: Any) -> int:
        return int(self.per_device_eval_batch_size)

    @property
    def n_gpu(self) -> int:
        return 0 if self.device.type == "cpu" else 1

    @property
    def world_size(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    local_process_index = process_index

    @property
    def should_log(self) -> bool:
        return True

    should_save = should_log

    @property
    def parallel_mode(self) -> Any:
        """ParallelMode.NOT_PARALLEL: one process, one device."""
        return parallel_mode()

    @property
    def distributed_state(self) -> ProcessState:
        """Where this process stands among the others, which there are none of."""
        return ProcessState(self.device)

    @property
    def place_model_on_device(self) -> bool:
        """False: a model stays where from_pretrained put it."""
        return False

    @property
    def ddp_timeout_delta(self: Any) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.ddp_timeout)

    @property
    def default_optim(self: Any) -> str:
        """What `optim` is unless it is given."""
        return str(self._default_of("optim"))

    @property
    def framework(self) -> str:
        """PyTorch, as version 4 spelled it."""
        return "pt"

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs the block: this is the main process, and nobody waits for it."""
        yield

    def get_process_log_level(self: Any) -> int:
        """log_level as the number of Python's logging; "passive": what this library's logger has."""
        if self.log_level == "passive":
            return logging.getLogger("qlorapp").getEffectiveLevel()
        return int(getattr(logging, self.log_level.upper()))

    def get_warmup_steps(self: Any, num_training_steps: int) -> int:
        return _C.warmup_steps(self.warmup_steps, self.warmup_ratio, num_training_steps)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """to_dict() with what is no number, string or bool as text."""
        return {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in self.to_dict().items()
        }


if TYPE_CHECKING:
    from ._config_types import TrainingArguments as TrainingArguments
else:
    TrainingArguments = dataclass_of_table(
        "TrainingArguments",
        """What a run is told: transformers' names, meanings and defaults, those of version 4 and of version 5.

        Every option is used, or said to have no effect, or refused with a reason; docs/configuration.md lists them all.
        """,
        _C.training_arguments_fields(),
        _C.training_arguments_aliases(),
        check_values,
        bases=(TrainingTable,),
        none_is_default=("output_dir", "report_to", "gradient_checkpointing", "eval_strategy", "debug"),
    )
