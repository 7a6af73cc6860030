# SPDX-License-Identifier: Apache-2.0
"""Seq2SeqTrainer and its arguments, which scripts for causal language models (QLoRA's own among them) use as Trainer.

Evaluation by generate() is what transformers' classes of these names add; it is refused.
"""

from typing import Any

from . import _C
from .field_table import Row, apply_field_status, dataclass_of_table
from .trainer import Trainer
from .training_arguments import TrainingArguments, TrainingTable, check_values

_WITHOUT = "it is read by predict_with_generate alone."
_ADDED: list[Row] = [
    ("sortish_sampler", "bool", "false", "", "accepted_and_said", "group_by_length brings rows of like length together."),
    ("predict_with_generate", "bool", "false", "", "refused",
     "evaluation is by loss and logits. Leave it out, and call model.generate in a TrainerCallback's on_evaluate."),
    ("generation_max_length", "int | None", "null", "", "accepted_and_said", _WITHOUT),
    ("generation_num_beams", "int | None", "null", "", "accepted_and_said", _WITHOUT),
    ("generation_config", "str | None", "null", "", "accepted_and_said", _WITHOUT),
]  # fmt: skip
_ADDED_NAMES = {row[0] for row in _ADDED}


class _Table(TrainingTable):
    def _settle(self) -> None:
        super()._settle()
        apply_field_status("Seq2SeqTrainingArguments", self, _ADDED)

    def to_dict(self) -> dict[str, Any]:
        """TrainingArguments' part, which is all that a run is told."""
        return {name: value for name, value in super().to_dict().items() if name not in _ADDED_NAMES}


Seq2SeqTrainingArguments: Any = dataclass_of_table(
    "Seq2SeqTrainingArguments",
    "TrainingArguments with transformers' options of generating while evaluating, of which none is taken.",
    [*_C.training_arguments_fields(), *_ADDED],
    _C.training_arguments_aliases(),
    check_values,
    bases=(_Table, TrainingArguments),
    none_is_default=("output_dir", "report_to", "gradient_checkpointing", "eval_strategy", "debug"),
)


class Seq2SeqTrainer(Trainer):
    """Trainer, as transformers' class is without predict_with_generate."""
