# SPDX-License-Identifier: Apache-2.0
"""The modules that a model shows: Hugging Face's tree, names and shapes, with PEFT's adapters in it.

The C++ model computes a whole forward pass in one call; these modules hold the very tensors that it uses, so that
named_modules, named_parameters and state_dict look as they do there. Each linear layer can also be called by itself. Hooks on
them would never run during the model's forward pass, and are refused, as edits are (edits.py).
"""

import collections
import json
import logging
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from . import _C, nn
from .edits import Fixed, ModuleDict, ModuleList, Scaling, place
from .precision import own_dtypes

_log = logging.getLogger("qlorapp")
_S = TypeVar("_S", bound="_Shown")


def _refused(method: str) -> Any:
    """Stands for a hook method of modules that the compiled pass does not call.

    One kind is taken and dropped: scripts for checkpointed models make the embedding's output require a gradient by a hook of the
    name make_inputs_require_grad, which nothing needs here.
    """

    # Backward hooks need an output that is a tensor or a tuple of them: torch's rule, and a model's output is neither.
    runs = f"on the model (model.{method}) and on parameters" if "forward" in method else "on parameters"

    def register(self: torch.nn.Module, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
        if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
            _log.info(
                "[hooks] %s is not needed: a checkpointed block's adapters get their gradients without it.", hook.__name__
            )
            return RemovableHandle(collections.OrderedDict())
        raise NotImplementedError(
            f"[hooks] {method} on {type(self).__name__}: the hook would never run, as all blocks are computed in one call of C++. Hooks run {runs} "
            "(parameter.register_hook). To see inside, load the model by transformers and add adapters by get_peft_model: Trainer takes it, too."
        )

    register.__name__ = method
    return register


def say_that_adapters_stay(dtype: torch.dtype) -> None:
    _C.log_warning_once(
        f"[adapter] adapters stay float32: a cast to {dtype} rounds their values, and changes nothing else. Leave it out; they are a small "
        "part of the memory."
    )


class _Shown(Fixed):
    """A module that shows what C++ computes with."""

    #: Whether its weight is of the base model, which C++ has loaded. Parameters of adapters may be replaced.
    _is_base = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self._is_base and value is not self._parameters.get(name):
            raise NotImplementedError(
                f"[modules] weight of {type(self).__name__} cannot be replaced: C++ computes with the tensor that it has loaded. Write into it "
                "(module.weight.data.copy_(…)), or load a checkpoint that holds the other one."
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """to(), half() … of an adapter's part, as notebooks for QLoRA cast them: its memory and that of its gradient are C++'s."""
        weight = self._parameters.get("weight")
        if weight is None or self._is_base:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            cast = fn(weight)
            if cast.device != weight.device:
                raise ValueError(
                    f"[adapter] an adapter must stay on the model's device, {weight.device}; got {cast.device}. Give device_map= to "
                    "from_pretrained."
                )
            if cast.dtype != weight.dtype:
                say_that_adapters_stay(cast.dtype)
                weight.copy_(cast)
        return self

    register_forward_hook = _refused("register_forward_hook")
    register_forward_pre_hook = _refused("register_forward_pre_hook")
    register_full_backward_hook = _refused("register_full_backward_hook")
    register_full_backward_pre_hook = _refused("register_full_backward_pre_hook")
    register_backward_hook = _refused("register_backward_hook")


def _of_the_base(module: _S) -> _S:
    module._is_base = True
    return module


def is_of_the_base(module: torch.nn.Module) -> bool:
    """Does it show a weight of the frozen base?"""
    return isinstance(module, _Shown) and module._is_base


class Linear(_Shown, torch.nn.Linear):
    """torch's, shown."""


class Embedding(_Shown, torch.nn.Embedding):
    """torch's, shown."""


class RMSNorm(_Shown, torch.nn.RMSNorm):
    """torch's, shown."""

    _constants = {"eps": "C++ computes with rms_norm_eps of config.json, which chooses it."}  # noqa: RUF012


class Dropout(_Shown, torch.nn.Dropout):
    """torch's, shown."""

    _constants = {  # noqa: RUF012
        "p": "C++ computes with LoraConfig(lora_dropout=…), which chooses it. model.eval() turns dropout off."
    }


class Identity(_Shown, torch.nn.Identity):
    """torch's, shown."""


def four_bit_state(weight: _C.QuantizedTensor, prefix: str) -> dict[str, torch.Tensor]:
    """What bitsandbytes' state_dict has for a weight."""
    return dict(weight.named_tensors(prefix + "weight"))


class Linear4bit(_Shown, nn.Linear4bit):
    """A linear layer whose weight is stored in four bits; state_dict has bitsandbytes' keys."""

    def __init__(self, weight: _C.QuantizedTensor, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.quant_state = weight
        self._compute_dtype = compute_dtype
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight.packed, requires_grad=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The model's. Another one is said to have no effect."""
        return self._compute_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self._compute_dtype:
            _C.log_warning_once(
                f"[modules] compute_dtype={dtype} of a layer has no effect: the model computes in {self._compute_dtype}. Give dtype= or "
                "bnb_4bit_compute_dtype to from_pretrained."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with own_dtypes(x.device):
            return self.quant_state.linear(x)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update(four_bit_state(self.quant_state, prefix))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        own = dict(self.quant_state.named_tensors(prefix + "weight"))
        missing += [name for name in own if name not in state_dict]
        unexpected += [name for name in state_dict if name.startswith(prefix) and name not in own]
        if any(name not in state_dict for name in own):
            return
        for name, tensor in own.items():
            if state_dict[name].shape != tensor.shape and ".quant_state." not in name:
                errors.append(f"{name} must have shape {tuple(tensor.shape)}; got {tuple(state_dict[name].shape)}.")
                return
        text = next(bytes(value.cpu()) for name, value in state_dict.items() if name.startswith(f"{prefix}weight.quant_state."))
        mine = json.loads(bytes(next(value.cpu() for name, value in own.items() if ".quant_state." in name)))
        theirs = json.loads(text)
        kind = ("quant_type", "blocksize", "shape", "nested_blocksize")
        if any(mine.get(key) != theirs.get(key) for key in kind):
            errors.append(f"{prefix}weight is stored in another form: {theirs}; this model's is {mine}.")
            return
        state = self.quant_state
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"])
            state.absmax.copy_(state_dict[prefix + "weight.absmax"])
            if state.nested_absmax is not None and state.nested_offset is not None:
                state.nested_absmax.copy_(state_dict[prefix + "weight.nested_absmax"])
                state.nested_offset.fill_(theirs["nested_offset"])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.quant_state.quant_type}"


def check_targets(target_modules: Any, root: torch.nn.Module) -> None:
    """@raises ValueError for a list without a name, which would say that nothing is to be trained; with the names that there are."""
    if target_modules is None or len(target_modules) > 0:
        return
    kinds = (torch.nn.Linear, nn.Linear4bit)
    names = sorted(
        {name.rpartition(".")[2] for name, module in root.named_modules() if isinstance(module, kinds)} - {"lm_head"}
    )
    raise ValueError(
        f"[LoraConfig] target_modules must name at least one layer; got an empty list. The model has {', '.join(names)}; "
        "target_modules='all-linear' takes them all. Scripts find layers in four bits by isinstance(module, qlorapp.nn.Linear4bit)."
    )


def linear(weight: "torch.Tensor | _C.QuantizedTensor", compute_dtype: torch.dtype) -> torch.nn.Module:
    if isinstance(weight, _C.QuantizedTensor):
        return _of_the_base(Linear4bit(weight, compute_dtype))
    module = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    _of_the_base(module)
    return module


class LoraLayer(_Shown):
    """A linear layer with PEFT's names for its adapters. Called by itself it computes with the active one."""

    _constants = {"scaling": "C++ computes with that of the adapter's config. Give lora_alpha to LoraConfig."}  # noqa: RUF012

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = ModuleDict()
        self.lora_A = ModuleDict()
        self.lora_B = ModuleDict()
        self.lora_magnitude_vector = ModuleDict()
        self.r: dict[str, int] = {}
        self.lora_alpha: dict[str, float] = {}
        self.scaling: dict[str, float] = Scaling()
        self.active_adapters: list[str] = []

    def add(self, name: str, alpha: float, scaling: float, dropout: float, parameters: dict[str, torch.nn.Parameter]) -> None:
        """parameters: lora_A, lora_B and, with DoRA, lora_magnitude_vector."""
        place(self.lora_dropout, name, Dropout(dropout) if dropout > 0 else Identity())
        place(self.lora_A, name, _holding(parameters["lora_A"]))
        place(self.lora_B, name, _holding(parameters["lora_B"]))
        if "lora_magnitude_vector" in parameters:
            place(self.lora_magnitude_vector, name, Magnitude(parameters["lora_magnitude_vector"]))
        self.r[name], self.lora_alpha[name] = parameters["lora_A"].shape[0], alpha
        dict.__setitem__(self.scaling, name, scaling)
        self.lora_dropout[name].train(self.training)

    # --- what PEFT's layers tell

    merged = False

    @property
    def merged_adapters(self) -> list[str]:
        return []

    @property
    def active_adapter(self) -> list[str]:
        return self.active_adapters

    @property
    def disable_adapters(self) -> bool:
        """Does the base compute alone?"""
        return not self.active_adapters

    @property
    def weight(self) -> torch.Tensor:
        """Of the base."""
        return _weight_of(self.base_layer)

    @property
    def in_features(self) -> Any:
        return self.base_layer.in_features

    @property
    def out_features(self) -> Any:
        return self.base_layer.out_features

    def get_base_layer(self) -> torch.nn.Module:
        return self.base_layer

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """What this adapter adds to the weight, (out, in) in float32; DoRA's norm is left out, as in PEFT."""
        return _weight_of(self.lora_B[adapter]) @ _weight_of(self.lora_A[adapter]) * self.scaling[adapter]

    def remove(self, name: str) -> None:
        for held in (self.lora_dropout, self.lora_A, self.lora_B, self.lora_magnitude_vector):
            held._modules.pop(name, None)
        for known in (self.r, self.lora_alpha, self.scaling):
            dict.pop(known, name, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_layer(x)
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            dropped = self.lora_dropout[name](x.float())
            update = self.lora_B[name](self.lora_A[name](dropped)) * self.scaling[name]
            if name in self.lora_magnitude_vector:
                base = self.base_layer(dropped.to(x.dtype)).float()
                scale = _weight_of(self.lora_magnitude_vector[name]) / self._norm(name)
                update = (scale - 1) * base + scale * update
            y = y + update.to(x.dtype)
        return y

    @torch.no_grad()
    def _norm(self, name: str) -> torch.Tensor:
        a, b = _weight_of(self.lora_A[name]), _weight_of(self.lora_B[name])
        rows = self.base_layer(torch.eye(a.shape[1], device=a.device)).float().T
        norm: torch.Tensor = torch.linalg.norm(rows + self.scaling[name] * b @ a, dim=1)
        return norm


class Magnitude(_Shown):
    """DoRA's magnitude of one layer, (out)."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class ModulesToSave(_Shown):
    """The embedding table or the head with the copies that adapters train, under PEFT's names."""

    def __init__(self, original_module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = original_module
        self.modules_to_save = ModuleDict()
        self.active_adapters: list[str] = []

    def add(self, name: str, parameter: torch.nn.Parameter) -> None:
        if isinstance(self.original_module, torch.nn.Embedding):
            table = Embedding(parameter.shape[0], parameter.shape[1], device="meta")
            table.weight = parameter
            place(self.modules_to_save, name, table)
        else:
            place(self.modules_to_save, name, _holding(parameter))

    def remove(self, name: str) -> None:
        self.modules_to_save._modules.pop(name, None)

    @property
    def weight(self) -> torch.Tensor:
        return _weight_of(self._shown())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._shown()(x)
        return y

    def _shown(self) -> torch.nn.Module:
        for name in self.active_adapters:
            if name in self.modules_to_save:
                return self.modules_to_save[name]
        return self.original_module


def _weight_of(module: torch.nn.Module) -> torch.Tensor:
    weight: Any = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _holding(parameter: torch.nn.Parameter) -> Linear:
    module = Linear(parameter.shape[1], parameter.shape[0], bias=False, device="meta")
    module.weight = parameter
    return module


def _norm(weight: torch.Tensor, eps: float) -> RMSNorm:
    module = RMSNorm(weight.shape[0], eps=eps, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return _of_the_base(module)


class Group(_Shown):
    """A module that only holds others: the decoder, a block, an attention, an MLP."""


def build(root: Any, core: _C.CausalLM, rms_norm_eps: float) -> None:
    """Puts the frozen base under the module `root`: model.embed_tokens, model.layers.N.…, model.norm, lm_head."""
    root.model = Group()
    root.model.layers = ModuleList()
    for name, weight in core.named_weights():
        parent, leaf = _parent(root, name)
        if leaf == "embed_tokens":
            embedding = Embedding(weight.shape[0], weight.shape[1], device="meta")
            embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
            parent.add_module(leaf, _of_the_base(embedding))
        elif leaf == "lm_head" and core.tied:
            root.lm_head = _of_the_base(_holding(root.model.embed_tokens.weight))
        elif leaf.endswith("norm"):
            parent.add_module(leaf, _norm(weight, rms_norm_eps))
        else:
            parent.add_module(leaf, linear(weight, core.dtype))


def _parent(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that is to hold `name`, made where it is missing."""
    *path, leaf = name.split(".")
    module: Any = root
    for part in path:
        if part.isdigit():
            while len(module) <= int(part):
                place(module, str(len(module)), Group())
            module = module[int(part)]
        else:
            if not hasattr(module, part):
                module.add_module(part, Group())
            module = getattr(module, part)
    return module, leaf


def lora_layer(root: torch.nn.Module, name: str) -> LoraLayer:
    """The layer `name`, which gets a place for adapters around it if it has none yet."""
    parent, leaf = _parent(root, name)
    layer = getattr(parent, leaf)
    if not isinstance(layer, LoraLayer):
        layer = LoraLayer(layer).train(layer.training)
        place(parent, leaf, layer)
    return layer


def module_to_save(root: torch.nn.Module, name: str) -> ModulesToSave:
    """The same for the embedding table and the head."""
    parent, leaf = _parent(root, name)
    module = getattr(parent, leaf)
    if not isinstance(module, ModulesToSave):
        module = ModulesToSave(module).train(module.training)
        place(parent, leaf, module)
    return module


def unwrap(root: torch.nn.Module) -> None:
    """Takes the places of adapters away when there are no adapters any more."""
    for parent in list(root.modules()):
        for leaf, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                place(parent, leaf, child.base_layer)
            elif isinstance(child, ModulesToSave):
                place(parent, leaf, child.original_module)


def refresh_weights(root: torch.nn.Module, core: _C.CausalLM) -> None:
    """Shows the linear layers' weights again after an initialization has changed them."""
    for name, weight in core.named_weights():
        parent, leaf = _parent(root, name)
        layer = getattr(parent, leaf)
        if isinstance(weight, _C.QuantizedTensor) or name.endswith("_proj"):
            if isinstance(layer, LoraLayer):
                place(layer, "base_layer", linear(weight, core.dtype))
            else:
                place(parent, leaf, linear(weight, core.dtype))
