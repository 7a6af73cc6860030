# SPDX-License-Identifier: Apache-2.0
"""What a wrapper's checkpoint holds beside its text. transformers loads and computes it."""

import copy
import pathlib
from typing import Any

import torch
import transformers

from .foreign import refuse_missing
from .quantizer import as_ours


def load_other_parts(folder: pathlib.Path, model: Any, body: str, dtype: torch.dtype, device: torch.device) -> None:
    """Puts what reads images, whole, into transformers' model on meta. body: the path of the text, "model.language_model".

    @raises FormatError naming what the folder lacks.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None  # nothing of it is read
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict):
        config.quantization_config = as_ours(stored)
    logs: Any = transformers.logging  # it has no types
    level = logs.get_verbosity()
    logs.set_verbosity_error()  # it lists the text as unexpected
    try:
        loaded, found = type(model).from_pretrained(
            folder, config=config, dtype=dtype, device_map={"": device}, ignore_mismatched_sizes=True, output_loading_info=True
        )
    finally:
        logs.set_verbosity(level)
    refuse_missing(folder, sorted(name for name in found["missing_keys"] if not name.startswith((f"{body}.", "lm_head."))))
    whole, text_name = body.split(".")
    ours, theirs = model.get_submodule(whole), loaded.get_submodule(whole)
    for kind in ("_modules", "_parameters", "_buffers"):
        getattr(ours, kind).update({name: value for name, value in getattr(theirs, kind).items() if name != text_name})


def other_parts(model: Any, body: str) -> list[str]:
    """Paths of the modules beside the text: ["model.vision_tower", …]; [] of a model of text alone."""
    whole, _, text = body.partition(".")
    return [f"{whole}.{name}" for name, _ in model.get_submodule(whole).named_children() if name != text] if text else []
