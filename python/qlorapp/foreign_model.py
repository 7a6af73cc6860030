# SPDX-License-Identifier: Apache-2.0
"""A model of transformers with PEFT's adapters, as Trainer needs it: what is trained, where it is, and how it is saved.

Forward and backward are transformers' and PEFT's own. Adapters move into one buffer of this library's (AdapterArena), so that its
clipping, its optimizers (8-bit ones included), its loss scale and its checkpoints serve them as they serve native models.
"""

import hashlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from .hf_layer import elements_in_four_bits

_SAMPLES = 4096  # bytes that are looked at of each frozen tensor


class ForeignModel:
    """model: transformers' model with adapters by PEFT.  @raises TypeError for any other."""

    def __init__(self, model: Any) -> None:
        if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
            raise TypeError(
                f"[Trainer] the model must have adapters: a qlorapp model, or one of transformers after get_peft_model(); got "
                f"{type(model).__name__}. For a loop of your own none of this is needed."
            )
        self.model = model
        self.lm = model.get_base_model()
        self._held: list[str] = []

    @property
    def name_or_path(self) -> str:
        return str(getattr(self.lm, "name_or_path", ""))

    @property
    def device(self) -> torch.device:
        return torch.device(self.lm.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.lm.dtype
        return dtype

    @property
    def line(self) -> str:
        """Which way its steps go, for people."""
        return (
            f"{type(self.lm).__name__} is transformers' own code: forward and backward run there, by torch's autograd; batches, optimizer, "
            "schedule, evaluation and checkpoints are this library's."
        )

    def takes_count(self) -> bool:
        """Does its forward divide the loss by num_items_in_batch? transformers' rule."""
        if (accepts := getattr(self.lm, "accepts_loss_kwargs", None)) is not None:
            return bool(accepts)
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.lm.forward).parameters.values())

    def enable_checkpointing(self, options: dict[str, Any] | None) -> None:
        """transformers' gradient checkpointing. Without re-entrance, so that inputs need no gradient."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False, **(options or {})})
        if (options or {}).get("use_reentrant"):
            self.model.enable_input_require_grads()

    def make_core(self, arguments: str, hooks: dict[str, Callable[..., Any]]) -> _C.Trainer:
        """The C++ trainer around it; arguments: TrainingArguments as JSON. Trainable parameters move into its arena."""
        trained = self._trained()
        self._held = [name for name, _ in trained]
        files = {"save_adapter": self._save_adapter, "load_adapter": self._load_adapter}
        half = self.dtype == torch.float16
        return _C.Trainer(trained, arguments, self._base_parameter_count(), self._fingerprint(), half, {**hooks, **files})

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _rebind(self) -> None:
        if self._held and self._held != [name for name, _ in self._trained()]:
            raise ValueError(
                "[Trainer] other parameters are trainable than those that this trainer was made for. Make that adapter active again, or "
                "make a new trainer."
            )

    def _memory_changed(self) -> None:
        """Its modules are where they were."""

    def _base(self) -> list[tuple[str, torch.Tensor]]:
        """Frozen tensors that belong to no adapter."""
        return [
            (name, parameter) for name, parameter in self.model.named_parameters()
            if not parameter.requires_grad and ".lora_" not in name and "modules_to_save" not in name
        ]  # fmt: skip

    def _base_parameter_count(self) -> int:
        """Without embeddings, a four-bit weight by its elements."""
        tables = {id(m.weight) for m in self.lm.modules() if isinstance(m, torch.nn.Embedding)}
        four_bit = elements_in_four_bits(self.lm)
        return sum(four_bit.get(id(p), p.numel()) for _, p in self._base() if id(p) not in tables)

    def _fingerprint(self) -> int:
        """64 bits over names, shapes and some bytes of the frozen tensors: it finds mistakes, not attacks."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in self._base():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().view(torch.uint8)
            digest.update(some.cpu().numpy().tobytes())
        return int.from_bytes(digest.digest(), "little")

    # --- files, by PEFT

    def _adapter_name(self) -> str:
        name = self.model.active_adapter
        return str(name if isinstance(name, str) else name[0])

    def _save_adapter(self, folder: str) -> None:
        self.model.save_pretrained(folder, selected_adapters=[self._adapter_name()])

    def _load_adapter(self, folder: str) -> None:
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        name = self._adapter_name()
        place = folder if name == "default" else os.path.join(folder, name)  # as save_pretrained lays them out
        set_peft_model_state_dict(self.model, load_peft_weights(place, device="cpu"), adapter_name=name)
