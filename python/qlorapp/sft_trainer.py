# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer: supervised fine-tuning under TRL's names. Rows are read here, the loop is Trainer's."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from .auto_model import AutoModelForCausalLM
from .batches import is_stream
from .modeling import CausalLM
from .notebook import SampleCallback
from .peft import get_peft_model
from .peft_config import differing_options
from .random import set_seed
from .sft_config import SFTConfig
from .sft_data import RowEncoder, sample_parts
from .trainer import Trainer
from .trainer_overrides import NEVER_CALLED_BY_SFT
from .training_arguments import TrainingArguments

_log = logging.getLogger("qlorapp")


class SFTTrainer(Trainer):
    """Trains adapters on text, prompts and completions, conversations or tokens: TRL's SFTTrainer.

    `model` is a model or its name. With `peft_config` it gets adapters. Without `processing_class` the tokenizer is the model's.
    Options of older releases (`tokenizer`, `max_seq_length`, `dataset_text_field`, `packing` …) may be given here as well.
    """

    _never_called = NEVER_CALLED_BY_SFT
    _labels_are_kept = (
        "[SFTTrainer] DataCollatorForLanguageModeling: the labels that were made of the rows are kept, with what they mask (-100). The "
        "collator would replace them by input_ids, and learn the prompts as well: completion_only_loss=False is for that, and "
        "assistant_only_loss=False. Leave the collator out for this."
    )

    def __init__(
        self,
        model: Any = None,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        *,
        tokenizer: Any = None,
        model_init: Callable[[], Any] | None = None,
        infinite: bool = False,
        **options: Any,
    ) -> None:
        if infinite:
            _log.warning("[SFTTrainer] infinite has no effect: max_steps goes over the data as often as it takes.")
        if model is None and model_init is not None:
            model = model_init()
        if train_dataset is None:
            raise ValueError("[SFTTrainer] train_dataset is required.")
        if type(data_collator).__name__ == "DataCollatorForCompletionOnlyLM":
            raise ValueError(
                "[SFTTrainer] a completion-only collator is not supported. Give rows of 'prompt' and 'completion', or conversations "
                "and SFTConfig(assistant_only_loss=True)."
            )
        config = _config_of(args, model, options)
        set_seed(config.seed)  # of the adapters' random values
        model = _model_of(model, config, quantization_config)
        if peft_config is not None:
            if getattr(model, "peft_config", None):
                _check_same_adapter(model, peft_config)
            else:
                model = get_peft_model(model, peft_config)
        elif isinstance(model, CausalLM) and not model.core.has_adapters:
            raise ValueError(
                "[SFTTrainer] there is nothing to train: the base is frozen. Give peft_config=LoraConfig(…), or a PeftModel."
            )
        lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        processing_class = _tokenizer_of(tokenizer if processing_class is None else processing_class, lm, config)

        rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        self._encoder: RowEncoder | None = None
        self._formatting_func = formatting_func
        if config.skip_prepare_dataset:
            _check_prepared(rows)
        else:
            first: Any = next(iter(train_dataset), {})
            completion_only = _completion_only(config, first, formatting_func)
            self._encoder = RowEncoder(processing_class, config, completion_only, _stop_ids(processing_class, lm))
            evaluation_is_packed = config.packing if config.eval_packing is None else config.eval_packing
            rows["train_dataset"] = self._prepared(train_dataset, "train_dataset", config.packing)
            if isinstance(eval_dataset, dict):
                rows["eval_dataset"] = {
                    key: self._prepared(part, f"eval_dataset[{key!r}]", evaluation_is_packed)
                    for key, part in eval_dataset.items()
                }
            elif eval_dataset is not None:
                rows["eval_dataset"] = self._prepared(eval_dataset, "eval_dataset", evaluation_is_packed)

        shown = []
        if self._encoder is not None and not config.disable_tqdm:
            shown = [SampleCallback(sample_parts(rows["train_dataset"][0], processing_class))]
        self._half = {"bf16": lm.dtype == torch.bfloat16, "fp16": lm.dtype == torch.float16}
        loop_arguments = config.training_arguments(**self._half)
        super().__init__(
            model=model,
            args=loop_arguments,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[*shown, *(callbacks or [])],
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **rows,
            **({"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs} if optimizer_cls_and_kwargs is not None else {}),
        )
        self.args = config
        self._made_with = self._core_arguments()

    def _core_arguments(self) -> str:
        args = self.args.training_arguments(**self._half) if isinstance(self.args, SFTConfig) else self.args
        return self._told(args)

    def _makes_labels(self) -> bool:
        """Rows of predict() are learnt from as those of training are, by TRL's own collator."""
        return True

    def _prepared(self, dataset: Any, name: str, packed: bool, keep_all: bool = False) -> Any:
        assert self._encoder is not None
        return _as_given(dataset, self._encoder.prepare(dataset, name, packed, self._formatting_func, keep_all))

    def _rows_given(self, dataset: Any, name: str, keep_all: bool) -> Any:
        """Rows of any kind, read as those of the constructor are. Its own, and a stream of tokens, as they are."""
        known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        is_known = any(dataset is one for one in (self.train_dataset, *known.values()))
        if self._encoder is None or is_known or is_stream(dataset):
            return dataset
        return self._prepared(dataset, name, packed=False, keep_all=keep_all)

    def sample(self) -> list[tuple[str, bool]] | None:
        """The first training row as text in runs: [(text, whether it is trained)]. None without a tokenizer's rows."""
        if self._encoder is None:
            return None
        return sample_parts(self.train_dataset[0], self._encoder.tokenizer)


def _as_given(dataset: Any, rows: list[Any]) -> Any:
    """A datasets.Dataset where one came in: scripts go on with its map, select and column_names."""
    kind = type(dataset)
    return kind.from_list(rows) if kind.__module__.partition(".")[0] == "datasets" else rows


def _check_same_adapter(model: Any, peft_config: Any) -> None:
    """@raises ValueError where the model's adapter is not of this config; where it is, says that it is trained on."""
    active = model.active_adapter if hasattr(model, "get_base_model") else model.active_adapters()
    name = active if isinstance(active, str) else active[0]
    if differ := differing_options(peft_config, model.peft_config[name]):
        raise ValueError(
            f"[SFTTrainer] the model has adapters already, and those of {name!r} differ from peft_config in {', '.join(differ)}. Leave "
            "peft_config out to go on training them."
        )
    _log.info("[SFTTrainer] the model has the adapters of peft_config already: %r is trained on.", name)


def _config_of(args: Any, model: Any, options: dict[str, Any]) -> SFTConfig:
    if args is None:
        name = str(model) if isinstance(model, (str, os.PathLike)) else getattr(model, "name_or_path", "model")
        args = SFTConfig(f"{pathlib.PurePath(name).name}-SFT")
    elif not isinstance(args, SFTConfig):
        if not isinstance(args, TrainingArguments):
            raise TypeError(f"[SFTTrainer] args must be a qlorapp.SFTConfig; got {type(args).__name__}.")
        args = SFTConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    given = SFTConfig.modern_names(options, "SFTTrainer")
    if given:
        _log.info("[SFTTrainer] %s: give these to SFTConfig.", ", ".join(given))
    config: SFTConfig = dataclasses.replace(args, **given) if given else args
    return config


def _model_of(model: Any, config: SFTConfig, quantization_config: Any) -> Any:
    options = dict(config.model_init_kwargs or {})
    if not isinstance(model, (str, os.PathLike)):
        for name, value in (("model_init_kwargs", options), ("quantization_config", quantization_config)):
            if value:
                _log.warning("[SFTTrainer] %s has no effect: the model is loaded already.", name)
        return model
    if quantization_config is not None:
        if "quantization_config" in options:
            raise ValueError(
                "[SFTTrainer] quantization_config is given twice, here and in model_init_kwargs. Give one of them."
            )
        options["quantization_config"] = quantization_config
    return AutoModelForCausalLM.from_pretrained(model, **options)


def _tokenizer_of(tokenizer: Any, lm: Any, config: SFTConfig) -> Any:
    if tokenizer is None and config.skip_prepare_dataset:
        return None
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(lm.name_or_path)
    vocabulary = tokenizer.get_vocab()
    for name in ("eos_token", "pad_token"):
        token = getattr(config, name)
        if token is not None and token not in vocabulary:
            raise ValueError(f"[SFTConfig] {name} must be a token of the tokenizer; it has no {token!r}.")
    if config.eos_token is not None:
        tokenizer.eos_token = config.eos_token
        known = lm.generation_config.eos_token_id
        known = _eos_ids(lm) if known is None else [known] if isinstance(known, int) else known
        lm.generation_config.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *known]))
    if config.pad_token is not None or tokenizer.pad_token is None:
        tokenizer.pad_token = config.pad_token or tokenizer.eos_token
    if lm.generation_config.pad_token_id is None:
        lm.generation_config.pad_token_id = tokenizer.pad_token_id
    if config.chat_template_path is not None:
        tokenizer.chat_template = _template_of(pathlib.Path(config.chat_template_path))
    return tokenizer


def _template_of(path: pathlib.Path) -> str:
    file = path / "chat_template.jinja" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"[SFTConfig] chat_template_path must be a .jinja file, or a folder that holds chat_template.jinja; got {path}."
        )
    return file.read_text(encoding="utf-8")


def _completion_only(config: SFTConfig, first: Any, formatting_func: Any) -> bool:
    pairs = "prompt" in first and "completion" in first
    only = pairs if config.completion_only_loss is None else config.completion_only_loss
    if only and formatting_func is not None:
        raise ValueError(
            "[SFTTrainer] formatting_func makes one text of a row, so completion_only_loss has no completion to find. "
            "Set completion_only_loss=False, or leave formatting_func out."
        )
    if only and not pairs and "completion_mask" not in first and "labels" not in first:
        raise ValueError(
            "[SFTConfig] completion_only_loss needs rows of 'prompt' and 'completion'. For conversations give assistant_only_loss=True."
        )
    return only


def _check_prepared(rows: dict[str, Any]) -> None:
    """TRL's rule: masks without labels would train on everything."""
    evaluated = rows["eval_dataset"]
    parts = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
    for name, dataset in {"train_dataset": rows["train_dataset"], **parts}.items():
        for row in dataset or ():
            if row.get("labels") is None and ("completion_mask" in row or "assistant_masks" in row):
                raise ValueError(
                    f"[SFTTrainer] {name} has masks but no labels, and skip_prepare_dataset leaves rows as they are. "
                    "Add 'labels', or leave skip_prepare_dataset out."
                )
            break


def _eos_ids(lm: Any) -> list[int]:
    """What config.json says."""
    if isinstance(lm, CausalLM):
        return list(lm.core.eos_token_ids)
    eos = getattr(lm.config, "eos_token_id", None)
    return [eos] if isinstance(eos, int) else list(eos or ())


def _stop_ids(tokenizer: Any, lm: Any) -> set[int]:
    """Tokens that end a generation."""
    eos = lm.generation_config.eos_token_id
    ids = set(_eos_ids(lm)) | ({eos} if isinstance(eos, int) else set(eos or ()))
    return ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
