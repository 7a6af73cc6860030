# SPDX-License-Identifier: Apache-2.0
"""Methods of transformers' Trainer that have no part here: whoever overrides one expects it to be called, so it is refused by name.

tests/python/test_trainer_overrides.py goes through every method of transformers' Trainer: it is called here, or people call it, or
it is in this table with what to do instead.
"""

import types
from typing import Any

from .peft import PeftModel

_LOOP = "the loop runs in C++. Use a TrainerCallback, or override training_step, evaluate, log or save_model"
_CHECKPOINTS = "checkpoints are written and read in C++. Override save_model, which is called for each of them, or use on_save of a TrainerCallback"
_MODEL = "the model is used as it is given, on its device. Prepare it before the trainer is made"
_GRADIENTS = (
    "gradients are clipped at max_grad_norm. Set it to 0 and clip in the step() of an optimizer of your own, optimizers=(…, …)"
)
_COUNTS = "tokens and operations are counted in C++. Add your own figures in log"
_PARALLEL = "training runs in one process on one device. Leave it out"

#: {method: why it is never called, and the way out}
NEVER_CALLED: dict[str, str] = {
    **dict.fromkeys(
        ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training",
         "_maybe_log_save_evaluate", "_validate_args", "_issue_warnings_after_load", "_update_auto_batch_size"), _LOOP,
    ),
    **dict.fromkeys(
        ("_save_checkpoint", "_get_output_dir", "_save_rng_state", "_save_optimizer_and_scheduler", "_save_scaler",
         "_load_from_checkpoint", "_load_rng_state", "_load_optimizer_and_scheduler", "_load_scaler", "_load_callback_state"),
        _CHECKPOINTS,
    ),
    **dict.fromkeys(
        ("_wrap_model", "_move_model_to_device", "create_accelerator_and_postprocess", "_build_accelerator_args"), _MODEL
    ),
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm"), _GRADIENTS),
    **dict.fromkeys(("store_flos", "floating_point_ops", "_track_num_input_tokens"), _COUNTS),
    **dict.fromkeys(
        ("_prepare_context_parallel_inputs", "get_sp_size", "get_cp_size", "get_tp_size", "_defer_fsdp_gradient_reduction",
         "_sync_replicated_trainable_parameters", "_mixed_mesh_grad_norm", "_has_mixed_mesh_grads"), _PARALLEL,
    ),
    "_get_dataloader": "batches are made in get_train_dataloader and get_eval_dataloader. Override these",
    "_evaluate": "the loop calls evaluate. Override that",
    "_determine_best_metric": "metric_for_best_model and greater_is_better decide. Add your own metric in evaluate, and name it there",
    "_load_best_model": "load_best_model_at_end does it in C++. Leave that False, and load after train()",
    "_get_learning_rate": "the rate that a step used is logged. Add another in log, or override create_scheduler",
    "set_initial_training_values": "num_train_epochs, max_steps and the length of get_train_dataloader decide. Set these",
    "get_total_train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps decide. Set these",
}  # fmt: skip
#: The same, of what a run does not depend on: said, not refused.
WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        ("create_model_card", "init_hf_repo", "_push_from_checkpoint", "_finish_current_push"), "nothing here uploads"
    ),
    **dict.fromkeys(
        ("_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint"), "there is no hyper-parameter search"
    ),
}


#: Of TRL's SFTTrainer.
NEVER_CALLED_BY_SFT: dict[str, str] = {
    **NEVER_CALLED,
    **dict.fromkeys(
        ("_prepare_dataset", "_prepare_non_packed_dataloader", "_prepare_packed_dataloader"),
        "rows are read and tokenized as they come in. Prepare them yourself, and set dataset_kwargs={'skip_prepare_dataset': True}",
    ),
    "_create_model_from_path": "a name is loaded by AutoModelForCausalLM.from_pretrained. Load the model yourself, and pass it",
}


def check_overrides(trainer: Any, never_called: dict[str, str]) -> None:
    """@raises TypeError for the first method that would never be called. No class of this library has one of these names."""
    for name, instead in never_called.items():
        if hasattr(trainer, name):
            raise TypeError(f"[Trainer] {type(trainer).__name__}.{name} would never be called: {instead}.")
    for name, instead in WITHOUT_EFFECT.items():
        if hasattr(trainer, name):
            trainer._say_once(f"{name} is never called: {instead}.")


def overrides_of_the_model(model: Any, parameters: list[Any]) -> list[str]:
    """What a script has hung on a native model and on what it trains: the C++ loop calls neither forward nor autograd.

    Modules inside are no matter: their hooks are refused (module_tree.py).
    """
    levels = [model, model.base_model, model.get_base_model()] if isinstance(model, PeftModel) else [model]
    found = {
        "model.forward": any(
            "forward" in vars(level)
            and vars(level)["forward"] != types.MethodType(type(level).forward, level)
            and not hasattr(level, "_original_forward")  # accelerate's, which computes the same under autocast
            for level in levels
        ),
        "forward hooks": any(level._forward_hooks or level._forward_pre_hooks for level in levels),
        "backward hooks": any(level._backward_hooks or level._backward_pre_hooks for level in levels),
        "hooks on parameters": any(
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters
        ),
    }
    return [name for name, is_there in found.items() if is_there]
