# SPDX-License-Identifier: Apache-2.0
"""Shows the first training row before the first step, with its trained part marked."""

import html
import os
import sys
from typing import Any

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
        try:
            row = rows.rows_in(train_dataloader.collate_fn([dataset[0]]))[0]
        except rows.OtherRowsError:
            return  # the batch has no tokens and labels
        parts = parts_of(row.input_ids[: row.lengths[0]], row.labels, processing_class)
        if _in_notebook():
            from IPython.display import HTML, display

            text = "".join(f"<mark>{html.escape(text)}</mark>" if trained else html.escape(text) for text, trained in parts)
            display(HTML(f"<details open><summary>First row; marked text is trained</summary><pre>{text}</pre></details>"))
        else:
            text = "".join(f"«{text}»" if trained else text for text, trained in parts)
            print(f"first row, «trained»: {text}", flush=True)


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
