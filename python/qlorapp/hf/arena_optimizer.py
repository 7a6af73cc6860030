# SPDX-License-Identifier: Apache-2.0
"""The AdamW of C++'s steps as an optimizer of torch, for loops, schedulers and checkpoints in Python."""

from collections.abc import Callable
from typing import Any

import torch

from .. import _C, optim

#: The key of what is C++'s own in a state dict. Other optimizers pass over it.
_OWN = "qlorapp"
#: {torch's name of a moment: bitsandbytes'}
_NAMES = {"exp_avg": "state1", "exp_avg_sq": "state2"}


class ArenaAdamW(torch.optim.Optimizer):
    """AdamW over all parameters of an adapter at once; a step unscales, clips and updates. Its gradients are those of a StepRunner.

    State dicts have torch.optim.AdamW's layout, or that of bitsandbytes' AdamW8bit, by the runner's arguments. Of another rate in some of the
    groups step() raises ValueError.
    """

    #: accelerate then leaves it as it is: it has its own loss scale, and nothing to be moved.
    _is_accelerate_prepared = True

    def __init__(
        self,
        params: Any,
        runner: _C.StepRunner,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        micro_batches: int = 1,
        as_bitsandbytes: bool = False,
    ) -> None:
        """params: those of the model's active adapter, in groups with a weight_decay.

        micro_batches: of a whole step. as_bitsandbytes: the layout of state dicts in float32, too.
        The runner has its own betas, eps and weight decay. They are in the groups for those who read them, and for state dicts.
        """
        like = torch.optim.AdamW([torch.zeros(())], lr=lr, betas=betas, eps=eps)
        super().__init__(params, like.defaults)
        self.runner, self._micro_batches, self._as_bitsandbytes = runner, micro_batches, as_bitsandbytes
        #: The last step found an overflow of float16 and changed nothing.
        self.step_was_skipped = False

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        rates = {group["lr"] for group in self.param_groups if group["params"]}
        if len(rates) != 1:
            raise ValueError(
                f"[optimizer] C++ steps all parameters at one learning rate; param_groups have {sorted(rates)}. Set one, or pass "
                "optimizers=(optimizer, scheduler) to the trainer."
            )
        self.step_was_skipped = not self.runner.update(rates.pop())
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("[optimizer] the optimizer of a run in C++ cannot be copied or pickled. Use its state_dict().")

    def __reduce__(self) -> Any:
        raise TypeError("[optimizer] the optimizer of a run in C++ cannot be copied or pickled. Use its state_dict().")

    def _parameters(self) -> list[torch.Tensor]:
        """In the order of a state dict's numbers."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Tensors share the optimizer's memory."""
        given = super().state_dict()
        if self.runner.steps > 0:
            moments = dict(self.runner.moments())
            given["state"] = {i: self._state_of(p, moments) for i, p in enumerate(self._parameters())}
        given[_OWN] = {"micro_step": self.runner.micro_step, "scaler": self.runner.scaler.state_dict()}
        return given

    def _state_of(self, parameter: torch.Tensor, moments: dict[str, torch.Tensor]) -> dict[str, Any]:
        own = {name: _part(name, moment, parameter) for name, moment in moments.items()}
        if "exp_avg" in own and not self._as_bitsandbytes:
            return {"step": torch.tensor(float(self.runner.steps)), **own}
        if "exp_avg" in own:
            return {"step": self.runner.steps, optim.WRAPPED: {theirs: own[name] for name, theirs in _NAMES.items()}}
        maps = {f"qmap{i}": optim.code_map(signed, parameter.device) for i, signed in ((1, True), (2, False))}
        return {"step": self.runner.steps, optim.WRAPPED: {**own, **maps}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state of this class, of torch's AdamW or of bitsandbytes' AdamW8bit over the same parameters.

        @raises ValueError if it is of another optimizer or has other parameters.
        """
        moments, parameters = dict(self.runner.moments()), self._parameters()
        found = {int(i): {**state, **state.get(optim.WRAPPED, {})} for i, state in state_dict["state"].items()}
        if found and set(found) != set(range(len(parameters))):
            raise ValueError(
                f"[optimizer] a state dict must have the state of all {len(parameters)} parameters; got {len(found)}."
            )
        values, steps = [], 0  # all are checked before one is changed
        for i, stored in found.items():
            steps, state = int(stored["step"]), stored
            if "state1" in moments:
                state = _in_eight_bits(state)
            elif "exp_avg" not in state:
                state = {**state, **{name: state[theirs] for name, theirs in _NAMES.items() if theirs in state}}
            if lacking := sorted(set(moments) - set(state)):
                raise ValueError(
                    f"[optimizer] the state of parameter {i} must have {', '.join(moments)}; {', '.join(lacking)} is missing. It is of another "
                    "optimizer: resume with the optim of that run."
                )
            for name, moment in moments.items():
                part, value = _part(name, moment, parameters[i]), state[name]
                if value.numel() != part.numel() or value.dtype != part.dtype:
                    raise ValueError(
                        f"[optimizer] {name} of parameter {i} must be {tuple(part.shape)} {part.dtype}; got {tuple(value.shape)} "
                        f"{value.dtype}. Resume with the adapter and the optim of that run."
                    )
                values.append((part, value.view_as(part)))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for part, value in values:
            part.copy_(value)
        own = state_dict.get(_OWN, {})
        self.runner.steps = steps
        self.runner.micro_step = own.get("micro_step", steps * self._micro_batches)
        if own.get("scaler"):
            self.runner.scaler.load_state_dict(own["scaler"])


def _in_eight_bits(state: dict[str, Any]) -> dict[str, Any]:
    """The moments of a state in eight bits. bitsandbytes keeps those of small parameters in float32."""
    if getattr(state.get("state1"), "dtype", None) != torch.float32:
        return state
    made = dict(state)
    for i, signed in ((1, True), (2, False)):
        values = state[f"state{i}"].flatten().contiguous()
        made[f"state{i}"], made[f"absmax{i}"] = torch.ops.qlorapp.quantize_blockwise(values, optim.BLOCK, signed)
    return made


def _part(name: str, moment: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's part of a moment that is flat over the arena, or of the scales of its blocks."""
    begin, count = parameter.storage_offset(), parameter.numel()
    if name.startswith("absmax"):
        return moment[begin // optim.BLOCK : -(-(begin + count) // optim.BLOCK)]
    return moment[begin : begin + count].view_as(parameter)
