# SPDX-License-Identifier: Apache-2.0
"""The example notebooks on the bundled model, and the first row that SFTTrainer shows."""

import json
import re

import conftest
import datasets
import matplotlib.pyplot as plt
import notebook_runner
import peft
import pytest
import qlorapp
import torch
import transformers
from qlorapp.hf.sample import FirstRow, parts_of
from qlorapp.hf.sft import SFTTrainer  # before there is a kernel: transformers asks for one when it is imported
from tiny_trainer import in_cpp

NOTEBOOKS = conftest.ROOT / "examples" / "notebooks"
MODEL = conftest.ROOT / "examples" / "data" / "tiny-llama"
DATA = conftest.ROOT / "examples" / "data" / "train.jsonl"


# --- the notebooks


@pytest.fixture(autouse=True)
def in_their_folder(monkeypatch):
    """Jupyter starts a kernel there."""
    monkeypatch.chdir(NOTEBOOKS)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_made_for_colab_and_holds_no_output(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["metadata"]["accelerator"] == "GPU"
    assert notebook["metadata"]["colab"]["gpuType"] == "T4" and notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "scripts/install_in_notebook.py" in "".join(code[0]["source"])  # test_notebook_install.py runs it
    last = "".join(code[-1]["source"])
    assert re.search(r"transformers\.AutoModel.*peft\.PeftModel\.from_pretrained\(.*generate|answer\(", last, re.DOTALL)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_gpu_is_looked_at_before_anything_is_downloaded_and_the_plan_is_drawn_before_the_training(path):
    cells = [cell["source"] for cell in notebook_runner.cells_of(path) if cell["cell_type"] == "code"]

    def first(words: str) -> int:
        return next(i for i, cell in enumerate(cells) if any(words in line for line in cell))

    assert first("torch.cuda.is_available()") < min(
        first("load_dataset(" if path.stem == "t4_8b" else "model_id,"), first("SFTTrainer(")
    )
    assert first("qlorapp.plan(") < first("trainer.train()") < first("plt.plot(")


def test_the_8b_recipe_ends_at_once_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="No GPU"):
        notebook_runner.run(NOTEBOOKS / "t4_8b.ipynb", {"model_id": "none", "dataset_id": "none"}, notebook_runner.Kernel())


def pictures(kernel: notebook_runner.Kernel) -> list[str]:
    return [versions[-1] for versions in kernel.displayed if versions[-1].startswith("<svg")]


def drawn() -> list[list[float]]:
    """The heights of each line of the last plot; the next notebook begins with an empty one."""
    heights = [list(line.get_ydata()) for line in plt.gca().lines]
    plt.close("all")
    return heights


def nn_modules_of_qlorapp(model):
    return [module for module in model.modules() if type(module).__module__.startswith("qlorapp")]


def test_the_quickstart_learns_its_task(tmp_path):
    kernel = notebook_runner.Kernel()
    parameters = {"model_id": str(MODEL), "output_dir": str(tmp_path), "max_steps": 150, "learning_rate": 5e-3}
    cells = notebook_runner.run(NOTEBOOKS / "quickstart.ipynb", parameters, kernel)
    losses = [entry["loss"] for entry in cells["trainer"].state.log_history if "loss" in entry]
    assert in_cpp(cells["trainer"]) and losses[-1] < 0.3 * losses[0]
    assert kernel.printed.getvalue().startswith(f"qlorapp {qlorapp.__version__} is installed already.\n"), "the first cell"
    assert cells["right"] >= 3 and cells["right_in_peft"] >= 3, kernel.printed.getvalue()
    assert type(cells["model"]) is peft.PeftModelForCausalLM and not nn_modules_of_qlorapp(cells["model"])
    assert len(pictures(kernel)) == 1 and drawn() == [losses]
    shown = [versions[0] for versions in kernel.displayed if "<mark>" in versions[0]]
    assert len(shown) == 1, "the first row"
    assert re.search(r"<mark>Near the \w+ \w+ has a \w+\.&lt;\|eot_id\|&gt;</mark></pre>", shown[0])
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_the_t4_recipe_runs_here_too(tmp_path):
    pytest.importorskip("bitsandbytes")
    kernel = notebook_runner.Kernel()
    parameters = {
        "model_id": str(MODEL), "planned_model": str(MODEL), "needs_gpu": False, "dataset_id": str(DATA), "output_dir": str(tmp_path),
        "max_steps": 3,
    }  # fmt: skip
    cells = notebook_runner.run(NOTEBOOKS / "t4_8b.ipynb", parameters, kernel)
    assert in_cpp(cells["trainer"]) and cells["trainer"].state.global_step == 3
    assert "trainable params:" in kernel.printed.getvalue()
    (picture,) = pictures(kernel)
    assert "limit 14.1 GiB" in picture and "float16" in picture, "the limit of a T4, and its dtype"
    assert len(drawn()[0]) == 3
    assert isinstance(cells["in_peft"], peft.PeftModel) and not nn_modules_of_qlorapp(cells["in_peft"])
    assert any(type(module).__module__.startswith("bitsandbytes.") for module in cells["in_peft"].modules())


@pytest.mark.parametrize("data", ["", str(DATA)], ids=["questions", "messages"])
def test_own_data_are_packed_and_evaluated(tmp_path, data):
    kernel = notebook_runner.Kernel()
    parameters = {"model_id": str(MODEL), "data_file": data, "output_dir": str(tmp_path), "max_steps": 4 if data else 20}
    cells = notebook_runner.run(NOTEBOOKS / "bring_your_own_data.ipynb", parameters, kernel)
    assert in_cpp(cells["trainer"]) and [step for step, _ in cells["evaluations"]] == [4 if data else 20]
    assert len(pictures(kernel)) == 1 and drawn()[-1] == [loss for _, loss in cells["evaluations"]]
    assert [versions[0].count("<mark>") for versions in kernel.displayed if "<mark>" in versions[0]] == [1], (
        "one row of the pack"
    )
    assert isinstance(cells["in_peft"], peft.PeftModel) and not nn_modules_of_qlorapp(cells["in_peft"])
    assert " → " in kernel.printed.getvalue().splitlines()[-1], kernel.printed.getvalue()


# --- the first row


class Words:
    """A tokenizer whose decoder drops the space in front of a text."""

    def decode(self, ids):
        return "".join(f" {'abcdef'[i]}" for i in ids).removeprefix(" ")


def test_runs_of_a_row_make_its_text_and_a_first_token_is_never_trained():
    assert parts_of([0, 1, 2, 3], [-100, 1, 2, -100], Words()) == [("a", False), (" b c", True), (" d", False)]
    assert parts_of([0, 1], [0, 1], Words()) == [("a", False), (" b", True)]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_row_is_printed_once_between_marks_unless_bars_are_off(tmp_path, capsys, quiet):
    config = qlorapp.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=quiet,
    )
    rows = datasets.Dataset.from_list([{"prompt": "Where is the kite?", "completion": f" Near tower {i}."} for i in range(4)])
    trainer = SFTTrainer(str(MODEL), config, train_dataset=rows, peft_config=qlorapp.LoraConfig(r=2, task_type="CAUSAL_LM"))
    trainer.train()
    eos = transformers.AutoTokenizer.from_pretrained(MODEL).eos_token
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first row")]
    expected = f"first row, «trained»: <|begin_of_text|>Where is the kite?« Near tower 0.{eos}»"
    assert printed == ([] if quiet else [expected])
    assert any(isinstance(callback, FirstRow) for callback in trainer.callback_handler.callbacks) != quiet


def test_text_of_rows_is_escaped_in_a_notebook():
    class Tags:
        def decode(self, ids):
            return "".join("<b>" if i else "<i>&" for i in ids)

    class Loader:
        dataset = (None,)

        @staticmethod
        def collate_fn(rows):
            return transformers.default_data_collator([{"input_ids": [1, 0], "labels": [1, 0]}])

    kernel = notebook_runner.Kernel()
    with kernel.running():
        FirstRow().on_train_begin(
            None,
            transformers.TrainerState(is_world_process_zero=True),
            None,
            processing_class=Tags(),
            train_dataloader=Loader(),
        )
    assert "<pre>&lt;b&gt;<mark>&lt;i&gt;&amp;</mark></pre>" in kernel.displayed[0][0]
