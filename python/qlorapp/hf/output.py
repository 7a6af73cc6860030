# SPDX-License-Identifier: Apache-2.0
"""transformers' output of a causal model, with logits computed on first use."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import CACHE


class CausalLMOutput(CausalLMOutputWithPast):
    """Reading only `loss` computes no logits, which are half a gigabyte at 2,048 tokens and a vocabulary of 128,256.

    Any other access computes them: the attribute, the mapping, the tuple.
    """

    def __init__(self, *args: Any, make_logits: Callable[[], torch.Tensor] | None = None, **fields: Any) -> None:
        self.__dict__["_make_logits"] = None
        super().__init__(*args, **fields)
        self.__dict__["_make_logits"] = make_logits

    def _settle(self) -> None:
        make, self.__dict__["_make_logits"] = self.__dict__["_make_logits"], None
        if make is not None:
            self.logits = make()
            if getattr(self, CACHE) is not None:  # keeps the order of the fields
                self.move_to_end(CACHE)

    def __getattribute__(self, name: str) -> Any:
        if name == "logits" and object.__getattribute__(self, "__dict__").get("_make_logits") is not None:
            self._settle()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key in ("loss", 0) and self.loss is not None:
            return self.loss
        self._settle()
        theirs: Any = super()  # it has no types
        return theirs.__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return (key == "logits" and self.__dict__["_make_logits"] is not None) or super().__contains__(key)

    def keys(self) -> Any:
        self._settle()
        return super().keys()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def items(self) -> Any:
        self._settle()
        return super().items()

    def __iter__(self) -> Any:
        self._settle()
        return super().__iter__()

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def to_tuple(self) -> tuple[Any, ...]:
        self._settle()
        return super().to_tuple()

    def __reduce__(self) -> Any:
        self._settle()
        theirs: Any = super()
        return theirs.__reduce__()
