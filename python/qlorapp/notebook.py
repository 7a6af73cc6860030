# SPDX-License-Identifier: Apache-2.0
"""What a Jupyter or Colab notebook shows of a run: a bar, a table of losses, a row with its trained part marked.

One output through IPython's display, replaced as the run goes on: no widgets, nothing to install.
"""

import html
import sys
import time
from collections.abc import Iterator
from typing import Any

from .batches import length_of
from .trainer_callback import TrainerCallback

#: Log keys and the headings of their columns, in this order; other keys of an evaluation follow under their own names.
_COLUMNS = {
    "loss": "Training Loss",
    "eval_loss": "Validation Loss",
    "learning_rate": "Learning Rate",
    "grad_norm": "Gradient Norm",
    "num_tokens": "Tokens",
}
_SPEED = ("_runtime", "_per_second")
Parts = list[tuple[str, bool]]


def in_notebook() -> bool:
    """Whether a Jupyter or Colab kernel runs this. IPython is not imported for the question."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
    return html.escape(str(value))


def _bar(done: int, total: int) -> str:
    """Without a total a bar that only moves."""
    numbers = f"value='{done}' max='{total}' " if total else ""
    return f"<progress {numbers}style='width:300px;height:20px;vertical-align:middle'></progress>"


class NotebookProgressCallback(TrainerCallback):
    """Bar and table. Evaluations stand in the row of their step."""

    most_rows = 100
    pause = 0.3  # seconds between two versions, but for new rows

    def __init__(self) -> None:
        self.now = time.monotonic
        self.records: list[dict[str, Any]] = []
        self._handle: Any = None
        self._step = self._total = self._first = 0
        self._begin = self._shown = 0.0
        self._evaluated, self._batches = 0, 0  # of the evaluation that runs; 0, 0: none does

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records, self._handle = [], None
        self._step, self._total, self._first = state.global_step, state.max_steps, -1
        self._begin = self.now()
        self._show()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first < 0:  # a resumed run does not begin at 0
            self._first = state.global_step - 1
        self._step, self._total = state.global_step, state.max_steps
        if self._step >= self._total or self.now() - self._shown >= self.pause:
            self._show()

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
        if self._evaluated == 0:
            self._batches = length_of(eval_dataloader) or 0
        self._evaluated += 1
        if self._evaluated == 1 or self._evaluated == self._batches or self.now() - self._shown >= self.pause:
            self._show()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluated = self._batches = 0
        self._show()

    on_predict = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "train_runtime" in logs:
            return
        record = {"step": state.global_step, **logs}
        if self.records and self.records[-1]["step"] == record["step"]:
            self.records[-1].update(record)
        else:
            self.records.append(record)
        self._show()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display

        self._shown = self.now()
        if self._handle is None:
            self._handle = display(HTML(self.html()), display_id=True)
        else:
            self._handle.update(HTML(self.html()))

    def html(self) -> str:
        return "".join(f"<div>{line}</div>" for line in self._bars()) + self._table()

    def _bars(self) -> Iterator[str]:
        """Of the steps, once a run has begun, and of the batches while it evaluates."""
        if self._total:
            gone, done = self.now() - self._begin, self._step - max(self._first, 0)
            left = gone / done * (self._total - self._step) if done > 0 and self._first >= 0 else 0.0
            yield f"{_bar(self._step, self._total)} [{self._step}/{self._total} {_clock(gone)} &lt; {_clock(left)}]"
        if self._evaluated:
            most = self._batches or "?"  # a stream does not say how many there are
            yield f"{_bar(self._evaluated, self._batches)} [{self._evaluated}/{most}] evaluating"

    def _table(self) -> str:
        if not self.records:
            return ""
        seen = dict.fromkeys(key for record in self.records for key in record)
        extra = {key: key for key in seen if key.startswith("eval_") and key not in _COLUMNS and not key.endswith(_SPEED)}
        columns = {"step": "Step", **{key: name for key, name in _COLUMNS.items() if key in seen}, **extra}
        shown = self.records[-self.most_rows :]
        rows = ["".join(f"<th>{html.escape(name)}</th>" for name in columns.values())]
        rows += ["".join(f"<td>{_cell(record.get(key))}</td>" for key in columns) for record in shown]
        hidden = len(self.records) - len(shown)
        note = f"<div>… {hidden} earlier rows are in trainer.state.log_history</div>" if hidden else ""
        return note + "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


class SampleCallback(TrainerCallback):
    """Shows a row before the first step: marked in a notebook, between « and » elsewhere."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if in_notebook():
            from IPython.display import HTML, display

            display(HTML(sample_html(self.parts)))
        else:
            print("first row, «trained»: " + sample_text(self.parts), flush=True)


def sample_html(parts: Parts) -> str:
    text = "".join(f"<mark>{html.escape(text)}</mark>" if trained else html.escape(text) for text, trained in parts)
    return f"<details open><summary>First row; what is marked is trained</summary><pre>{text}</pre></details>"


def sample_text(parts: Parts) -> str:
    return "".join(f"«{text}»" if trained else text for text, trained in parts)
