# SPDX-License-Identifier: Apache-2.0
"""AutoPeftModelForCausalLM: an adapter with the base that it was trained on, by the adapter's folder or name alone."""

import os
from typing import Any

from .auto_model import AutoModelForCausalLM
from .peft import PeftModel
from .peft_config import PeftConfig


class AutoPeftModelForCausalLM:
    """PEFT's class of this name."""

    def __init__(self) -> None:
        raise OSError("[AutoPeftModelForCausalLM] is made by AutoPeftModelForCausalLM.from_pretrained(name or folder).")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: Any = None,
        revision: str | None = None,
        **options: Any,
    ) -> PeftModel:
        """The base of adapter_config.json with the adapter. options: those of AutoModelForCausalLM.from_pretrained.

        revision, subfolder: the adapter's; the base's is in adapter_config.json.
        @raises ValueError where adapter_config.json names no base.
        """
        hub: dict[str, Any] = {name: options[name] for name in ("token", "local_files_only", "cache_dir") if name in options}
        hub["subfolder"] = options.pop("subfolder", None)
        found = config or PeftConfig.from_pretrained(pretrained_model_name_or_path, revision=revision, **hub)
        if not found.base_model_name_or_path:
            raise ValueError(
                f"[AutoPeftModelForCausalLM] base_model_name_or_path in the adapter_config.json of {pretrained_model_name_or_path} must name "
                "the base; got nothing. Load the base, then PeftModel.from_pretrained(base, adapter)."
            )
        base = AutoModelForCausalLM.from_pretrained(
            found.base_model_name_or_path, revision=getattr(found, "revision", None), **options
        )
        return PeftModel.from_pretrained(
            base, pretrained_model_name_or_path, adapter_name, is_trainable, revision=revision, **hub
        )
