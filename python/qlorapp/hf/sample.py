# SPDX-License-Identifier: Apache-2.0
"""Shows the first training row before the first step, with its trained part marked."""

import html
import os
import sys
from typing import Any

import torch
import transformers

from . import rows

Parts = list[tuple[str, bool]]


class FirstRow(transformers.TrainerCallback):
    """Shows row 0 after the trainer's collator. The trained part is highlighted in a notebook, and between « and » elsewhere."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, processing_class: Any = None, train_dataloader: Any = None, **given: Any
    ) -> None:
        dataset: Any = getattr(train_dataloader, "dataset", None)
        if not (state.is_world_process_zero and rows.is_indexed(dataset) and hasattr(processing_class, "decode")):
            return
        row = first_row(train_dataloader.collate_fn([dataset[0]]))
        if row is None:
            return
        parts = parts_of(*row, processing_class)
        if _in_notebook():
            from IPython.display import HTML, display

            text = "".join(f"<mark>{html.escape(text)}</mark>" if trained else html.escape(text) for text, trained in parts)
            display(HTML(f"<details open><summary>First row; marked text is trained</summary><pre>{text}</pre></details>"))
        else:
            text = "".join(f"«{text}»" if trained else text for text, trained in parts)
            print(f"first row, «trained»: {text}", flush=True)


def first_row(batch: Any) -> tuple[list[int], list[int]] | None:
    """Tokens and labels of a batch's first row, of a pack the first one in it. None if it has none."""
    ids, labels = (batch.get(name) for name in ("input_ids", "labels"))
    if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.dim() != 2 or ids.shape != labels.shape:
        return None
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    here = torch.ones_like(ids[0], dtype=torch.bool) if mask is None else mask[0].bool()
    found = ids[0][here].tolist(), labels[0][here].tolist()
    starts = [] if positions is None else [i for i, at in enumerate(positions[0][here].tolist()) if at == 0][1:]
    return (found[0][: starts[0]], found[1][: starts[0]]) if starts else found


def parts_of(ids: list[int], labels: list[int], tokenizer: Any) -> Parts:
    """The text in parts: [(text, whether it is trained)]. The first token is never trained."""
    trained = [i > 0 and labels[i] != -100 for i in range(len(ids))]
    parts: Parts = []
    before = ""  # a decoder may treat the start of a text differently
    for end in range(1, len(ids) + 1):
        if end == len(ids) or trained[end] != trained[end - 1]:
            whole = str(tokenizer.decode(ids[:end]))
            parts.append((whole[len(os.path.commonprefix([before, whole])) :], trained[end - 1]))
            before = whole
    return parts


def _in_notebook() -> bool:
    """Whether a Jupyter or Colab kernel runs this. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
