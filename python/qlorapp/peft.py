# SPDX-License-Identifier: Apache-2.0
"""PEFT's way to adapters: get_peft_model, PeftModel, PeftConfig, prepare_model_for_kbit_training."""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from . import adapter_status, hf_models, saving
from .hub import adapter_folder
from .layers import seed_from_torch
from .merge_in_place import TO_A_FOLDER, merge_and_unload
from .model_adapters import LoadResult, is_of_an_adapter
from .modeling import CausalLM, refuse_unknown
from .peft_config import LoraConfig, PeftConfig, as_lora_config

_log = logging.getLogger("qlorapp")

_LOAD_IGNORES = {
    "torch_device": "the adapter is on the model's device",
    "autocast_adapter_dtype": "adapters are float32",
    "ephemeral_gpu_offload": "the model is on one device",
    "low_cpu_mem_usage": "",
    "ignore_mismatched_sizes": "",
    "config": "the folder's adapter_config.json says what the adapter is",
    "token": "",
    "revision": "",
    "local_files_only": "",
    "subfolder": "",
    "cache_dir": "",
    "torch_dtype": "adapters are float32",
    "dtype": "adapters are float32",
    "device_map": "the adapter is on the model's device",
    "max_memory": "the model is on one device",
    "offload_folder": "nothing is offloaded",
    "offload_dir": "nothing is offloaded",
    "use_safetensors": "",
}
_MERGE = (
    f"an adapter is not merged to be taken out again. merge_and_unload() merges into weights of 16 or 32 bits; {TO_A_FOLDER}"
)
#: What PEFT's models have and this does not, and why.
_REFUSED = {
    "merge_adapter": _MERGE,
    "unmerge_adapter": "nothing is ever merged here.",
    "add_weighted_adapter": "one adapter is active at a time. PEFT combines saved adapters.",
    "push_to_hub": "save_pretrained() writes the folder; huggingface_hub's upload_folder() takes it from there.",
    "set_requires_grad": "set_adapter() says which adapter trains.",
}


class LoraModel(torch.nn.Module):
    """The level between PeftModel and the model, for the names alone: base_model.model.…"""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            if name in _REFUSED:
                raise NotImplementedError(f"[PeftModel] {name}: {_REFUSED[name]}") from None
            return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def active_adapters(self) -> list[str]:
        """As PEFT has it; CausalLM's, as transformers has it, is a method."""
        return [self.model.core.active_adapter] if self.model.core.active_adapter else []

    @property
    def active_adapter(self) -> str:
        return self.model.core.active_adapter

    def disable_adapter_layers(self) -> None:
        """The base model computes alone until enable_adapter_layers()."""
        self.model.disable_adapters()

    def enable_adapter_layers(self) -> None:
        """The active adapter computes again."""
        self.model.enable_adapters()

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> CausalLM:
        """The base with the active adapter, or with adapter_names, in its weights. For weights that are not in four bits."""
        model: Any = self.model
        return merge_and_unload(model, [model.core.active_adapter] if adapter_names is None else adapter_names, safe_merge)


class PeftModel(torch.nn.Module):
    """A CausalLM with one or several adapters under PEFT's names. What it does not have itself it asks the model for."""

    def __new__(cls, model: Any = None, peft_config: Any = None, adapter_name: str = "default", **options: Any) -> Any:
        """PEFT's own for a model of transformers."""
        if peft_config is not None and not isinstance(model, CausalLM):
            return hf_models.get_peft_model(model, peft_config, None, adapter_name=adapter_name, **options)
        return super().__new__(cls)

    def __init__(
        self,
        model: CausalLM,
        peft_config: LoraConfig | None = None,
        adapter_name: str = "default",
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
    ) -> None:
        """With peft_config the model gets that adapter, as by get_peft_model."""
        super().__init__()
        if not isinstance(model, CausalLM):
            raise TypeError(f"[PeftModel] model must be a qlorapp.CausalLM; got {type(model).__name__}. Give peft_config too.")
        self.base_model = LoraModel(model)
        self.training = model.training
        if peft_config is not None:
            peft_config = as_lora_config(peft_config)
            model.add_adapters(peft_config, None, adapter_name)
            model.set_adapter(adapter_name, trainable=not peft_config.inference_mode)
            self.train()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def get_base_model(self) -> CausalLM:
        return self.base_model.model

    def __setattr__(self, name: str, value: Any) -> None:
        """The head is the model's: a second one here would be listed, and never called."""
        if name == "lm_head":
            self.get_base_model().lm_head = value
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As CausalLM.forward."""
        return self.base_model(*args, **kwargs)

    def prepare_model_for_gradient_checkpointing(self, model: Any) -> None:
        """Nothing to do: see CausalLM.enable_input_require_grads."""

    # --- which adapters there are

    @property
    def active_adapter(self) -> str:
        return self.base_model.model.core.active_adapter

    @property
    def active_adapters(self) -> list[str]:
        return self.base_model.active_adapters

    @property
    def peft_type(self) -> str:
        """The kind of all adapters here. It equals PEFT's PeftType.LORA."""
        return "LORA"

    def get_layer_status(self) -> list[adapter_status.TunerLayerStatus]:
        """Of every layer with adapters, as PEFT's get_layer_status."""
        return adapter_status.of_layers(self.base_model)

    def get_model_status(self) -> adapter_status.TunerModelStatus:
        """Of the model with its adapters, as PEFT's get_model_status."""
        return adapter_status.of_model(self)

    @property
    def active_peft_config(self) -> LoraConfig:
        config: LoraConfig = self.peft_config[self.active_adapter]
        return config

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Makes this adapter the one that computes and, unless inference_mode, trains. The others are frozen."""
        self.base_model.model.set_adapter(adapter_name, trainable=not inference_mode)

    def add_adapter(
        self,
        adapter_name: str,
        peft_config: LoraConfig,
        low_cpu_mem_usage: bool = False,
        autocast_adapter_dtype: bool = True,
        seed: int | None = None,
    ) -> None:
        """A new adapter beside those that are there. It neither computes nor trains until set_adapter(adapter_name)."""
        self.base_model.model.add_adapters(as_lora_config(peft_config), seed, adapter_name)

    def delete_adapter(self, adapter_name: str) -> None:
        """If it was the active one, the first of the others becomes that."""
        self.base_model.model.delete_adapter(adapter_name)

    def load_adapter(
        self, model_id: str | os.PathLike[str], adapter_name: str = "default", is_trainable: bool = False, **options: Any
    ) -> LoadResult:
        """A PEFT folder as an adapter of this name, which set_adapter() makes active. Without is_trainable in evaluation mode."""
        model = self.base_model.model
        refuse_unknown("load_adapter", options, _LOAD_IGNORES, self.load_adapter)
        loaded = model.load_adapter(adapter_folder(model_id, **options), adapter_name)
        model.set_trainable(adapter_name, is_trainable)
        if not is_trainable:
            self.eval()
        return loaded

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model, for as long as the block runs."""
        with self.base_model.model.disable_adapter():
            yield

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As CausalLM.load_state_dict, with PEFT's names."""
        if assign:
            raise ValueError(
                "[load_state_dict] assign=True is not supported: C++ holds the tensors. Values are copied into them."
            )
        self.base_model.model._rebind()
        return super().load_state_dict(state_dict, strict)

    def unload(self) -> CausalLM:
        """The base model without any adapter."""
        model = self.base_model.model
        for name in list(model.peft_config):
            model.delete_adapter(name)
        return model

    # --- files

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **ignored: Any,
    ) -> None:
        """adapter_model.safetensors and adapter_config.json, which PEFT and vLLM load. Nothing else is ever written.

        The adapter "default" goes into the folder itself, others into folders of their names below it.
        """
        if not safe_serialization:
            raise ValueError("[save_pretrained] adapters are written as safetensors only. Leave out safe_serialization=False.")
        if save_embedding_layers is True:
            raise ValueError(
                "[save_pretrained] save_embedding_layers=True is not supported: the tables are saved with the adapter if it trains "
                "them. Name them in modules_to_save."
            )
        if ignored.pop("push_to_hub", False):
            raise ValueError(f"[save_pretrained] push_to_hub is not supported: {_REFUSED['push_to_hub']}")
        if ignored.pop("path_initial_model_for_weight_conversion", None) is not None:
            raise ValueError(
                "[save_pretrained] path_initial_model_for_weight_conversion is not supported: the difference would belong to the float "
                "base, not to the four-bit one. Save the base that the initialization left, get_base_model().save_pretrained()."
            )
        refuse_unknown("save_pretrained", ignored, saving.IGNORES, self.save_pretrained)
        model = self.base_model.model
        for name in list(model.peft_config) if selected_adapters is None else selected_adapters:
            if name not in model.peft_config:
                raise ValueError(f"[save_pretrained] there is no adapter {name!r}; the model has {list(model.peft_config)}.")
            if is_main_process:
                if state_dict is not None:
                    model._rebind(name)
                    own = model.core.adapter_tensors(name)
                    saving.refuse_other_values(state_dict, (((file, model.full_name(file, name)), held) for file, held in own))
                model.save_adapter(pathlib.Path(save_directory) / ("" if name == "default" else name), name)

    @classmethod
    def from_pretrained(
        cls,
        model: "CausalLM | PeftModel",
        model_id: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = False,
        **options: Any,
    ) -> "PeftModel":
        """The model with the adapter of a PEFT folder: for use, in evaluation mode, unless is_trainable."""
        if not isinstance(model, (CausalLM, PeftModel)):
            foreign = hf_models.load_adapter(model, model_id, adapter_name=adapter_name, is_trainable=is_trainable, **options)
            return cast(PeftModel, foreign)
        wrapped = model if isinstance(model, PeftModel) else cls(model)
        wrapped.load_adapter(model_id, adapter_name, is_trainable, **options)
        wrapped.set_adapter(adapter_name, inference_mode=not is_trainable)
        return wrapped.train(is_trainable)


#: PEFT's name for the class of causal language models. It is what type(model).__name__ says, too: transformers' pipelines go by it.
PeftModelForCausalLM = PeftModel
PeftModel.__name__ = "PeftModelForCausalLM"


def get_peft_model(
    model: CausalLM,
    peft_config: LoraConfig,
    adapter_name: str = "default",
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
    seed: int | None = None,
) -> PeftModel:
    """Adds a trainable adapter to `model` and returns it under PEFT's names, in training mode.

    A is random and B zero, as in PEFT, or as init_lora_weights says. The values come from torch's generator (torch.manual_seed)
    unless `seed` is given. A model with adapters gets one more; an adapter of this name is made anew, which is said, as PEFT does.
    """
    if mixed:
        raise ValueError("[get_peft_model] mixed=True is not supported: all adapters are LoRA. Leave it out.")
    if not isinstance(model, (CausalLM, PeftModel)):
        return hf_models.get_peft_model(
            model, peft_config, seed, adapter_name=adapter_name, autocast_adapter_dtype=autocast_adapter_dtype
        )
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    peft_config = as_lora_config(peft_config)
    if model.peft_config:
        again = adapter_name in model.peft_config
        _log.warning(
            "[get_peft_model] the model has adapters already, %s: %s. Call unload() first for a model with the new one alone.",
            list(model.peft_config),
            f"{adapter_name!r} is made anew, and what it has learnt is dropped"
            if again
            else f"{adapter_name!r} comes beside them",
        )
        if again:
            seed = seed_from_torch() if seed is None else seed
            trial = f"{adapter_name} anew"
            model.add_adapters(peft_config, seed, trial)  # refuses what does not fit, before anything is dropped
            model.delete_adapter(trial)
            model.delete_adapter(adapter_name)
        model.enable_adapters()
    model.add_adapters(peft_config, seed, adapter_name)
    model.set_adapter(adapter_name, trainable=not peft_config.inference_mode)
    return PeftModel(model).train()


def get_peft_model_state_dict(
    model: PeftModel, state_dict: dict[str, torch.Tensor] | None = None, adapter_name: str = "default", **ignored: Any
) -> dict[str, torch.Tensor]:
    """What a file of this adapter holds, by the names that it has there; `state_dict` may be model.state_dict()."""
    refuse_unknown(
        "get_peft_model_state_dict",
        ignored,
        {"unwrap_compiled": "", "save_embedding_layers": "tables that the adapter trains are part of it"},
        get_peft_model_state_dict,
    )
    if not isinstance(model, PeftModel):
        return hf_models.adapter_state_dict(model, state_dict, adapter_name)
    lm = model.get_base_model()
    lm._rebind(adapter_name)
    tensors = {name: tensor.detach() for name, tensor in lm.core.adapter_tensors(adapter_name)}
    if state_dict is None:
        return tensors
    return {name: state_dict[lm.full_name(name, adapter_name)] for name in tensors}


def set_peft_model_state_dict(
    model: PeftModel, peft_model_state_dict: dict[str, torch.Tensor], adapter_name: str = "default"
) -> LoadResult:
    """Copies values into an adapter by the names of its file, each of its shape, all or none.

    Returns (missing_keys, unexpected_keys): the adapter's parameters that got no value and stay, and what is not the adapter's. Both are
    said as well.  @raises KeyError where nothing is the adapter's; ValueError for another shape.
    """
    if not isinstance(model, PeftModel):
        return hf_models.set_adapter_state_dict(model, peft_model_state_dict, adapter_name)
    lm = model.get_base_model()
    lm._rebind(adapter_name)
    tensors = dict(lm.core.adapter_tensors(adapter_name))
    missing = [lm.full_name(name, adapter_name) for name in tensors if name not in peft_model_state_dict]
    unknown = [name for name in peft_model_state_dict if name not in tensors]
    given = {name: value for name, value in peft_model_state_dict.items() if name in tensors}
    if unknown and not given:
        raise KeyError(
            f"[set_peft_model_state_dict] names must be those of get_peft_model_state_dict, as {next(iter(tensors))!r}; got {unknown[0]!r} and "
            "others, none of them the adapter's."
        )
    if missing or unknown:
        _log.warning(
            "[set_peft_model_state_dict] %d of %d parameters of %r get no value and stay (%s); %d names are not the adapter's (%s).",
            len(missing), len(tensors), adapter_name, ", ".join(missing[:3]), len(unknown), ", ".join(unknown[:3]),
        )  # fmt: skip
    for name, value in given.items():
        if value.shape != tensors[name].shape:
            raise ValueError(
                f"[set_peft_model_state_dict] {name} must have shape {tuple(tensors[name].shape)}; got {tuple(value.shape)}."
            )
    with torch.no_grad():
        for name, value in given.items():
            tensors[name].copy_(value)
    return LoadResult(missing, unknown)


def prepare_model_for_kbit_training(
    model: CausalLM, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> CausalLM:
    """Freezes the base, of any family, and turns checkpointing on.

    Unlike PEFT's it leaves norms, embeddings and head in 16 bits: norms and softmax are computed in float32 whatever they are
    stored in, and float32 copies of embeddings and head would cost 2 GB at 8 billion parameters.
    """
    for name, parameter in model.named_parameters():
        if not is_of_an_adapter(name):
            parameter.requires_grad_(False)
    if use_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            model.enable_input_require_grads()  # without it a re-entrant block of a frozen base computes no gradient
    return model


__all__ = [
    "LoraModel",
    "PeftConfig",
    "PeftModel",
    "PeftModelForCausalLM",
    "get_peft_model",
    "get_peft_model_state_dict",
    "prepare_model_for_kbit_training",
    "set_peft_model_state_dict",
]
