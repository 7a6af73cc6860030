# SPDX-License-Identifier: Apache-2.0
"""Classes that scripts import by the name of one family or of PEFT's inside, to load by them and to ask isinstance()."""

import sys
from typing import Any

from . import module_tree
from .auto_model import AutoModelForCausalLM
from .tokenization import AutoTokenizer


def auto_class(name: str, theirs: type) -> type:
    """LlamaForCausalLM, LlamaTokenizer …: our Auto class, whose instances are what it loads of this family. theirs: transformers' class."""
    auto: Any = AutoModelForCausalLM if name.endswith("ForCausalLM") else AutoTokenizer

    class OfAFamily(type(auto)):  # type: ignore[misc]  # a class that is not known here
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, theirs) or type(one).__name__ == name

    made: type = OfAFamily(name, (auto,), {"__module__": "qlorapp", "__doc__": f"{auto.__name__} under transformers' name."})
    return made


class _EitherLoraLayer(type):
    def __instancecheck__(cls, one: Any) -> bool:
        peft = sys.modules.get("peft.tuners.lora")  # without it there are none of its layers
        return isinstance(one, module_tree.LoraLayer) or (peft is not None and isinstance(one, peft.LoraLayer))


class LoraLayer(metaclass=_EitherLoraLayer):
    """What every layer with adapters is an instance of, in native models and, as PEFT's, in those of transformers."""
