# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' place of optimizers. There are none for torch here: they run in C++, inside of the Trainer, which is told by name."""

from typing import Any

#: {bitsandbytes' class: the value of TrainingArguments(optim=…) that is the same rule here}
_NAMES = {
    "AdamW": "adamw_torch",
    "AdamW32bit": "adamw_torch",
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW": "paged_adamw_32bit",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
}


def __getattr__(name: str) -> Any:
    """@raises ImportError with the way out: `from qlorapp.optim import X` would drop the words of an AttributeError."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NAMES:
        raise ImportError(
            f"qlorapp.optim has no {name}: it runs inside of the Trainer, and is no torch optimizer. Use "
            f'TrainingArguments(optim="{_NAMES[name]}"), or torch.optim.AdamW in a loop of your own.'
        )
    raise ImportError(
        f"qlorapp.optim has no {name}: optimizers here are AdamW's kinds, {', '.join(sorted(set(_NAMES.values())))}. Use "
        "TrainingArguments(optim=…), or Trainer(optimizers=(torch.optim.…, None)) for another."
    )
