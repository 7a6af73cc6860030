# SPDX-License-Identifier: Apache-2.0
"""QLoRA fine-tuning, computed in C++ over LibTorch.

The package has two halves. The library itself needs only torch: the five classes, plans, optimizers, and the engine (CausalLM). Hugging
Face's classes over the engine (pip install 'qlorapp[hf]') load from qlorapp.hf on first use. So do the names of transformers, PEFT and TRL
that scripts import beside them.
"""

import contextlib as _contextlib
import gc as _gc
import importlib as _importlib
from collections.abc import Iterator as _Iterator
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._build_info import TORCH_VERSION as _TORCH_VERSION
from ._build_info import VERSION as __version__


@_contextlib.contextmanager
def _importing() -> _Iterator[None]:
    """Pauses the garbage collector. Objects of modules stay, and collections walk through all of them: a sixth of the time of these imports."""
    was_enabled = _gc.isenabled()
    _gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _gc.enable()


def _check_torch() -> None:
    """Checks torch before the library loads: another minor version would fail with undefined symbols."""
    try:
        with _importing():
            import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"qlorapp needs torch {_TORCH_VERSION}: pip install 'torch=={_TORCH_VERSION}.*'.") from None
    found = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if found != _TORCH_VERSION:
        raise ImportError(
            f"qlorapp was built for torch {_TORCH_VERSION} but torch {found} is installed: "
            f"pip install 'torch=={_TORCH_VERSION}.*', or build qlorapp again with pip install --no-build-isolation."
        )


_check_torch()

from . import _C  # noqa: E402  (torch first: it loads the libraries that _C links)

assert _C.torch_version == _TORCH_VERSION

from . import _logging, nn, optim  # noqa: E402, F401  (logging first, to receive the others' lines)
from ._C import Accumulator, CausalLM, FormatError, QuantizedTensor, Quantizer, load_model, quantize_checkpoint  # noqa: E402
from .exporting import export, verify_export  # noqa: E402
from .grad_scaler import GradScaler  # noqa: E402
from .layers import CheckpointedBlock, LoraLinear  # noqa: E402
from .memory import GenerationPlan, MemoryPlan, find_max_batch_size, plan, plan_generation  # noqa: E402
from .merging import merge  # noqa: E402
from .precision import get_mixed_precision_dtype  # noqa: E402

if _TYPE_CHECKING:
    from .hf.auto_model import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoPeftModelForCausalLM,
    )
    from .hf.eval_generate import EvalGenerate
    from .hf.generating import Answer, Answers, generate
    from .hf.peft_model import get_peft_config, get_peft_model, prepare_model_for_kbit_training
    from .hf.sft import SFTTrainer
    from .hf.trainer import Trainer
    from .hf.training_arguments import SFTConfig, TrainingArguments

#: {a name that scripts import from unsloth: what to use}
_OF_UNSLOTH = {
    **dict.fromkeys(
        ("FastLanguageModel", "FastModel", "FastVisionModel", "FastTextModel", "FastLlamaModel"),
        "AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained and get_peft_model",
    ),
    "UnslothTrainer": "SFTTrainer",
    "UnslothTrainingArguments": "SFTConfig",
    "is_bfloat16_supported": "get_mixed_precision_dtype",
    "get_chat_template": "tokenizer.chat_template",
    "standardize_sharegpt": "rows of messages",
    "train_on_responses_only": "rows of prompt and completion, or SFTConfig(assistant_only_loss=True)",
}

#: {name: its module in qlorapp.hf}
_OF_HUGGING_FACE = {
    "AutoModelForCausalLM": "auto_model",
    "AutoModelForImageTextToText": "auto_model",
    "AutoModelForSequenceClassification": "auto_model",
    "AutoPeftModelForCausalLM": "auto_model",
    "Answer": "generating",
    "Answers": "generating",
    "EvalGenerate": "eval_generate",
    "SFTConfig": "training_arguments",
    "SFTTrainer": "sft",
    "Trainer": "trainer",
    "TrainingArguments": "training_arguments",
    "generate": "generating",
    "get_peft_config": "peft_model",
    "get_peft_model": "peft_model",
    "prepare_model_for_kbit_training": "peft_model",
}

__all__ = [
    "Accumulator",
    "Answer",
    "Answers",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "AutoPeftModelForCausalLM",
    "CausalLM",
    "CheckpointedBlock",
    "EvalGenerate",
    "FormatError",
    "GenerationPlan",
    "GradScaler",
    "LoraLinear",
    "MemoryPlan",
    "QuantizedTensor",
    "Quantizer",
    "SFTConfig",
    "SFTTrainer",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "export",
    "find_max_batch_size",
    "generate",
    "get_mixed_precision_dtype",
    "get_peft_config",
    "get_peft_model",
    "load_model",
    "merge",
    "nn",
    "optim",
    "plan",
    "plan_generation",
    "prepare_model_for_kbit_training",
    "quantize_checkpoint",
    "verify_export",
]


def __getattr__(name: str) -> _Any:
    """Loads a Hugging Face name on first use: ours if there is one, else the name of transformers, PEFT or TRL.

    @raises ImportError if its package is not installed, or if it is a name of unsloth; AttributeError for other names.
    """
    if name.startswith("_"):
        raise AttributeError(f"module 'qlorapp' has no attribute {name!r}")
    if name in _OF_UNSLOTH:
        raise ImportError(f'[qlorapp] {name} is a name of unsloth. Use {_OF_UNSLOTH[name]}: docs/migration.md, "From unsloth".')
    try:
        with _importing():
            if name in _OF_HUGGING_FACE:
                found = getattr(_importlib.import_module(f".hf.{_OF_HUGGING_FACE[name]}", __name__), name)
                globals()[name] = found
                return found
            for package in ("transformers", "peft", "trl"):
                if hasattr(module := _importlib.import_module(package), name):
                    return getattr(module, name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"qlorapp.{name} needs {error.name}, which is not installed: pip install 'qlorapp[hf]'.", name=error.name
        ) from error
    raise AttributeError(f"module 'qlorapp' has no attribute {name!r}, and neither have transformers, peft and trl")


def __dir__() -> list[str]:
    return sorted(__all__)
