# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import beside the main road: transformers' own, imported when they are first asked for, and those that are not here.

`from qlorapp import X` finds them through the package's __getattr__; `import qlorapp` alone imports nothing of them.
"""

import sys
from collections.abc import Iterable
from typing import Any

#: What transformers has and works with this library's models and trainers as it is.
FROM_TRANSFORMERS = frozenset({
    "AutoConfig", "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorWithPadding", "IntervalStrategy",
    "PreTrainedTokenizer", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "SchedulerType", "StoppingCriteria",
    "StoppingCriteriaList", "TextIteratorStreamer", "TextStreamer", "default_data_collator", "get_constant_schedule",
    "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup", "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup", "get_inverse_sqrt_schedule", "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup", "get_scheduler", "get_wsd_schedule", "logging", "pipeline",
})  # fmt: skip

_OTHER_TASK = "models here are causal language models. Use AutoModelForCausalLM, or transformers for this task."
_OTHER_METHOD = "training here is supervised: use SFTTrainer, or TRL itself with transformers' model for this method."
_OTHER_ADAPTER = "adapters here are LoRA: use LoraConfig, or PEFT itself with transformers' model."
#: What is not here, and what to do instead.
NOT_HERE = {
    **dict.fromkeys(
        ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM", "AutoModelForTokenClassification",
         "AutoModelForQuestionAnswering", "AutoModelForMaskedLM", "AutoModelForVision2Seq", "AutoModelForImageTextToText",
         "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLMWithValueHead", "AutoPeftModelForSeq2SeqLM",
         "AutoPeftModelForSequenceClassification"),
        _OTHER_TASK,
    ),
    **dict.fromkeys(
        ("DPOTrainer", "DPOConfig", "ORPOTrainer", "ORPOConfig", "KTOTrainer", "KTOConfig", "CPOTrainer", "CPOConfig", "PPOTrainer",
         "PPOConfig", "GRPOTrainer", "GRPOConfig", "RLOOTrainer", "RLOOConfig", "RewardTrainer", "RewardConfig"),
        _OTHER_METHOD,
    ),
    **dict.fromkeys(
        ("PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig", "IA3Config", "AdaLoraConfig", "LoHaConfig", "LoKrConfig",
         "OFTConfig", "VeraConfig", "AdaptionPromptConfig"),
        _OTHER_ADAPTER,
    ),
    "Seq2SeqTrainer": _OTHER_TASK,
    "Seq2SeqTrainingArguments": _OTHER_TASK,
    "DataCollatorForCompletionOnlyLM": "give SFTTrainer rows of 'prompt' and 'completion', or conversations and "
    "SFTConfig(assistant_only_loss=True).",
    "LlamaForCausalLM": "AutoModelForCausalLM.from_pretrained() loads it.",
    "LlamaTokenizer": "AutoTokenizer.from_pretrained() loads it.",
    "LlamaTokenizerFast": "AutoTokenizer.from_pretrained() loads it.",
    "prepare_model_for_int8_training": "it was renamed: use prepare_model_for_kbit_training.",
    "AutoProcessor": "models here read text. Use AutoTokenizer.",
}  # fmt: skip


def find(name: str) -> Any:
    """What the package is asked for and has no module for.

    @raises ImportError for what is not here, with the way out, and where transformers is not installed; AttributeError for other names.
    """
    if name in NOT_HERE:
        raise ImportError(f"qlorapp has no {name}: {NOT_HERE[name]}")
    if name not in FROM_TRANSFORMERS and name != "HfArgumentParser":
        raise AttributeError(f"module 'qlorapp' has no attribute {name!r}")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(f"qlorapp.{name} is transformers' own: pip install 'qlorapp[hf]'.") from error
    if name == "HfArgumentParser":
        return _argument_parser(transformers.HfArgumentParser)
    if name == "logging":
        return transformers.utils.logging
    return getattr(transformers, name)


def _argument_parser(theirs: Any) -> type:
    """transformers' HfArgumentParser, which also takes the other spellings of this library's configs: --evaluation_strategy, --no_cuda …"""

    class HfArgumentParser(theirs):  # type: ignore[misc]  # its types are not known here
        def _field(self, key: str) -> str:
            for kind in self.dataclass_types:
                if key in getattr(kind, "field_aliases", {}):
                    return str(kind.modern_names({key: True}).popitem()[0])
            return key

        def _renamed(self, words: Iterable[str]) -> list[str]:
            made = []
            for word in words:
                option, equals, value = word.partition("=")
                if option.startswith("--"):
                    field = self._field(option[2:].replace("-", "_"))
                    if field != option[2:].replace("-", "_"):
                        option = f"--{field}"
                made.append(option + equals + value)
            return made

        def parse_args_into_dataclasses(self, args: Any = None, *more: Any, **options: Any) -> Any:
            words = sys.argv[1:] if args is None else list(args)
            return super().parse_args_into_dataclasses(self._renamed(words), *more, **options)

        def parse_dict(self, args: dict[str, Any], *more: Any, **options: Any) -> Any:
            return super().parse_dict({self._field(key): value for key, value in args.items()}, *more, **options)

    return HfArgumentParser
