# SPDX-License-Identifier: Apache-2.0
"""8-bit AdamW as a torch optimizer, with bitsandbytes' layout and names."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

_OPS = torch.ops.qlorapp
_BLOCK = 256
#: bitsandbytes keeps smaller parameters in float32.
_SMALLEST = 4096
#: The key of a parameter's tensors in bitsandbytes' state dict.
_WRAPPED = "__bnb_optimizer_quant_state__"


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with moments in eight bits, in blocks of 256 (Dettmers et al. 2022, arXiv:2110.02861).

    Parameters and gradients are float32. The state has bitsandbytes' names and values: state1, state2, qmap1, qmap2, absmax1, absmax2.
    Parameters below 4,096 elements have only state1 and state2, in float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = _SMALLEST,
        **ignored: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._min_8bit_size = min_8bit_size

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
        state["step"] += 1
        assert parameter.grad is not None
        values, gradient = parameter.view(-1), parameter.grad.contiguous().view(-1)
        numbers = (state["step"], group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        moments = [state[name].view(-1) for name in ("state1", "state2")]
        if "absmax1" in state:
            _OPS.adamw_8bit_(values, gradient, *moments, state["absmax1"], state["absmax2"], *numbers)
        else:
            _OPS.adamw_(values, gradient, *moments, *numbers)

    def _begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        if parameter.numel() < self._min_8bit_size:
            state["state1"], state["state2"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            return
        blocks = -(-parameter.numel() // _BLOCK)
        state["state1"] = torch.full_like(parameter, 127, dtype=torch.uint8)  # the signed map's zero
        state["state2"] = torch.zeros_like(parameter, dtype=torch.uint8)
        codes, one = torch.arange(256, dtype=torch.uint8, device=parameter.device), torch.ones(1, device=parameter.device)
        for i, signed in ((1, True), (2, False)):
            state[f"qmap{i}"] = _OPS.dequantize_blockwise(codes, one, _BLOCK, signed)
            state[f"absmax{i}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def state_dict(self) -> dict[str, Any]:
        """Has bitsandbytes' layout."""
        given = super().state_dict()
        given["state"] = {
            index: {"step": state["step"], _WRAPPED: {name: value for name, value in state.items() if name != "step"}}
            for index, state in given["state"].items()
        }
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state dict of this class, or of bitsandbytes' AdamW8bit over the same parameters."""
        states = {
            index: {name: value for name, value in {**state, **state.get(_WRAPPED, {})}.items() if name != _WRAPPED}
            for index, state in copy.deepcopy(state_dict["state"]).items()
        }
        super().load_state_dict({**state_dict, "state": states})
        for index, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            for name in ("state1", "state2"):  # torch casts them to the parameter's dtype
                if index in states:
                    self.state[parameter][name] = states[index][name].to(parameter.device)


class PagedAdamW8bit(AdamW8bit):
    """AdamW8bit under bitsandbytes' name for paged states. In transformers' loop the states stay on the parameters' device."""


#: bitsandbytes' names of AdamW in 32 bits.
AdamW = AdamW32bit = PagedAdamW = PagedAdamW32bit = torch.optim.AdamW
