# SPDX-License-Identifier: Apache-2.0
"""What of the shown tree stays as it is: C++ read it when the model was loaded, and would compute the same after an edit."""

import logging
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from . import _C

_log = logging.getLogger("qlorapp")


def place(parent: torch.nn.Module, name: str, child: torch.nn.Module) -> None:
    """The tree's own way to put a child where a script may not."""
    parent._modules[name] = child


def _refuse(module: torch.nn.Module, what: str) -> NoReturn:
    raise NotImplementedError(
        f"[modules] {what} of {type(module).__name__} cannot be changed: all blocks are computed in one call of C++, which would not see it. "
        "To edit modules, load the model by transformers and add adapters by get_peft_model: Trainer takes it, too."
    )


def _only_casts(now: Any, value: Any) -> bool:
    """Is it CastOutputToFloat(model.lm_head), of old notebooks for PEFT? Said where it would have changed logits."""
    wraps = isinstance(value, torch.nn.Sequential) and len(value) == 1 and value[0] is now
    if not wraps or type(value).__name__ not in ("CastOutputToFloat", "Sequential"):
        return False
    if type(value) is not torch.nn.Sequential and now.weight.dtype != torch.float32:
        dtype = str(now.weight.dtype).removeprefix("torch.")
        _C.log_warning_once(
            f"[modules] CastOutputToFloat around the head has no effect: logits stay {dtype}, the model's dtype. output.logits.float() casts them."
        )
    return True


class Fixed(torch.nn.Module):
    """A module whose children, forward and constants stay. New children are a script's own matter, and are called by it alone."""

    #: Attributes that C++ has read, and how else they are chosen.
    _constants: dict[str, str] = {}  # noqa: RUF012  (torch.nn.Module's own annotations are as plain)

    def __setattr__(self, name: str, value: Any) -> None:
        children = self.__dict__.get("_modules", {})
        if isinstance(children.get(name), Fixed):
            if value is not children[name] and not _only_casts(children[name], value):
                _refuse(self, name)
            return
        if name == "forward" and value != self.forward:  # what was there may be put back
            _refuse(self, "forward")
        if name in self._constants and name in self.__dict__ and value != self.__dict__[name]:
            raise AttributeError(f"[modules] {name} of {type(self).__name__} cannot be changed: {self._constants[name]}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if isinstance(self._modules.get(name), Fixed):
            _refuse(self, name)
        super().__delattr__(name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        if isinstance(self._modules.get(name), Fixed):
            setattr(self, name, module)
        else:
            super().add_module(name, module)


class ModuleList(Fixed, torch.nn.ModuleList):
    """The blocks. A slice of it is a list of a script's own."""

    def __init__(self, modules: Iterable[torch.nn.Module] | None = None) -> None:
        super().__init__(modules)
        self._of_the_model = modules is None

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_of_the_model"):
            super().__setattr__(name, value)
        else:
            torch.nn.Module.__setattr__(self, name, value)

    def __delitem__(self, idx: int | slice) -> None:
        self._check("the list")
        super().__delitem__(idx)

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("_of_the_model"):
            super().__delattr__(name)
        else:
            torch.nn.Module.__delattr__(self, name)

    def insert(self, index: int, module: torch.nn.Module) -> None:
        self._check("the list")
        super().insert(index, module)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        if name not in self._modules:
            self._check("the list")
        super().add_module(name, module)

    def _check(self, what: str) -> None:
        if self.__dict__.get("_of_the_model"):
            _refuse(self, what)


class ModuleDict(Fixed, torch.nn.ModuleDict):
    """What a layer has for each adapter."""

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        if name not in self._modules:
            _refuse(self, repr(name))
        super().add_module(name, module)

    def __delitem__(self, key: str) -> None:
        _refuse(self, repr(key))

    def clear(self) -> None:
        _refuse(self, "the entries")


class Scaling(dict[str, float]):
    """{adapter: the factor of its update}, to be read."""

    def _fixed(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "[modules] scaling cannot be changed: C++ computes with that of the adapter's config. Give lora_alpha to LoraConfig, scale "
            "lora_B's weight in place, or turn adapters off by `with model.disable_adapter():`."
        )

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _fixed

    def __reduce__(self) -> Any:
        """A copy is a plain dict."""
        return dict, (dict(self),)
