# SPDX-License-Identifier: Apache-2.0
"""The example notebooks on the bundled model, and what a notebook or a terminal shows of a run."""

import json
import re
import signal
import threading
import types

import conftest
import notebook_runner
import pytest
import qlorapp
import torch
from qlorapp import notebook
from tiny_llama import folder, load  # noqa: F401  (a fixture)

NOTEBOOKS = conftest.ROOT / "examples" / "notebooks"
MODEL = conftest.ROOT / "examples" / "data" / "tiny-llama"
DATA = conftest.ROOT / "examples" / "data" / "train.jsonl"


# --- the notebooks


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_made_for_colab_and_holds_no_output(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["metadata"]["accelerator"] == "GPU"
    assert notebook["metadata"]["colab"]["gpuType"] == "T4" and notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len(code[0]["source"]) == 1 and code[0]["source"][0].startswith("%pip install"), "one line installs"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_the_quickstart_learns_its_task(tmp_path):
    kernel = notebook_runner.Kernel()
    parameters = {"model_id": str(MODEL), "output_dir": str(tmp_path), "max_steps": 150, "learning_rate": 5e-3}
    cells = notebook_runner.run(NOTEBOOKS / "quickstart.ipynb", parameters, kernel)
    history = cells["trainer"].state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0]
    assert cells["right"] >= 3, kernel.printed.getvalue()
    assert "<mark>" in kernel.displayed[0][0], "the first row"
    assert "[150/150" in kernel.displayed[1][-1] and "Training Loss" in kernel.displayed[1][-1]
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_the_t4_recipe_runs_here_too(tmp_path):
    kernel = notebook_runner.Kernel()
    parameters = {"model_id": str(MODEL), "dataset_id": str(DATA), "output_dir": str(tmp_path), "max_steps": 3}
    cells = notebook_runner.run(NOTEBOOKS / "t4_8b.ipynb", parameters, kernel)
    assert cells["trainer"].state.global_step == 3
    assert "trainable params:" in kernel.printed.getvalue()


@pytest.mark.parametrize("data", ["", str(DATA)])
def test_own_data_are_packed_evaluated_and_shown(tmp_path, data):
    kernel = notebook_runner.Kernel()
    parameters = {"model_id": str(MODEL), "data_file": data, "output_dir": str(tmp_path), "max_steps": 4}
    if not data:
        parameters["max_steps"] = 20
    cells = notebook_runner.run(NOTEBOOKS / "bring_your_own_data.ipynb", parameters, kernel)
    assert re.search(r"«.+»", kernel.printed.getvalue())
    if not data:
        assert [step for step, _ in cells["losses"]] == [20]
        assert "Validation Loss" in kernel.displayed[1][-1]


# --- what is shown


def rows(count=8):
    return [{"input_ids": list(range(3 + i % 70, 15 + i % 70))} for i in range(count)]


def small_trainer(folder, out, **options):
    callbacks = options.pop("callbacks", None)
    settings = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", **options}
    arguments = qlorapp.TrainingArguments(output_dir=str(out), **settings)
    return qlorapp.Trainer(load(folder), arguments, train_dataset=rows(), eval_dataset=rows(2), callbacks=callbacks)


def test_a_notebook_shows_one_output_with_bar_and_table(folder, tmp_path):
    kernel = notebook_runner.Kernel()
    with kernel.running():
        small_trainer(folder, tmp_path, eval_strategy="steps", eval_steps=2).train()
    assert len(kernel.displayed) == 1, "one output, replaced as the run goes on"
    versions = kernel.displayed[0]
    assert "value='0' max='4'" in versions[0] and "value='4' max='4'" in versions[-1]
    table = versions[-1][versions[-1].index("<table>") :]
    heads = re.findall(r"<th>(.*?)</th>", table)
    assert heads[:4] == ["Step", "Training Loss", "Validation Loss", "Learning Rate"]
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert [line[0] for line in lines] == ["2", "4"] and all(line[1] and line[2] for line in lines)
    assert kernel.printed.getvalue() == "", "nothing is printed beside it"


def test_an_evaluation_shows_its_batches_and_no_steps_before_a_run(folder, tmp_path):
    """There is no run whose time could be told."""
    kernel = notebook_runner.Kernel()
    with kernel.running():
        trainer = small_trainer(folder, tmp_path, per_device_eval_batch_size=1)
        trainer.evaluate()
    (versions,) = kernel.displayed
    assert "value='1' max='2'" in versions[0] and any("[2/2] evaluating" in version for version in versions)
    assert "[0/0" not in "".join(versions) and "&lt;" not in "".join(versions)
    assert "evaluating" not in versions[-1] and "Validation Loss" in versions[-1]
    with kernel.running():
        trainer.train()
        trainer.evaluate()
    last = kernel.displayed[-1]
    assert any("[4/4 " in version and "[1/2] evaluating" in version for version in last) and "evaluating" not in last[-1]


def test_text_of_rows_is_escaped_in_a_notebook_and_marked_elsewhere(capsys):
    sample = notebook.SampleCallback([("<b>a</b>", False), ("<i>&", True)])
    kernel = notebook_runner.Kernel()
    with kernel.running():
        sample.on_train_begin(None, None, None)
    assert "<pre>&lt;b&gt;a&lt;/b&gt;<mark>&lt;i&gt;&amp;</mark></pre>" in kernel.displayed[0][0]
    sample.on_train_begin(None, None, None)
    assert capsys.readouterr().out == "first row, «trained»: <b>a</b>«<i>&»\n"


def callback_at(step=0, total=500, clock=None):
    shown = notebook.NotebookProgressCallback()
    if clock is not None:
        shown.now = lambda: clock[0]
    state = types.SimpleNamespace(global_step=step, max_steps=total)
    with notebook_runner.Kernel().running():
        shown.on_train_begin(None, state, None)
    return shown, state


def test_a_long_table_shows_its_end():
    shown, state = callback_at()
    with notebook_runner.Kernel().running():
        shown._handle = None
        for state.global_step in range(1, 301):
            shown.on_log(None, state, None, {"loss": 1.0 / state.global_step})
    page = shown.html()
    assert page.count("<tr>") == 1 + shown.most_rows and "200 earlier rows" in page and "<td>300</td>" in page


def test_the_time_that_is_left_counts_from_where_a_resumed_run_began():
    clock = [0.0]
    shown, state = callback_at(total=100, clock=clock)
    clock[0], state.global_step = 10.0, 91
    with notebook_runner.Kernel().running():
        shown._handle = None
        shown.on_step_end(None, state, None)
    assert "[91/100 00:10 &lt; 01:30]" in shown.html()


# --- the stop button


@pytest.fixture
def interrupts():
    """A shell that starts us in the background has SIGINT ignored."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stop(qlorapp.TrainerCallback):
    """Ctrl-C, or a notebook's stop button, some milliseconds after a step."""

    def __init__(self, step, seconds=0.0):
        self.step, self.seconds = step, seconds

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            threading.Timer(self.seconds, signal.raise_signal, [signal.SIGINT]).start()


def test_the_stop_button_leaves_a_checkpoint_that_continues_with_the_same_bits(folder, tmp_path, interrupts):
    """It falls into the middle of a long step. Dropout is on: what is begun again must draw the masks that it would have drawn."""

    def run(out, *callbacks):
        arguments = qlorapp.TrainingArguments(
            output_dir=str(out), per_device_train_batch_size=1, gradient_accumulation_steps=64, max_steps=6, logging_steps=1,
            save_strategy="no", logging_strategy="steps",
        )  # fmt: skip
        model = load(folder, lora_dropout=0.2)
        return qlorapp.Trainer(model, arguments, train_dataset=rows(400), callbacks=list(callbacks))

    whole = run(tmp_path / "whole")
    whole.train()
    stopped = run(tmp_path / "stopped", Stop(3, 0.04))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert 3 <= stopped.state.global_step < 6
    assert (tmp_path / "stopped" / f"checkpoint-{stopped.state.global_step}" / "trainer_state.json").is_file()
    resumed = run(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    expected = dict(whole.model.named_parameters())
    trained = [(name, p) for name, p in resumed.model.named_parameters() if p.requires_grad]
    assert trained and all(torch.equal(p, expected[name]) for name, p in trained)
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (whole, resumed)]
    assert losses[0] == losses[1]


def test_a_stopped_notebook_says_where_to_go_on(folder, tmp_path, interrupts, caplog):
    kernel = notebook_runner.Kernel()
    with kernel.running(), pytest.raises(KeyboardInterrupt):
        small_trainer(folder, tmp_path, max_steps=100_000, callbacks=[Stop(2)]).train()
    assert re.search(
        r"stopped after step \d+ of 100000, saved in .*; go on with train\(resume_from_checkpoint=True\)", caplog.text
    )
