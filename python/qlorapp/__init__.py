# SPDX-License-Identifier: Apache-2.0
"""QLoRA fine-tuning, computed in C++ over LibTorch."""

from typing import Any as _Any

from ._build_info import TORCH_VERSION as _TORCH_VERSION
from ._build_info import VERSION as __version__


def _check_torch() -> None:
    """Before the library is loaded: a torch of another minor version would end in a wall of undefined symbols."""
    try:
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

from . import _logging, nn, passed_through  # noqa: E402, F401  (logging before anything can have something to say)
from ._C import Accumulator, FormatError, QuantizedTensor, Quantizer, quantize_checkpoint  # noqa: E402
from .auto_model import AutoModelForCausalLM  # noqa: E402
from .auto_peft_model import AutoPeftModelForCausalLM  # noqa: E402
from .generation import GenerationConfig  # noqa: E402
from .grad_scaler import GradScaler  # noqa: E402
from .layers import CheckpointedBlock, LoraLinear  # noqa: E402
from .memory import MemoryPlan, find_max_batch_size, plan  # noqa: E402
from .merging import merge  # noqa: E402
from .modeling import CausalLM  # noqa: E402
from .peft import (  # noqa: E402
    PeftModel,
    PeftModelForCausalLM,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from .peft_config import LoftQConfig, LoraConfig, PeftConfig, TaskType  # noqa: E402
from .precision import get_mixed_precision_dtype  # noqa: E402
from .prediction import EvalPrediction, PredictionOutput  # noqa: E402
from .progress import PrinterCallback, ProgressCallback, TensorBoardCallback  # noqa: E402
from .quantization import BitsAndBytesConfig  # noqa: E402
from .random import set_seed  # noqa: E402
from .sft_config import SFTConfig  # noqa: E402
from .sft_trainer import SFTTrainer  # noqa: E402
from .tokenization import AutoTokenizer  # noqa: E402
from .trainer import Trainer, TrainOutput  # noqa: E402
from .trainer_callback import (  # noqa: E402
    EarlyStoppingCallback,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from .training_arguments import TrainingArguments  # noqa: E402

__all__ = [
    "Accumulator",
    "AutoModelForCausalLM",
    "AutoPeftModelForCausalLM",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "CausalLM",
    "CheckpointedBlock",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "ExportableState",
    "FormatError",
    "GenerationConfig",
    "GradScaler",
    "LoftQConfig",
    "LoraConfig",
    "LoraLinear",
    "MemoryPlan",
    "PeftConfig",
    "PeftModel",
    "PeftModelForCausalLM",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "QuantizedTensor",
    "Quantizer",
    "SFTConfig",
    "SFTTrainer",
    "TaskType",
    "TensorBoardCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
    "find_max_batch_size",
    "get_mixed_precision_dtype",
    "get_peft_model",
    "get_peft_model_state_dict",
    "merge",
    "nn",
    "plan",
    "prepare_model_for_kbit_training",
    "quantize_checkpoint",
    "set_peft_model_state_dict",
    "set_seed",
]


def __getattr__(name: str) -> _Any:
    """transformers' own names, imported when they are first asked for; passed_through.py lists them."""
    found = passed_through.find(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names: those here, and those of other packages that this one passes on."""
    others = {*passed_through.FROM_TRANSFORMERS, *passed_through.FROM_OTHERS, *passed_through.MODULES, *passed_through.OWN}
    return sorted({*__all__, *others, "HfArgumentParser", "get_peft_config"})
