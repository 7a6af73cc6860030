# SPDX-License-Identifier: Apache-2.0
"""An optimizer step in Python, for trainers of which somebody has overridden a part.

The C++ trainer keeps its loop (epochs, events, logs, evaluation, checkpoints) and asks for a step here: the window's batches, the
count of their targets, forward and backward through autograd, loss scaling, clipping, optimizer, schedule. Nothing overridden
gives the losses of the C++ step.
"""

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, cast

import torch

from . import _C
from .batches import Batches
from .grad_scaler import GradScaler
from .modeling import CausalLM
from .out_of_memory import InParts, RandomState, Work, first_line, is_out_of_memory, parts_of, release_cached_memory
from .process_state import ProcessState

_log = logging.getLogger("qlorapp")
_OPTIMIZER_FILE, _STATE_FILE = "python_optimizer.safetensors", "python_state.json"


class ArenaAdamW(torch.optim.Optimizer):
    """The C++ optimizer that `optim` names, over all adapters at once, as a torch optimizer: rates come from param_groups.

    Its moments are saved with the run by the C++ trainer, and are no part of state_dict().
    """

    def __init__(self, core: _C.Trainer, parameters: list[torch.nn.Parameter], args: Any) -> None:
        defaults = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        super().__init__(parameters, defaults)
        self._core = core

    def move_to(self, core: _C.Trainer) -> None:
        """To the C++ trainer of a run: a script may have asked for the optimizer before, or edited that of the last run."""
        self._core = core

    def has_another_rate(self) -> bool:
        """Has somebody changed the rate that schedules start from?"""
        group = self.param_groups[0]
        return bool(group.get("initial_lr", group["lr"]) != self.defaults["lr"])

    def refuse_edits(self) -> None:
        """@raises ValueError for those beyond the rate."""
        edited = [name for name in ("betas", "eps", "weight_decay") if self.param_groups[0][name] != self.defaults[name]]
        if edited or len(self.param_groups) > 1:
            raise ValueError(
                f"[Trainer] optimizer.param_groups were changed ({', '.join(edited) or 'a group was added'}), and the C++ optimizer reads the rate "
                "alone from there. Set TrainingArguments, or pass optimizers=(torch.optim.…, None)."
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._core.optimizer_step(self.param_groups[0]["lr"])
        return loss


class Accelerator(ProcessState):
    """What overridden methods ask trainer.accelerator for, with one process."""

    sync_gradients = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def device(self) -> torch.device:
        return torch.device(self._trainer.model.device)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._trainer._scaler.scale(loss).backward(**kwargs)

    def unwrap_model(self, model: Any, **kwargs: Any) -> Any:
        return model

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """As they are: overridden data loaders end in it."""
        return objects[0] if len(objects) == 1 else objects

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return data_loader

    prepare_model = prepare_optimizer = prepare_scheduler = prepare_data_loader

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """The loop counts micro-batches."""
        yield

    no_sync = accumulate

    @contextlib.contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """The model computes in the dtype that it was loaded in."""
        yield

    def gather(self, tensor: Any) -> Any:
        return tensor

    gather_for_metrics = gather


def overridden(trainer: Any, base: type, names: tuple[str, ...]) -> list[str]:
    """Which of the methods are not the base's own, by class or on the object."""
    return [name for name in names if name in vars(trainer) or getattr(type(trainer), name) is not getattr(base, name)]


def takes(function: Any, name: str) -> bool:
    """Does it have a parameter of that name?"""
    return name in inspect.signature(function).parameters


def accepts(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Could it be called like that? Overrides for older releases lack a parameter, others have *args or **kwargs."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def count_targets(batches: list[Any], count_position_zero: bool) -> int | None:
    """Labels of a window that are learnt; nothing, where batches have no labels to count."""
    total = 0
    for batch in batches:
        labels = batch.get("shift_labels") if hasattr(batch, "get") else None
        if labels is None:
            labels = batch.get("labels") if hasattr(batch, "get") else None
            if not isinstance(labels, torch.Tensor):
                return None
            labels = labels if count_position_zero else labels[..., 1:]
        total += int((labels != -100).sum())
    return total


def tokens_in(batch: Any) -> int:
    """Tokens of a batch that are no padding; 0 where it has none that can be counted."""
    if not hasattr(batch, "keys") or "input_ids" not in batch:
        return 0
    if "attention_mask" not in batch:
        return int(batch["input_ids"].numel())
    mask, labels = batch["attention_mask"], batch.get("labels")
    tokens = mask.sum()
    if isinstance(labels, torch.Tensor) and labels.shape == mask.shape:  # an EOS that was masked as padding is a token: unpad()
        places = torch.arange(mask.shape[-1], device=mask.device)
        end = 1 + (mask * places).amax(-1, keepdim=True)
        on_padding = (labels != -100) & (mask == 0)
        tokens = tokens + ((on_padding.sum(-1) == 1) & (on_padding & (places == end)).any(-1)).sum()
    return int(tokens)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Window(Work):
    """Forward and backward over a step's micro-batches, and the clipped gradients' norm."""

    def __init__(self, trainer: Any, batches: list[Any], targets: Any, in_parts: InParts) -> None:
        self.batches = batches
        self._trainer, self._targets, self._in_parts = trainer, targets, in_parts
        self._told, self._in_callback = 0, False

    def attempt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, norm)."""
        trainer, core = self._trainer, self._trainer._core
        trainer._lm._rebind()
        core.bind_values()
        core.zero_grad()
        loss: Any = None
        with torch.enable_grad():
            for i, inputs in enumerate(self.batches):
                for part in self._losses_of(inputs):
                    loss = part if loss is None else loss + part
                if self._told <= i < len(self.batches) - 1:
                    self._told, self._in_callback = self._told + 1, True
                    trainer.callback_handler.call("substep_end", core.control)
                    self._in_callback = False
        if trainer._scaler.is_enabled():
            trainer._scaler.unscale_(trainer.optimizer)
        return loss, self._clip(trainer.optimizer)

    def _losses_of(self, inputs: Any) -> list[torch.Tensor]:
        """The loss of each part, of which there is one until memory has run out. Their dropout is the whole batch's."""
        trainer = self._trainer
        parts = parts_of(inputs, self._in_parts.most)
        state = RandomState(trainer._lm.device) if isinstance(trainer._lm, CausalLM) and len(parts) > 1 else None
        losses, first_token = [], 0
        for i, part in enumerate(parts):
            counted = (self._targets,) if accepts(trainer.training_step, trainer.model, part, self._targets) else ()
            if state is None:
                losses.append(trainer.training_step(trainer.model, part, *counted))
                continue
            tokens = tokens_in(part)  # before somebody takes entries out
            if i > 0:
                state.restore()  # masks are a function of the batch's seed and a token's place
            with trainer._lm.tokens_before(first_token):
                losses.append(trainer.training_step(trainer.model, part, *counted))
            first_token += tokens
        return losses

    def _clip(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        limit = self._trainer.args.max_grad_norm
        if isinstance(optimizer, ArenaAdamW):
            return cast(torch.Tensor, self._trainer._core.clip_grad_norm(limit))
        gradients = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
        return torch.nn.utils.clip_grad_norm_(gradients, limit if limit > 0 else float("inf"))

    def start_again(self) -> None:
        trainer = self._trainer
        trainer._scaler._core.abandon_step()
        trainer.optimizer.zero_grad()  # of parameters that are not the adapters', too
        trainer.model.zero_grad()

    def may_repeat(self) -> bool:
        return not self._in_callback

    def why_whole(self) -> str | None:
        return cast("str | None", self._trainer._why_whole(self.batches[0], self._targets))

    def way_out(self, rows: int) -> str:
        args, lm = self._trainer.args, self._trainer._lm
        if rows > 1:
            batch = args.per_device_train_batch_size
            smaller = max(count for count in range(1, max(1, min(rows, batch) // 2) + 1) if batch % count == 0)
            accumulation = args.gradient_accumulation_steps * batch // smaller
            return f"Take per_device_train_batch_size={smaller} and gradient_accumulation_steps={accumulation}: the effective batch stays what it is."
        if isinstance(lm, CausalLM) and (longest := self._longest()) > 0:
            room, eight_bit = _C.memory_for(str(lm.device)), args.optim.endswith("_8bit")
            return _C.advice_for_one_row(lm.core, longest, optimizer_is_8bit=eight_bit, room=room, evaluates=False)
        return "Shorten the rows (max_length), lower LoRA's r, or call model.gradient_checkpointing_enable()."

    def made_smaller(self, rows: int) -> None:
        if isinstance(self._trainer._lm, CausalLM) and (longest := self._longest()) > 0:
            _log.info("%s", self._trainer._core.plan_line(rows, longest))

    def _longest(self) -> int:
        """Tokens of a row, padding included."""
        return max(batch["input_ids"].shape[-1] if tokens_in(batch) else 0 for batch in self.batches)


class AutogradStep:
    """Called by the C++ trainer for each step: (loss, gradient norm, learning rate, targets, input tokens, stepped)."""

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._trainer = trainer
        self._batches = Batches(loader)
        #: Of a run that is resumed in the middle of an epoch, until its loader has drawn what it had drawn before.
        self._generator_state: torch.Tensor | None = None
        self._in_parts = InParts("trainer", torch.device(trainer._lm.device))

    def __call__(
        self, epoch: int, first_batch: int, count: int, rows: Any
    ) -> tuple[torch.Tensor, torch.Tensor, float, int, int, bool]:
        trainer, core = self._trainer, self._trainer._core
        control, handler = core.control, trainer.callback_handler
        batches, targets = trainer.get_batch_samples(self._batches.at(epoch, first_batch), count, trainer._lm.device)
        self._batches.took(count)
        if self._generator_state is not None and first_batch > 0:
            torch.set_rng_state(self._generator_state)
        self._generator_state = None
        if not batches:
            raise ValueError(f"[Trainer] the train dataloader has no batch {first_batch} in epoch {epoch}. Give it a length.")
        tokens = sum(map(tokens_in, batches))
        trainer.current_gradient_accumulation_steps = len(batches)
        loss, norm = self._in_parts.run(_Window(trainer, batches, targets, self._in_parts))
        optimizer, scaler = trainer.optimizer, trainer._scaler
        handler.call("pre_optimizer_step", control)
        rate = float(optimizer.param_groups[0]["lr"])
        stepped = self._update(optimizer)
        handler.call("optimizer_step", control)
        if scaler.is_enabled():
            scaler.update()
        # A plateau moves with an evaluation's metric: Trainer._on_evaluate.
        waits = isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if stepped and trainer.lr_scheduler is not None and not waits:
            trainer.lr_scheduler.step()
        optimizer.zero_grad()
        return loss.detach().double(), norm, rate, int(targets or 0), tokens, stepped

    def _update(self, optimizer: torch.optim.Optimizer) -> bool:
        """_step(), once more if memory runs out where that has changed nothing: ours takes all memory before it writes."""
        try:
            return self._step(optimizer)
        except Exception as error:
            if not (is_out_of_memory(error) and isinstance(optimizer, ArenaAdamW)):
                raise
            reason = first_line(error)
        _log.warning(
            "[trainer] out of memory in the update (%s). Cached memory is given back, and it is taken once more.", reason
        )
        release_cached_memory(torch.device(self._trainer._lm.device))
        return self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it was taken: a scaler skips where a gradient overflowed."""
        scaler = self._trainer._scaler
        if not scaler.is_enabled():
            optimizer.step()
            return True
        taken = False

        def step() -> None:
            nonlocal taken
            optimizer.step()
            taken = True

        scaler._core.step(step, [parameter.grad for parameter in _parameters(optimizer)], id(optimizer))
        return taken

    # --- what of it goes into a checkpoint beside the C++ trainer's own

    def save(self, folder: str) -> None:
        from safetensors.torch import save_file

        optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
        tensors: dict[str, torch.Tensor] = {"torch_rng_state": torch.get_rng_state()}
        if self._trainer._lm.device.type == "cuda":
            tensors["cuda_rng_state"] = torch.cuda.get_rng_state(self._trainer._lm.device)
        state: dict[str, Any] = {"optimizer": None, "scheduler": None}
        if not isinstance(optimizer, ArenaAdamW):
            whole = optimizer.state_dict()
            numbers: dict[str, dict[str, Any]] = {}
            for i, entries in whole["state"].items():
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{i}.{key}"] = value.detach().cpu().contiguous().clone()
                    else:
                        numbers.setdefault(str(i), {})[key] = value
            state["optimizer"] = {"numbers": numbers, "param_groups": whole["param_groups"]}
        if hasattr(scheduler, "state_dict"):
            state["scheduler"] = {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}
        try:
            text = json.dumps(state)
        except TypeError as error:
            raise TypeError(
                f"[Trainer] the state of {type(optimizer).__name__} and {type(scheduler).__name__} cannot be saved: {error}. "
                "Set save_strategy='no' or save_only_model=True."
            ) from None
        save_file(tensors, os.path.join(folder, _OPTIMIZER_FILE))
        with open(os.path.join(folder, _STATE_FILE), "w", encoding="utf-8") as file:
            file.write(text)

    def load(self, folder: str) -> None:
        from safetensors.torch import load_file

        optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
        if not os.path.exists(os.path.join(folder, _STATE_FILE)):  # a checkpoint of the C++ loop
            if not isinstance(optimizer, ArenaAdamW):
                raise ValueError(
                    f"[resume] {folder} holds the state of optim={self._trainer.args.optim}, not of {type(optimizer).__name__}. "
                    "Resume with the optimizer of that run."
                )
            if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
                scheduler.last_epoch = self._trainer._core.optimizer_steps - 1
                scheduler.step()
            return
        with open(os.path.join(folder, _STATE_FILE), encoding="utf-8") as file:
            state = json.load(file)
        tensors = load_file(os.path.join(folder, _OPTIMIZER_FILE))
        self._generator_state = tensors.pop("torch_rng_state")
        torch.set_rng_state(self._generator_state)
        if (state_on_gpu := tensors.pop("cuda_rng_state", None)) is not None and self._trainer._lm.device.type == "cuda":
            torch.cuda.set_rng_state(state_on_gpu, self._trainer._lm.device)
        if state["optimizer"] is not None:
            entries: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in state["optimizer"]["numbers"].items()}
            for name, tensor in tensors.items():
                i, key = name.split(".", 1)
                entries.setdefault(int(i), {})[key] = tensor
            optimizer.load_state_dict({"state": entries, "param_groups": state["optimizer"]["param_groups"]})
        if state["scheduler"] is not None and hasattr(scheduler, "load_state_dict"):
            missing = {key: value for key, value in scheduler.state_dict().items() if key not in state["scheduler"]}
            scheduler.load_state_dict({**missing, **state["scheduler"]})
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


def scaler_of(core: _C.Trainer) -> GradScaler:
    """The run's own scaler, which the C++ trainer saves and restores."""
    scaler = GradScaler.__new__(GradScaler)
    scaler._core = core.scaler
    return scaler
