# SPDX-License-Identifier: Apache-2.0
"""config.json as transformers' models show it, and the small methods that scripts for transformers call on a model."""

import json
import os
import pathlib
import types
from typing import Any

import torch

from . import _C
from .field_table import plain

#: What transformers' configs have whatever the file says, and what holds here.
_FIXED: dict[str, Any] = {
    "is_encoder_decoder": False,
    "return_dict": True,
    "use_return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "_attn_implementation": "sdpa",
}
#: Set to another value by scripts, and what happens all the same.
_WITHOUT_EFFECT = {
    "output_attentions": "attention is computed without its matrix. Load the model by transformers for it.",
    "output_hidden_states": "the model returns its loss and logits. Load it by transformers for the states between.",
    "return_dict": "an output is a mapping and a tuple at once; model(…, return_dict=False) gives a tuple.",
}
#: {older or newer name: the one that is stored}
_SAME = {"torch_dtype": "dtype", "name_or_path": "_name_or_path", "rope_scaling": "rope_parameters"}


class ModelConfig(types.SimpleNamespace):
    """config.json as attributes, with `use_cache`, which notebooks set; generation always uses its cache."""

    def __getattr__(self, name: str) -> Any:
        """What the file does not have and scripts read."""
        known = self.__dict__
        if name in _FIXED:
            return _FIXED[name]
        if name == "rope_theta":  # of a file by version 5
            return (known.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        if _SAME.get(name) in known:
            return known[_SAME[name]]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WITHOUT_EFFECT and value not in (None, _FIXED[name]):
            _C.log_warning_once(f"[config] {name}={value!r} has no effect: {_WITHOUT_EFFECT[name]}")
        super().__setattr__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or the default where there is none."""
        return getattr(self, name, default)

    def update(self, config_dict: dict[str, Any]) -> None:
        """Sets these attributes."""
        for name, value in config_dict.items():
            setattr(self, name, value)

    def describe(self, name_or_path: str, dtype: torch.dtype) -> None:
        """What is known once the model is loaded."""
        self.__dict__.pop("torch_dtype", None)
        self._name_or_path, self.dtype = name_or_path, dtype

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types: dtypes and the quantization's options as transformers writes them."""
        values = dict(vars(self))
        for name in ("dtype", "quantization_config"):
            if name in values:
                values[name] = plain(values[name])
        return values

    to_diff_dict = to_dict  # what the file says and no more: there are no class defaults to leave out

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **ignored: Any) -> None:
        """config.json into the folder.  @raises ValueError for push_to_hub."""
        if push_to_hub:
            raise ValueError("[save_pretrained] a config is written into a folder; got push_to_hub=True. Leave out the option.")
        folder = pathlib.Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        written = {name: value for name, value in self.to_dict().items() if not name.startswith("_")}
        (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def get_text_config(self, decoder: bool = False) -> "ModelConfig":
        """Itself: there are no other parts."""
        return self


class TransformersMethods:
    """Mixed into CausalLM: methods that need nothing of C++."""

    main_input_name = "input_ids"
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    model: Any
    lm_head: Any
    #: What add_model_tags was given.
    model_tags: list[str] | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.model.embed_tokens.weight.shape[0])

    @property
    def base_model(self) -> Any:
        """The part below the head."""
        return self.model

    def get_decoder(self) -> Any:
        """The part below the head."""
        return self.model

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: a tied head is the table itself, from loading on."""

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Kept in model_tags, as transformers keeps them for the page of a hub that nothing here writes."""
        _C.log_warning_once(
            "[add_model_tags] tags are kept in model.model_tags and written nowhere: no model card is made here."
        )
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *([tags] if isinstance(tags, str) else tags)]))

    def compute_transition_scores(
        self, sequences: torch.Tensor, scores: Any, beam_indices: Any = None, normalize_logits: bool = False
    ) -> torch.Tensor:
        """(B, new tokens): of each token that generate() chose, its score, or with normalize_logits its log-probability."""
        if beam_indices is not None:
            raise ValueError("[compute_transition_scores] there is no beam search; got beam_indices. Leave them out.")
        stacked = torch.stack(tuple(scores), dim=1)
        if normalize_logits:
            stacked = stacked.log_softmax(-1)
        return stacked.gather(2, sequences[:, -stacked.shape[1] :, None].to(stacked.device)).squeeze(2)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "[prepare_inputs_for_generation] the cache lives in C++, and generate() feeds it by itself. Call model.generate(…), or model(input_ids) "
            "on the whole sequence for a loop of your own."
        )

    def set_input_embeddings(self, value: Any) -> None:
        """The one that is there; another is refused."""
        self.model.embed_tokens = value

    def set_output_embeddings(self, value: Any) -> None:
        """The one that is there; another is refused."""
        self.lm_head = value

    def set_decoder(self, value: Any) -> None:
        """The one that is there; another is refused."""
        self.model = value
