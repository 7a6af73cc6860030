# SPDX-License-Identifier: Apache-2.0
"""What from_pretrained is told beside what it loads: options that change nothing here, those that are refused, and config=."""

import copy
import logging
import os
from typing import Any

from .model_config import ModelConfig

_log = logging.getLogger("qlorapp")

#: {option: why it has no effect; empty: it never had one on results}.
IGNORES = {
    "attn_implementation": "",  # said by from_pretrained, where the model is computed here
    "use_flash_attention_2": "the fastest attention of the device is always used",
    "low_cpu_mem_usage": "",
    "use_safetensors": "",
    "max_memory": "the model is on one device",
    "load_in_8bit": "",
    "offload_folder": "nothing is offloaded",
    "offload_state_dict": "nothing is offloaded",
    "offload_buffers": "nothing is offloaded",
    "use_auth_token": "",
    "output_attentions": "attention scores are never formed",
    "return_dict": "",
    "force_download": "files are taken from the cache if they are those of the hub",
    "resume_download": "",
    "proxies": "huggingface_hub takes them from HTTPS_PROXY",
    "pretraining_tp": "products are never split",
    "ignore_mismatched_sizes": "a weight of another shape is an error",
    "variant": "",
    "state_dict": "",
    "code_revision": "code of a checkpoint is never run",
    "from_tf": "",
    "from_flax": "",
    "gguf_file": "",
    "output_loading_info": "",
    "weights_only": "",
}
#: {option: (the values that mean nothing, what to do instead)}.
_REFUSES: dict[str, tuple[tuple[Any, ...], str]] = {
    "return_dict": ((None, True), "Give return_dict=False to the call of the model."),
    "variant": (
        (None, ""),
        "Weights are read from model.safetensors and the files of its index. Rename them, or leave it out.",
    ),
    "state_dict": ((None,), "Load the folder, then model.load_state_dict(state_dict)."),
    "from_tf": ((None, False), "Convert the weights to safetensors with transformers."),
    "from_flax": ((None, False), "Convert the weights to safetensors with transformers."),
    "gguf_file": ((None,), "Take the safetensors that the file was made from."),
    "output_loading_info": ((None, False), "Weights that are missing or have another shape are an error. Leave it out."),
}
#: Keys of config.json that decide what is computed, by any name that a family has for them.
_STRUCTURE = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "partial_rotary_factor",
    "n_embd", "n_layer", "n_head", "n_inner", "activation_function",
}  # fmt: skip
#: Keys that say where a config comes from, or that other options decide.
_ASIDE = {
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "quantization_config",
    "pretraining_tp",
    "return_dict",
}


def refuse_unsupported(options: dict[str, Any]) -> None:
    """@raises ValueError for an option whose value asks for something that is not built."""
    for name, (neutral, instead) in _REFUSES.items():
        value = options.get(name)
        if not any(value is known or value == known for known in neutral if type(value) is type(known)):
            kind = type(value).__name__ if name == "state_dict" else repr(value)
            raise ValueError(f"[from_pretrained] {name}={kind} is not supported. {instead}")


def config_values(config: Any) -> dict[str, Any]:
    """What a config says, be it transformers', this library's or a dict."""
    if isinstance(config, dict):
        return config
    if hasattr(config, "to_dict"):
        values: dict[str, Any] = config.to_dict()
        return values
    raise TypeError(
        f"[from_pretrained] config must be a config of transformers, model.config or a dict; got {type(config).__name__}."
    )


def take_config(given: Any, own: ModelConfig, folder: str | os.PathLike[str]) -> None:
    """Puts into a folder's config what config= changes of it.

    @raises ValueError where that would be another model than the folder's: its weights would not fit, or compute another thing.
    """
    values, stored = config_values(given), own.to_dict()
    if not isinstance(given, (dict, ModelConfig)) and values.get("model_type") == stored.get("model_type"):
        stored = type(given).from_pretrained(folder).to_dict()  # with transformers' defaults and spellings, as the given one
    changed = [
        key for key, value in values.items()
        if not key.startswith("_") and key not in _ASIDE and value != stored.get(key)
    ]  # fmt: skip
    if other := [key for key in changed if key in _STRUCTURE]:
        key = other[0]
        raise ValueError(
            f"[from_pretrained] config must be of the model in {os.fspath(folder)}: {key} is {values[key]!r} in it, and {stored.get(key)!r} in "
            "the folder. Leave out config, or change config.json if it is wrong."
        )
    for key in changed:
        setattr(own, key, values[key])
    if dtype := values.get("dtype") or values.get("torch_dtype"):
        own.dtype = dtype  # what "auto" means
    if said := [key for key in changed if key != "use_cache"]:
        _log.warning("[from_pretrained] of config, %s can be read at model.config and has no other effect.", ", ".join(said))


def foreign_config(given: Any) -> Any:
    """The same for a model that transformers computes: it takes all of the config. How it is quantized is told beside it."""
    if not isinstance(given, (dict, ModelConfig)):
        own = copy.deepcopy(given)
        if hasattr(own, "quantization_config"):
            del own.quantization_config
        return own
    from transformers import AutoConfig

    values = {name: value for name, value in config_values(given).items() if name != "quantization_config"}
    return AutoConfig.for_model(values.pop("model_type"), **values)
