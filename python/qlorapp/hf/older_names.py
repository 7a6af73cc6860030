# SPDX-License-Identifier: Apache-2.0
"""Maps dropped names of TrainingArguments and SFTConfig to the present names."""

import os
from typing import Any

from .. import _C

#: {older name: present name}, with the same value.
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "warmup_ratio": "warmup_steps",  # below 1: a share of all steps
    "max_seq_length": "max_length",
    "use_liger": "use_liger_kernel",
    "torchdynamo": "torch_compile_backend",
}
#: {older switch: (present name, its value if the switch is on)}
_SWITCHES: dict[str, tuple[str, Any]] = {
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
    "adafactor": ("optim", "adafactor"),
}
#: {older name: why it has no effect now}
_WITHOUT_EFFECT = {
    "overwrite_output_dir": "a new run writes into the folder and overwrites files of the same name",
    "include_tokens_per_second": "include_num_input_tokens_seen logs tokens per second",
    "save_safetensors": "every file of weights is safetensors",
    "use_legacy_prediction_loop": "there is one evaluation loop",
    "push_to_hub_organization": "hub_model_id names the organization",
    "ray_scope": "it is an option of Trainer.hyperparameter_search",
    "num_of_sequences": "packs are filled from all rows",
    "chars_per_token": "packs are filled by tokens",
    "dataset_batch_size": "rows are tokenized by datasets.map",
    **dict.fromkeys(("fp16_opt_level", "half_precision_backend", "fp16_backend"), "torch.amp is the only backend"),
    **dict.fromkeys(
        ("tpu_num_cores", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "dispatch_batches", "split_batches"),
        "no launcher of this library needs it",
    ),
    "use_mps_device": "the model stays on the device that it was loaded on",
    **dict.fromkeys(
        ("use_ipex", "jit_mode_eval", "past_index", "mp_parameters", "tpu_metrics_debug"), "transformers 5 has no such option"
    ),
}
_OFF = (None, False, "", 0, -1)


def modern(where: str, known: set[str], options: dict[str, Any]) -> dict[str, Any]:
    """Options under the names in `known`. Logs each older name once. Leaves unknown names to the dataclass.

    @raises TypeError for an option that is given under two names.
    """
    given = {name: value for name, value in options.items() if name in known or not _is_older(name)}
    for name, value in options.items():
        if name in given or value in _OFF:
            continue
        if name == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = os.fspath(value)  # where transformers 5 reads it
            _C.log_warning_once(f"[{where}] logging_dir is the environment variable TENSORBOARD_LOGGING_DIR now; it is set.")
        elif name in _WITHOUT_EFFECT:
            _C.log_warning_once(f"[{where}] {name} has no effect: {_WITHOUT_EFFECT[name]}.")
        else:
            new, value = _SWITCHES[name] if name in _SWITCHES else (_RENAMED[name], value)
            if name == "warmup_ratio" and given.get(new):
                continue  # as in transformers 4: a number of steps wins over a share
            if new in given and name != "warmup_ratio":
                raise TypeError(f"[{where}] {name!r} and {new!r} are the same option. Give one of them.")
            _C.say_older_name(where, name, new)
            given[new] = value
    return given


def _is_older(name: str) -> bool:
    return name == "logging_dir" or name in _RENAMED or name in _SWITCHES or name in _WITHOUT_EFFECT
