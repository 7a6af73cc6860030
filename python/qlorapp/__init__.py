# SPDX-License-Identifier: Apache-2.0
"""QLoRA fine-tuning, computed in C++ over LibTorch."""

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

from . import _logging  # noqa: E402, F401  (before anything can have something to say)
from ._C import Accumulator, FormatError, QuantizedTensor, Quantizer, quantize_checkpoint  # noqa: E402
from .configs import LoraConfig, TaskType, TrainingArguments  # noqa: E402
from .grad_scaler import GradScaler  # noqa: E402
from .layers import CheckpointedBlock, LoraLinear  # noqa: E402
from .memory import MemoryPlan, find_max_batch_size, plan  # noqa: E402
from .modeling import AutoModelForCausalLM, CausalLM  # noqa: E402
from .peft import PeftModel, get_peft_model, prepare_model_for_kbit_training  # noqa: E402
from .quantization import BitsAndBytesConfig  # noqa: E402
from .random import set_seed  # noqa: E402
from .trainer import Trainer, TrainerCallback  # noqa: E402

__all__ = [
    "Accumulator",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "CausalLM",
    "CheckpointedBlock",
    "FormatError",
    "GradScaler",
    "LoraConfig",
    "LoraLinear",
    "MemoryPlan",
    "PeftModel",
    "QuantizedTensor",
    "Quantizer",
    "TaskType",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "__version__",
    "find_max_batch_size",
    "get_peft_model",
    "plan",
    "prepare_model_for_kbit_training",
    "quantize_checkpoint",
    "set_seed",
]


def __getattr__(name: str):
    """AutoTokenizer is transformers' own, imported when it is first asked for."""
    if name == "AutoTokenizer":
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise ImportError("qlorapp.AutoTokenizer is transformers' own: pip install 'qlorapp[hf]'.") from error
        return AutoTokenizer
    raise AttributeError(f"module 'qlorapp' has no attribute {name!r}")
