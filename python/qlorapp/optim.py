# SPDX-License-Identifier: Apache-2.0
"""AdamW as torch optimizers with bitsandbytes' layout and names: moments in eight bits, and moments that leave a full GPU."""

import collections
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import _C

_OPS = torch.ops.qlorapp
BLOCK = 256
#: As in bitsandbytes: smaller parameters keep float32 moments; smaller ones are not paged.
_SMALLEST, _SMALLEST_PAGED = 4096, 100_000
#: The key of a parameter's tensors in bitsandbytes' state dict.
WRAPPED = "__bnb_optimizer_quant_state__"
_MOMENTS = ("state1", "state2", "absmax1", "absmax2")


def code_map(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values of a moment in eight bits: (256,) float32."""
    codes, one = torch.arange(256, dtype=torch.uint8, device=device), torch.ones(1, device=device)
    values: torch.Tensor = _OPS.dequantize_blockwise(codes, one, BLOCK, signed)
    return values


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with moments in eight bits, in blocks of 256 (Dettmers et al. 2022, arXiv:2110.02861).

    The state has bitsandbytes' names and values: state1, state2, qmap1, qmap2, absmax1, absmax2. Parameters below min_8bit_size elements,
    and those of in_float32, have only state1 and state2, in float32. Parameters of 16 bits are updated in float32 and rounded once.
    """

    _eight_bit, _paged = True, False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = _SMALLEST,
        *,
        in_float32: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._min_8bit_size = min_8bit_size
        self._in_float32 = {id(parameter) for parameter in in_float32}
        #: Moments that C++ holds, in the order of _MOMENTS.
        self._pages: dict[torch.Tensor, _C.PagedState] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter, state)
            self._page(parameter, state)
        state["step"] += 1
        assert parameter.grad is not None
        values, gradient = parameter.float().view(-1), parameter.grad.float().contiguous().view(-1)
        numbers = (state["step"], group["lr"], *group["betas"], group["eps"], group["weight_decay"])

        def update(moments: list[torch.Tensor], begin: int, count: int) -> None:
            of = slice(begin, begin + count)
            (_OPS.adamw_8bit_ if len(moments) == 4 else _OPS.adamw_)(values[of], gradient[of], *moments, *numbers)

        if parameter in self._pages:
            self._pages[parameter].step(update)
        else:
            update([state[name].view(-1) for name in _MOMENTS if name in state], 0, values.numel())
        if parameter.dtype != torch.float32:
            parameter.copy_(values.view_as(parameter))

    def _begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        if not self._eight_bit or parameter.numel() < self._min_8bit_size or id(parameter) in self._in_float32:
            state["state1"], state["state2"] = (torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2))
            return
        blocks = -(-parameter.numel() // BLOCK)
        state["state1"] = torch.full_like(parameter, 127, dtype=torch.uint8)  # the signed map's zero
        state["state2"] = torch.zeros_like(parameter, dtype=torch.uint8)
        for i, signed in ((1, True), (2, False)):
            state[f"qmap{i}"] = code_map(signed, parameter.device)
            state[f"absmax{i}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def _page(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Hands the moments of a large parameter on a GPU to C++, if they are paged."""
        self._pages.pop(parameter, None)
        count = parameter.numel()
        if self._paged and parameter.is_cuda and count >= _SMALLEST_PAGED and count % BLOCK == 0:
            self._pages[parameter] = _C.PagedState([state.pop(name) for name in _MOMENTS if name in state], count)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the moments that C++ holds become tensors again."""
        states = {parameter: dict(state) for parameter, state in self.state.items()}
        for parameter, pages in self._pages.items():
            states[parameter].update(zip(_MOMENTS, pages.tensors(), strict=False))
        kept = [parameter for parameter in self._parameters() if id(parameter) in self._in_float32]
        return {**super().__getstate__(), "state": collections.defaultdict(dict, states), "kept": (self._min_8bit_size, kept)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("kept", None)
        super().__setstate__(state)
        if kept is None:  # load_state_dict() comes here, too
            return
        self._min_8bit_size, self._pages = kept[0], {}
        self._in_float32 = {id(parameter) for parameter in kept[1]}
        for parameter, held in self.state.items():
            self._page(parameter, held)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Has bitsandbytes' layout."""
        given = super().state_dict()
        parameters = self._parameters()
        for index, state in given["state"].items():
            held = {name: value for name, value in state.items() if name != "step"}
            if (parameter := parameters[index]) in self._pages:
                for name, value in zip(_MOMENTS, self._pages[parameter].tensors(), strict=False):
                    held[name] = value.view_as(parameter) if name.startswith("state") else value
            given["state"][index] = {"step": state["step"], WRAPPED: held}
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state dict of this class, or of bitsandbytes' AdamW over the same parameters."""
        states = {
            index: {name: value for name, value in {**state, **state.get(WRAPPED, {})}.items() if name != WRAPPED}
            for index, state in copy.deepcopy(state_dict["state"]).items()
        }
        super().load_state_dict({**state_dict, "state": states})
        for index, parameter in enumerate(self._parameters()):
            if index in states:
                for name in set(states[index]) - {"step"}:  # torch casts them to the parameter's dtype
                    self.state[parameter][name] = states[index].pop(name).to(parameter.device)
                self._page(parameter, self.state[parameter])


class PagedAdamW8bit(AdamW8bit):
    """AdamW8bit whose moments give way to the host while the GPU is full, for parameters of 100,000 elements or more."""

    _paged = True


class PagedAdamW32bit(PagedAdamW8bit):
    """AdamW with float32 moments that give way to the host while the GPU is full."""

    _eight_bit = False


#: bitsandbytes' names of AdamW in 32 bits.
AdamW = AdamW32bit = torch.optim.AdamW
PagedAdamW = PagedAdamW32bit
