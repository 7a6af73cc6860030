# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF009
"""SFTConfig: TrainingArguments and what TRL's SFTConfig has beyond them, under its names and with its defaults.

A field is used unless it stands in SAID (a value other than the default changes nothing here, and one line of the log says why) or in
REFUSED (it is an error that says what to do instead).
"""

import dataclasses
import functools
import logging
from typing import Any

from . import _C
from .configs import TrainingArguments

_log = logging.getLogger("qlorapp")

_PADDING = "rows are laid end to end, there is no padding."
#: Options that change nothing, those of older releases included.
SAID = {
    "router_aux_loss_coef": "no family here is a mixture of experts.",
    "dataset_num_proc": "rows are tokenized by one process; the tokenizer has threads of its own.",
    "padding_free": _PADDING,
    "pad_to_multiple_of": _PADDING,
    "dataset_batch_size": "rows are tokenized one by one.",
    "num_of_sequences": "packs are filled from all rows.",
    "chars_per_token": "packs are filled by tokens.",
}
REFUSED = {
    "trust_remote_code": "code of a checkpoint is never run. Leave it out.",
    "neftune_noise_alpha": "noise on the embeddings is not built. Leave it out.",
}


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class SFTConfig(TrainingArguments):
    """What a supervised fine-tuning run is told: TRL's names, defaults and meanings. TrainingArguments' options are all here too."""

    learning_rate: float = _field(2e-5, "after warm-up")
    logging_steps: float = _field(10, "steps between log entries; below 1: a share of all steps")
    gradient_checkpointing: bool = _field(True, "recompute blocks in the backward pass to save memory")
    bf16: bool | None = _field(None, "compute in bfloat16; unset: what the model was loaded in decides")
    max_length: int | None = _field(1024, "rows are cut to this many tokens, packs filled up to it; None: rows are not cut")

    model_init_kwargs: dict[str, Any] | None = _field(None, "options of from_pretrained, where the model is given by name")
    chat_template_path: str | None = _field(
        None, "a .jinja file, or a model folder, whose chat template replaces the tokenizer's"
    )
    trust_remote_code: bool = _field(False, "refused: code of a checkpoint is never run")
    router_aux_loss_coef: float | None = _field(None, "no effect: no family here is a mixture of experts")

    dataset_text_field: str = _field("text", "the column that holds the text")
    dataset_kwargs: dict[str, Any] | None = _field(
        None, '{"skip_prepare_dataset": True}: rows have input_ids (and labels) already'
    )
    dataset_num_proc: int | None = _field(None, "no effect: rows are tokenized by one process")
    eos_token: str | None = _field(None, "ends texts and completions; unset: the tokenizer's")
    pad_token: str | None = _field(None, "the tokenizer's from now on; training needs none")
    truncation_mode: str = _field("keep_start", "which end of a long row is kept: keep_start or keep_end")
    shuffle_dataset: bool = _field(False, "shuffle the rows before they are packed")
    padding_free: bool = _field(False, "no effect: there is no padding")
    pad_to_multiple_of: int | str | None = _field("auto", "no effect: there is no padding")

    completion_only_loss: bool | None = _field(None, "train on completions only; unset: where rows have prompt and completion")
    assistant_only_loss: bool = _field(False, "train on the assistant's turns only, their end-of-turn token included")
    loss_type: str = _field("nll", "nll, which is computed in chunks (chunked_nll is the same)")
    activation_offloading: bool = _field(False, "with gradient_checkpointing: inputs of blocks wait in pinned host memory")

    def __post_init__(self) -> None:
        self._say_and_refuse()
        _one_of("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        if self.loss_type == "dft":
            raise ValueError(
                "[SFTConfig] loss_type='dft' is not supported: the loss is computed inside one operator. Use 'nll'."
            )
        _one_of("loss_type", self.loss_type, ("nll", "chunked_nll"))
        if self.packing_strategy in _OLD_STRATEGIES:
            _say_once(f"packing_strategy={self.packing_strategy!r} is called {_OLD_STRATEGIES[self.packing_strategy]!r} now.")
            self.packing_strategy = _OLD_STRATEGIES[self.packing_strategy]
        if unknown := set(self.dataset_kwargs or {}) - {"skip_prepare_dataset", *_OLD_DATASET_KWARGS}:
            raise ValueError(f"[SFTConfig] dataset_kwargs knows skip_prepare_dataset; got {sorted(unknown)}.")
        for name in _OLD_DATASET_KWARGS & set(self.dataset_kwargs or {}):
            _say_once(f"dataset_kwargs[{name!r}] has no effect: special tokens follow the chat template.")
        if self.max_length is None and (self.packing or self.eval_packing):
            raise ValueError("[SFTConfig] packing needs a max_length to fill; got None. Set it.")
        if self.activation_offloading and not self.gradient_checkpointing:
            raise ValueError(
                "[SFTConfig] activation_offloading needs gradient_checkpointing=True: what waits on the host is its inputs."
            )
        self.training_arguments()

    def _say_and_refuse(self) -> None:
        own = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
        changed = [name for name in own if name in SAID or name in REFUSED if getattr(self, name) not in (own[name], None)]
        for name in changed:
            if name in REFUSED:
                raise ValueError(f"[SFTConfig] {name} is not supported: {REFUSED[name]}")
            _say_once(f"{name} has no effect: {SAID[name]}")

    def training_arguments(self, bf16: bool = False, fp16: bool = False) -> TrainingArguments:
        """The part that the training loop is given, checked. bf16, fp16: the model's precision, where the config leaves it open."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainingArguments)}
        if self.bf16 is None:
            values["bf16"] = bf16 and not self.fp16
            values["fp16"] = self.fp16 or fp16
        if self.max_length is None:
            values["max_length"] = 1 << 30
        if self.activation_offloading:
            values["checkpoint_keep"] = "input_on_host"
        values["log_num_tokens"] = True
        return TrainingArguments(**values)

    @property
    def skip_prepare_dataset(self) -> bool:
        return bool((self.dataset_kwargs or {}).get("skip_prepare_dataset", False))


#: Spellings of older releases of TRL.
_OLD_STRATEGIES = {"ffd": "bfd", "bfd-requeue": "bfd_split"}
_OLD_DATASET_KWARGS = {"add_special_tokens", "append_concat_token"}
OLD_NAMES = {"max_seq_length": "max_length", "use_liger": "use_liger_kernel"}
_said_already: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said_already:
        _said_already.add(line)
        _log.warning("[SFTConfig] %s", line)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"[SFTConfig] {name} must be one of {list(known)}; got {value!r}.{_C.did_you_mean(value, list(known))}"
        )


def modern_names(options: dict[str, Any], where: str = "SFTConfig") -> dict[str, Any]:
    """Options under today's names. What has no effect any more is said, what is not built refused, a misspelling named."""
    known = [field.name for field in dataclasses.fields(SFTConfig)]
    aliases = {**{alias: name for alias, (name, _) in _C.training_arguments_aliases().items()}, **OLD_NAMES}
    given: dict[str, Any] = {}
    for key, value in options.items():
        name = key if key in known else aliases.get(key, key)
        if name not in known and name in SAID:
            _say_once(f"{name} has no effect: {SAID[name]}")
            continue
        if name not in known and name in REFUSED:
            if value is not None:
                raise ValueError(f"[{where}] {name} is not supported: {REFUSED[name]}")
            continue
        if name not in known:
            raise TypeError(f"[{where}] unknown option {key!r}.{_C.did_you_mean(key, [*known, *aliases])}")
        if name in given:
            raise TypeError(f"[{where}] {key!r} and {name!r} are the same option. Give one of them.")
        given[name] = value
    return given


_plain_init = SFTConfig.__init__


@functools.wraps(_plain_init)
def _init(self: SFTConfig, output_dir: str = "trainer_output", *args: Any, **options: Any) -> None:
    _plain_init(self, output_dir, *args, **modern_names(options))


SFTConfig.__init__ = _init  # type: ignore[method-assign]
SFTConfig.__module__ = "qlorapp"
