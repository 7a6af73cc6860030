# SPDX-License-Identifier: Apache-2.0
"""The progress bar as a person sees it: on a terminal, with its total, what is logged above it, and a bar of each evaluation."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from conftest import BUILD
from qlorapp import progress
from tiny_llama import folder  # noqa: F401  (a fixture)

RUN = """
import sys
import qlorapp
model = qlorapp.get_peft_model(qlorapp.AutoModelForCausalLM.from_pretrained(sys.argv[1]), qlorapp.LoraConfig(r=4), seed=1)
rows = [{"input_ids": [5 + i, 6 + i, 7 + i], "labels": [5 + i, 6 + i, 7 + i]} for i in range(12)]
args = qlorapp.TrainingArguments(
    sys.argv[2], per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, logging_steps=1, save_strategy="no",
    eval_strategy="epoch", report_to="none",
)
metrics = {"compute_metrics": lambda pred: {"rows": len(pred.predictions)}}  # its batches come from a loader, which has a length
trainer = qlorapp.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], **metrics)
trainer.train()
print("LOSSES", *[f"{entry['loss']:.4g}" for entry in trainer.state.log_history if "loss" in entry])
"""


def seen_on_a_terminal(*arguments: str) -> str:
    """What a process writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    child = subprocess.Popen([sys.executable, "-c", RUN, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    text = seen.decode()
    assert child.wait(timeout=60) == 0, text
    return text


def test_a_terminal_shows_a_bar_with_its_total_and_the_loss_above(folder, tmp_path):
    pytest.importorskip("tqdm")
    text = seen_on_a_terminal(str(folder), str(tmp_path))
    bars = re.findall(r"(\d+)%\|[^|\r\n]*\| (\d+)/(\d+) \[", text)
    assert {("0", "0", "6"), ("100", "6", "6")} <= set(bars), text  # of 2 epochs of 3 steps
    assert bars.count(("0", "0", "2")) == 2, text  # of each evaluation's batches; it goes too fast to be drawn again
    assert {total for _, _, total in bars} <= {"6", "2"}
    losses = re.search(r"LOSSES (.*)", text)[1].split()
    shown = re.findall(r"'loss': '([^']+)'", text)
    assert shown == losses and len(losses) == 6
    assert len(re.findall(r"'eval_loss': '", text)) == 2
    for line in re.findall(r"[^\r\n]*'loss': [^\r\n]*", text):  # a line of its own, not behind a bar
        assert "%|" not in line, line


class Stream:
    def __init__(self, terminal):
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "disable_tqdm", "installed", "kind"),
    [
        (True, None, True, "ProgressCallback"),
        (False, None, True, "PrinterCallback"),
        (False, False, True, "ProgressCallback"),
        (True, True, True, "PrinterCallback"),
        (True, None, False, "PrinterCallback"),
    ],
)
def test_a_bar_is_for_terminals_that_have_tqdm_unless_told(terminal, disable_tqdm, installed, kind, monkeypatch):
    if installed:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    assert type(progress.default_progress(disable_tqdm)).__name__ == kind
