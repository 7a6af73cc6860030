# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import beside the main road: transformers' own, imported when they are first asked for, and those that are not here.

`from qlorapp import X` finds them through the package's __getattr__; `import qlorapp` alone imports nothing of them.
"""

import importlib
import re
import sys
from collections.abc import Iterable
from typing import Any

#: What transformers has and works with this library's models and trainers as it is.
FROM_TRANSFORMERS = frozenset({
    "Adafactor", "AutoConfig", "BatchEncoding", "CONFIG_MAPPING", "Cache", "Conv1D", "DataCollator", "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorWithPadding", "DefaultDataCollator", "DynamicCache", "GenerationMixin", "IntervalStrategy",
    "LogitsProcessor", "LogitsProcessorList", "MODEL_FOR_CAUSAL_LM_MAPPING", "MaxTimeCriteria", "Pipeline", "PreTrainedModel", "PreTrainedTokenizer", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast",
    "PretrainedConfig", "SchedulerType", "StoppingCriteria", "StoppingCriteriaList", "TensorType", "TextGenerationPipeline", "TextIteratorStreamer", "TextStreamer",
    "default_data_collator", "enable_full_determinism", "get_constant_schedule",
    "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup", "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup", "get_inverse_sqrt_schedule", "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup", "get_scheduler", "get_wsd_schedule", "is_torch_xla_available", "logging", "pipeline",
})  # fmt: skip

#: {name: (the module that has it, its name there)}, of packages that need not be installed.
FROM_OTHERS = {
    "EvaluationStrategy": ("transformers", "IntervalStrategy"),  # as it was called
    **{name: ("transformers.trainer_utils", name) for name in ("HubStrategy", "PREFIX_CHECKPOINT_DIR", "SaveStrategy", "get_last_checkpoint")},
    **{name: ("transformers.utils", name) for name in ("PaddingStrategy", "check_min_version", "is_torch_bf16_gpu_available")},
    "ALL_LAYERNORM_LAYERS": ("transformers.pytorch_utils", "ALL_LAYERNORM_LAYERS"),
    "get_parameter_names": ("transformers.trainer_pt_utils", "get_parameter_names"),
    "require_version": ("transformers.utils.versions", "require_version"),
    "PeftType": ("peft", "PeftType"),
    "load_peft_weights": ("peft", "load_peft_weights"),
    "create_loraplus_optimizer": ("peft.optimizers", "create_loraplus_optimizer"),
    **{name: ("trl", name) for name in ("ModelConfig", "ScriptArguments", "TrlParser", "get_kbit_device_map", "get_quantization_config")},
}  # fmt: skip
#: Modules of this package that nothing imports before they are asked for.
MODULES = frozenset({"optim", "trainer_utils"})
#: {name: the module of this package that makes it when it is asked for}.
OWN = {"Seq2SeqTrainer": "seq2seq", "Seq2SeqTrainingArguments": "seq2seq", "LoraLayer": "family_names"}
#: Names of one family's classes, of which transformers has one each: its config is passed on, the others are our Auto classes under them.
_OF_A_FAMILY = re.compile(r"[A-Z]\w*(ForCausalLM|Tokenizer|TokenizerFast|[a-z0-9]Config)")
#: What does without them.
_WITHOUT = {
    "PeftType": "adapters here are LoRA, whose peft_type is 'LORA'",
    "load_peft_weights": "PeftModel.from_pretrained reads an adapter's folder, and get_peft_model_state_dict(model) gives its values",
    "ModelConfig": "from_pretrained and LoraConfig take these options one by one",
    "ScriptArguments": "a dataclass of your own does the same",
    "TrlParser": "HfArgumentParser parses the configs, too",
    "get_kbit_device_map": 'device_map="auto" does the same',
    "get_quantization_config": "BitsAndBytesConfig(load_in_4bit=True, …) makes it",
    "create_loraplus_optimizer": "parameter groups of torch.optim.AdamW do the same",
}

_OTHER_FORMAT = (
    "weights in four bits are in bitsandbytes' format here. Use BitsAndBytesConfig(load_in_4bit=True) on the float checkpoint."
)
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
    **dict.fromkeys(
        ("GPTQConfig", "AwqConfig", "AqlmConfig", "EetqConfig", "HqqConfig", "QuantoConfig", "TorchAoConfig"), _OTHER_FORMAT
    ),
    "DataCollatorForCompletionOnlyLM": "give SFTTrainer rows of 'prompt' and 'completion', or conversations and "
    "SFTConfig(assistant_only_loss=True).",
    "functional": "bitsandbytes' functions are Quantizer().quantize(weight) and methods of the QuantizedTensor that it gives (dequantize, linear), "
    "which a layer in four bits has as quant_state.",
    "prepare_model_for_int8_training": "it was renamed: use prepare_model_for_kbit_training.",
    "AdamW": "transformers took it away: use torch.optim.AdamW, with weight_decay=0.0 for what that one did unless told, or "
    "TrainingArguments(optim='adamw_torch').",
    "setup_chat_format": "it adds tokens, and tables here keep their rows. Set tokenizer.chat_template, or SFTConfig(chat_template_path=…).",
    "clone_chat_template": "it adds tokens, and tables here keep their rows. Set tokenizer.chat_template, or SFTConfig(chat_template_path=…), to "
    "take the template of another tokenizer.",
    "ConstantLengthDataset": "TRL took it away: use SFTConfig(packing=True, max_length=…), which packs rows into blocks of one length.",
    "DefaultFlowCallback": "the trainer itself decides when it logs, evaluates and saves. Set logging_strategy, eval_strategy and save_strategy, or "
    "the flags of control in a TrainerCallback.",
    "replace_lora_weights_loftq": "it reads bitsandbytes' layers. Use LoraConfig(init_lora_weights='loftq', loftq_config=LoftQConfig()).",
    "AutoProcessor": "models here read text. Use AutoTokenizer.",
}  # fmt: skip


def find(name: str) -> Any:
    """What the package is asked for and has no module for.

    @raises ImportError for what is not here, with the way out, and where transformers is not installed; AttributeError for other names.
    """
    if name in NOT_HERE:
        raise ImportError(f"qlorapp has no {name}: {NOT_HERE[name]}")
    if name in MODULES:
        return importlib.import_module(f".{name}", __package__)
    if name in OWN:
        return getattr(importlib.import_module(f".{OWN[name]}", __package__), name)
    if name == "get_peft_config":
        return get_peft_config
    if name in FROM_OTHERS:
        return _of_others(name)
    of_a_family = name not in FROM_TRANSFORMERS and _OF_A_FAMILY.fullmatch(name)
    if name not in FROM_TRANSFORMERS and name != "HfArgumentParser" and not of_a_family:
        raise AttributeError(f"module 'qlorapp' has no attribute {name!r}")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(f"qlorapp.{name} is transformers' own: pip install 'qlorapp[hf]'.") from error
    if name == "HfArgumentParser":
        return _argument_parser(transformers.HfArgumentParser)
    if name == "logging":
        return transformers.utils.logging
    if not hasattr(transformers, name):
        raise AttributeError(f"module 'qlorapp' has no attribute {name!r}")
    if of_a_family and not name.endswith("Config"):
        return importlib.import_module(".family_names", __package__).auto_class(name, getattr(transformers, name))
    return getattr(transformers, name)


def get_peft_config(config: Any) -> Any:
    """A LoraConfig for a dict, as PEFT has it, and for a ModelConfig what TRL's function of the same name gives: None for use_peft=False.

    @raises ValueError for a dict of another method; TypeError for what is neither.
    """
    if isinstance(config, dict):
        from .peft_config import LoraConfig

        if str(kind := config.get("peft_type", "LORA")).rpartition(".")[2] != "LORA":
            raise ValueError(f"[get_peft_config] peft_type must be 'LORA'; got {kind!r}. A{_OTHER_ADAPTER[1:]}")
        return LoraConfig(**config)
    if not hasattr(config, "use_peft"):
        raise TypeError(
            f"[get_peft_config] config must be a dict of adapter_config.json's names, or TRL's ModelConfig; got {type(config).__name__}. Use "
            "LoraConfig."
        )
    try:
        trl = importlib.import_module("trl")
    except ModuleNotFoundError as error:
        raise ImportError(
            "[get_peft_config] a ModelConfig is trl's own: pip install trl, or do without: use LoraConfig."
        ) from error
    return trl.get_peft_config(config)


def _of_others(name: str) -> Any:
    module, there = FROM_OTHERS[name]
    package = module.partition(".")[0]
    without = f", or do without: {_WITHOUT[name]}" if name in _WITHOUT else ""
    try:
        return getattr(importlib.import_module(module), there)
    except ModuleNotFoundError as error:
        raise ImportError(f"qlorapp.{name} is {package}'s own: pip install {package}{without}.") from error
    except AttributeError as error:
        raise ImportError(f"qlorapp.{name} is {package}'s own, and the release that is installed lacks it{without}.") from error


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
