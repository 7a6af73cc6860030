# SPDX-License-Identifier: Apache-2.0
"""SFTConfig: TrainingArguments and what TRL's SFTConfig has beyond them, under its names and with its defaults.

Python alone has this config, so its table is here, in the rows that the tables of C++ have; what it shares with TrainingArguments
comes from theirs, and they check it.
"""

import json
from typing import TYPE_CHECKING, Any

from . import _C
from .field_table import Row, apply_field_status, dataclass_of_table
from .training_arguments import TrainingArguments, TrainingTable, check_values

_USED, _SAID, _REFUSED = "used", "accepted_and_said", "refused"
_PADDING = "rows are laid end to end, there is no padding."
#: TrainingArguments' options that have another default here: {name: (type, default as JSON)}.
_OTHER_DEFAULTS = {
    "learning_rate": ("float", "2e-05"),
    "logging_steps": ("float", "10"),
    "gradient_checkpointing": ("bool", "true"),
    "bf16": ("bool | None", "null"),
    "max_length": ("int | None", "1024"),
}
#: What is said beside them.
_ADDED_DOC = {
    "bf16": "unset: what the model was loaded in decides",
    "max_length": "packs are filled up to it; unset: rows are not cut",
}
#: What TRL has beyond TrainingArguments; names of older releases too.
_ADDED: list[Row] = [
    ("model_init_kwargs", "dict | str | None", "null", "options of from_pretrained, where the model is given by name", _USED, ""),
    ("chat_template_path", "str | None", "null", "a .jinja file, or a model folder, whose chat template replaces the tokenizer's",
     _USED, ""),
    ("trust_remote_code", "bool", "false", "", _REFUSED, "code of a checkpoint is never run. Leave it out."),
    ("router_aux_loss_coef", "float | None", "null", "", _SAID, "no family here is a mixture of experts."),
    ("dataset_text_field", "str", '"text"', "the column that holds the text", _USED, ""),
    ("dataset_kwargs", "dict | str | None", "null", '{"skip_prepare_dataset": true}: rows have input_ids (and labels) already',
     _USED, ""),
    ("dataset_num_proc", "int | None", "null", "", _SAID,
     "rows are tokenized by one process; the tokenizer has threads of its own."),
    ("dataset_batch_size", "int | None", "null", "", _SAID, "rows are tokenized one by one."),
    ("num_of_sequences", "int | None", "null", "", _SAID, "packs are filled from all rows."),
    ("chars_per_token", "float | None", "null", "", _SAID, "packs are filled by tokens."),
    ("eos_token", "str | None", "null", "ends texts and completions; unset: the tokenizer's", _USED, ""),
    ("pad_token", "str | None", "null", "the tokenizer's from now on; training needs none", _USED, ""),
    ("truncation_mode", "str", '"keep_start"', "which end of a long row is kept: keep_start or keep_end", _USED, ""),
    ("shuffle_dataset", "bool", "false", "shuffle the rows before they are packed", _USED, ""),
    ("padding_free", "bool", "false", "", _SAID, _PADDING),
    ("pad_to_multiple_of", "int | str | None", '"auto"', "", _SAID, _PADDING),
    ("assistant_only_loss", "bool", "false", "train on the assistant's turns only, their end-of-turn token included", _USED, ""),
    ("loss_type", "str", '"nll"', "nll, which is computed in chunks (chunked_nll is the same)", _USED, ""),
    ("activation_offloading", "bool", "false", "with gradient_checkpointing: inputs of blocks wait in pinned host memory", _USED, ""),
]  # fmt: skip
#: Values of packing_strategy, and keys of dataset_kwargs, of older releases of TRL.
_OLD_STRATEGIES = {"ffd": "bfd", "bfd-requeue": "bfd_split"}
_OLD_DATASET_KWARGS = {"add_special_tokens", "append_concat_token"}


def fields() -> list[Row]:
    """What differs from TrainingArguments' table, in its rows: other defaults first, then what TRL adds."""
    shared = {row[0]: row for row in _C.training_arguments_fields()}
    changed = []
    for name, (kind, default) in _OTHER_DEFAULTS.items():
        _, _, _, doc, status, reason = shared[name]
        doc = f"{doc}; {_ADDED_DOC[name]}" if name in _ADDED_DOC else doc
        changed.append((name, kind, default, doc, status, reason))
    return changed + _ADDED


def aliases() -> dict[str, tuple[str, bool]]:
    """Other spellings beside TrainingArguments': {spelling: (name, whether it is an older one)}."""
    return {"use_liger": ("use_liger_kernel", True)}


def loop_options(options: dict[str, Any], bf16: bool = False, fp16: bool = False) -> dict[str, Any]:
    """TrainingArguments' part of SFTConfig's options. bf16, fp16: the model's precision, where the options leave it open."""
    added = {row[0] for row in _ADDED}
    values = {name: value for name, value in options.items() if name not in added}
    if options["bf16"] is None:
        values["bf16"] = bf16 and not options["fp16"]
        values["fp16"] = options["fp16"] or fp16
    if options["max_length"] is None:
        values["max_length"] = 1 << 30
    if options["activation_offloading"]:
        values["checkpoint_keep"] = ["input_on_host"]
    values["log_num_tokens"] = True
    return values


class SFTTable(TrainingTable):
    """What SFTConfig has beside its fields."""

    def _settle(self) -> None:
        fields: Any = self  # which there are is the table's to say
        super()._settle()
        for name in ("model_init_kwargs", "dataset_kwargs"):
            if isinstance(value := getattr(fields, name), str):
                setattr(fields, name, json.loads(value))
        apply_field_status("SFTConfig", self, _ADDED)
        _one_of("truncation_mode", fields.truncation_mode, ("keep_start", "keep_end"))
        if fields.loss_type == "dft":
            raise ValueError(
                "[SFTConfig] loss_type='dft' is not supported: the loss is computed inside one operator. Use 'nll'."
            )
        _one_of("loss_type", fields.loss_type, ("nll", "chunked_nll"))
        if fields.packing_strategy in _OLD_STRATEGIES:
            newer = _OLD_STRATEGIES[fields.packing_strategy]
            _C.log_warning_once(f"[SFTConfig] packing_strategy={fields.packing_strategy!r} is called {newer!r} now.")
            fields.packing_strategy = newer
        if unknown := set(fields.dataset_kwargs or {}) - {"skip_prepare_dataset", *_OLD_DATASET_KWARGS}:
            raise ValueError(f"[SFTConfig] dataset_kwargs knows skip_prepare_dataset; got {sorted(unknown)}.")
        for name in _OLD_DATASET_KWARGS & set(fields.dataset_kwargs or {}):
            _C.log_warning_once(f"[SFTConfig] dataset_kwargs[{name!r}] has no effect: special tokens follow the chat template.")
        if fields.max_length is None and (fields.packing or fields.eval_packing):
            raise ValueError("[SFTConfig] packing needs a max_length to fill; got None. Set it.")
        if fields.activation_offloading and not fields.gradient_checkpointing:
            raise ValueError(
                "[SFTConfig] activation_offloading needs gradient_checkpointing=True: what waits on the host is its inputs."
            )

    def training_arguments(self: Any, bf16: bool = False, fp16: bool = False) -> TrainingArguments:
        """The part that the training loop is given, checked. bf16, fp16: the model's precision, where the config leaves it open."""
        options = {name: getattr(self, name) for name in self.field_status}
        return TrainingArguments(**loop_options(options, bf16, fp16))

    @property
    def skip_prepare_dataset(self: Any) -> bool:
        """Are rows left as they are, because they have input_ids already?"""
        return bool((self.dataset_kwargs or {}).get("skip_prepare_dataset", False))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"[SFTConfig] {name} must be one of {list(known)}; got {value!r}.{_C.did_you_mean(value, list(known))}"
        )


_own = {row[0]: row for row in fields()}
if TYPE_CHECKING:
    from ._config_types import SFTConfig as SFTConfig
else:
    SFTConfig = dataclass_of_table(
        "SFTConfig",
        """What a supervised fine-tuning run is told: TRL's names, defaults and meanings. TrainingArguments' options are all here too.

        Every option is used, or said to have no effect, or refused with a reason; docs/configuration.md lists them all.
        """,
        [_own.get(row[0], row) for row in _C.training_arguments_fields()] + _ADDED,
        _C.training_arguments_aliases() | aliases(),
        lambda options: check_values(json.dumps(loop_options(json.loads(options)))),
        bases=(SFTTable, TrainingArguments),
        none_is_default=("output_dir", "report_to", "gradient_checkpointing", "eval_strategy", "debug", "dataset_text_field"),
    )
