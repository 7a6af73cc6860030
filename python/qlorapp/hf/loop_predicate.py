# SPDX-License-Identifier: Apache-2.0
"""Decides whether C++ computes the same steps as transformers' or TRL's trainer."""

from typing import Any

import torch
import transformers.training_args

from .. import _C
from . import longest_rows, pristine
from .forward import engine_of, is_own_forward
from .training_arguments import for_cpp

#: Methods of a step, which C++ replaces. With an overridden one torch computes the steps.
REPLACED = (
    "training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "get_batch_samples",
    "_get_num_items_in_batch", "_prepare_inputs", "_prepare_input", "_clip_grad_norm", "_get_grad_norm",
    "create_optimizer_and_scheduler", "create_optimizer", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names",
    "_prepare_for_training", "_wrap_model", "create_accelerator_and_postprocess", "_has_mixed_mesh_grads",
    "_prepare_context_parallel_inputs",
)  # fmt: skip
#: Modules whose methods do what C++ does.
_KNOWN = (
    "transformers.trainer", "trl.trainer.base_trainer", "trl.trainer.sft_trainer", f"{__package__}.loop", f"{__package__}.trainer",
    f"{__package__}.sft", f"{__package__}.window_steps",
)  # fmt: skip
#: Arguments of which C++ knows nothing.
_UNUSUAL = (
    "deepspeed", "fsdp", "torch_compile", "optim_args", "optim_target_modules", "use_liger_kernel", "debug", "parallelism_config",
)  # fmt: skip


def why_not(trainer: Any) -> str:
    """The reason why C++ cannot compute a run's steps; empty if it can."""
    args = trainer.args
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        return "accelerator_config may give processes different numbers of batches (even_batches=False)"
    if args.auto_find_batch_size and not getattr(args, "memory_budget", "") and longest_rows.of_plan(trainer) is None:
        return "auto_find_batch_size plans for the longest row, which is not known before the rows come"
    if not trainer.model_accepts_loss_kwargs or trainer.loss_is_scaled_for_ga is not None:
        return "the loss is not one over the targets of a window"
    reason = _overridden(trainer) or _asked_for(trainer) or _unusual_arguments(args) or _model(trainer)
    if not reason and args.weight_decay:
        decayed = trainer.get_decay_parameter_names(trainer.model)
        free = [name for name, p in trainer.model.named_parameters() if p.requires_grad and name not in decayed]
        reason = f"weight_decay is not for {free[0]}" if free else ""
    return reason


def _overridden(trainer: Any, methods: tuple[str, ...] = REPLACED) -> str:
    for name in methods:
        if name in vars(trainer):
            return f"{name} was replaced"
        for kind in type(trainer).__mro__:
            held = vars(kind).get(name)
            if held is None:
                continue
            origin = getattr(getattr(held, "__func__", held), "__module__", None)
            if kind.__module__ not in _KNOWN or origin not in _KNOWN:
                return f"{kind.__name__}.{name} is overridden"
            if kind.__module__.startswith("transformers."):
                break
    return ""


def _asked_for(trainer: Any) -> str:
    """Options given to the trainer outside of its arguments."""
    own = [id(made) for made in trainer._made]
    for name, value in {
        "optimizers": trainer.optimizer if id(trainer.optimizer) not in own else None,
        "a scheduler": trainer.lr_scheduler if id(trainer.lr_scheduler) not in own else None,
        "optimizer_cls_and_kwargs": trainer.optimizer_cls_and_kwargs,
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.label_smoother,
        "neftune_noise_alpha": trainer.neftune_noise_alpha,
    }.items():
        if value is not None:
            return f"{name} was given"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the loss has a router term"
    if getattr(trainer.args, "loss_type", "nll") != "nll":
        return f"loss_type={trainer.args.loss_type!r}"
    return ""


def _unusual_arguments(args: Any) -> str:
    config = args.accelerator_config
    if not config.use_seedable_sampler:
        return "accelerator_config has use_seedable_sampler=False"
    if config.gradient_accumulation_kwargs:
        return f"accelerator_config has gradient_accumulation_kwargs={config.gradient_accumulation_kwargs}"
    for name in _UNUSUAL:
        if value := getattr(args, name, None):
            return f"{name}={value}"
    if args.world_size > 1 and args.parallel_mode != transformers.training_args.ParallelMode.DISTRIBUTED:
        return f"{args.world_size} processes train without torch.distributed"
    if args.world_size > 1 and not args.average_tokens_across_devices:
        return "average_tokens_across_devices=False weighs the rows of each process on their own"
    try:
        _C.check_training_arguments(for_cpp(args))
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _model(trainer: Any) -> str:
    model = trainer.model
    levels = levels_of(model)
    base = levels[-1]
    engine = engine_of(base)
    if engine is None:
        return "the model has no engine: C++ does not know its family, or this library did not load it"
    for level in levels:
        if any((level._forward_hooks, level._forward_pre_hooks, level._backward_hooks, level._backward_pre_hooks)):
            return f"{type(level).__name__} has hooks"
        forward = vars(level).get("forward")
        if (
            forward is not None and not is_own_forward(forward) and not hasattr(level, "_original_forward")
        ):  # accelerate's autocast
            return f"the forward of {type(level).__name__} was replaced"
    if reason := pristine.why_not(engine, base, needs_gradients=True):
        return reason
    core, args = engine.core, trainer.args
    for option, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, option) and core.dtype != _C.dtype_on(str(core.device), dtype):
            return f"{option}=True, and the model computes in {core.dtype}. Load it with dtype={dtype}"
    active = {id(parameter) for parameter in engine.active_parameters()}
    if not active:
        return "no adapter is active"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (id(parameter) in active):
            return f"{name} is {'trainable' if parameter.requires_grad else 'frozen'}"
        if parameter.requires_grad and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            return f"{name} has hooks"
    return ""


def levels_of(model: Any) -> list[Any]:
    """[PEFT's model, its tuner, transformers' model], or only the last."""
    return [model, model.base_model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
