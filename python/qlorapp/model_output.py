# SPDX-License-Identifier: Apache-2.0
"""What a model's forward pass returns."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch

NO_CACHE = "The forward pass keeps no cache: use generate(), which has one, or pass the whole sequence at each step"


class NoCache:
    """Stands where transformers' outputs have a cache. None would say to a loop of the script's own that the next pass is the first one,
    and it would go on from its last token alone; this is refused where it is passed, and where it is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"[forward] past_key_values.{name}: {NO_CACHE}.")

    def __getitem__(self, key: Any) -> Any:
        raise NotImplementedError(f"[forward] past_key_values[{key!r}]: {NO_CACHE}.")


class CausalLMOutput(Mapping[str, torch.Tensor]):
    """`.loss` (mean over the targets, on the autograd graph) and `.logits`, which are computed when they are first read.

    Also a mapping and a tuple as transformers' outputs are: output["loss"], output.get("loss"), output[0], output[:2].
    """

    #: What transformers' outputs have without what was not asked for.
    hidden_states = attentions = None
    #: None where the pass was told not to keep one, as there.
    past_key_values: NoCache | None = NoCache()

    __hash__, __eq__ = object.__hash__, object.__eq__  # tensors have no truth to compare by

    def __init__(
        self,
        loss: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        make_logits: Callable[[], torch.Tensor] | None = None,
        *,
        logits: torch.Tensor | None = None,
        use_cache: bool = True,
    ) -> None:
        """loss and make_logits, or values: of a mapping, or by their names, as accelerate makes an output again from a changed one."""
        if isinstance(loss, Mapping):
            values: Mapping[str, torch.Tensor] = loss
            if unknown := [name for name in values if name not in ("loss", "logits")]:
                raise TypeError(
                    f"[CausalLMOutput] a mapping must have loss and logits alone; got {unknown[0]!r}. Leave it out."
                )
            loss, logits = values.get("loss"), values.get("logits", logits)
        if make_logits is None and logits is None:
            raise TypeError("[CausalLMOutput] logits must be there; got none. Give make_logits, or a mapping that has them.")
        self.loss = loss
        if not use_cache:
            self.past_key_values = None
        self._make_logits = make_logits
        self._logits = logits

    @property
    def logits(self) -> torch.Tensor:
        """(B, T, V) in the model's dtype, 0 on padding."""
        if self._logits is None:
            assert self._make_logits is not None
            self._logits = self._make_logits()
        return self._logits

    @property
    def _names(self) -> list[str]:
        return ["logits"] if self.loss is None else ["loss", "logits"]

    def to_tuple(self) -> tuple[torch.Tensor, ...]:
        """What is not None, in order; the logits are computed for it."""
        return tuple(self.values())

    @overload
    def __getitem__(self, key: int | str) -> torch.Tensor: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[torch.Tensor, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return tuple(getattr(self, name) for name in self._names[key])
        name = key if isinstance(key, str) else self._names[key]
        if name not in self._names:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
