# SPDX-License-Identifier: Apache-2.0
"""The names of the package: its own, those of transformers, PEFT and TRL as they are, and what is said where these are not installed."""

import os
import re
import subprocess
import sys

import peft
import pytest
import qlorapp
import transformers
import trl
from conftest import BUILD, ROOT


def run(code):
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_is_there():
    assert all(getattr(qlorapp, name) is not None for name in qlorapp.__all__)
    assert set(dir(qlorapp)) == set(qlorapp.__all__)


@pytest.mark.parametrize("name", ["SFTTrainr", "AutoModelForCausalML", "LamaForCausalLM", "_private"])
def test_another_name_is_no_attribute(name):
    assert not hasattr(qlorapp, name)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (transformers, "AutoTokenizer BitsAndBytesConfig GenerationConfig TrainerCallback EarlyStoppingCallback HfArgumentParser set_seed "
                       "DataCollatorForSeq2Seq get_linear_schedule_with_warmup LlamaConfig Seq2SeqTrainer TextStreamer pipeline"),
        (peft, "LoraConfig PeftModel PeftModelForCausalLM PromptTuningConfig TaskType get_peft_model_state_dict"),
        (trl, "DPOTrainer DPOConfig KTOTrainer GRPOTrainer ModelConfig"),
    ],
    ids=["transformers", "peft", "trl"],
)  # fmt: skip
def test_names_of_others_are_their_own(package, names):
    for name in names.split():
        assert getattr(qlorapp, name) is getattr(package, name), name


def test_our_classes_are_kinds_of_theirs():
    for mine, theirs in (
        (qlorapp.Trainer, transformers.Trainer),
        (qlorapp.SFTTrainer, trl.SFTTrainer),
        (qlorapp.TrainingArguments, transformers.TrainingArguments),
        (qlorapp.SFTConfig, trl.SFTConfig),
        (qlorapp.AutoPeftModelForCausalLM, peft.AutoPeftModelForCausalLM),
    ):
        assert issubclass(mine, theirs) and mine.__name__ == theirs.__name__


def test_nothing_of_hugging_face_is_imported_before_it_is_asked_for():
    run(
        "import sys, qlorapp\n"
        "there = lambda: {'transformers', 'peft', 'trl', 'datasets'} & set(sys.modules)\n"
        "qlorapp.Quantizer, qlorapp.LoraLinear, qlorapp.nn.Linear4bit, qlorapp.optim.AdamW8bit, qlorapp.load_model, dir(qlorapp)\n"
        "assert not there(), there()\n"
        "from qlorapp import set_seed\n"
        "assert there()"
    )


def test_the_library_works_without_hugging_face_and_says_what_needs_it():
    said = run(
        "import sys\n"
        "for name in ('transformers', 'peft', 'trl', 'datasets', 'accelerate'): sys.modules[name] = None\n"
        "import torch, qlorapp\n"
        "layer = qlorapp.LoraLinear(qlorapp.Quantizer().quantize(torch.randn(64, 64)), r=4)\n"
        "layer(torch.randn(2, 64)).sum().backward()\n"
        "for name in ('AutoModelForCausalLM', 'Trainer', 'SFTConfig', 'get_peft_model', 'LoraConfig', 'DPOTrainer'):\n"
        "    try: getattr(qlorapp, name)\n"
        "    except ImportError as error: print(error)\n"
    )
    lines = said.splitlines()
    assert len(lines) == 6 and all("which is not installed: pip install 'qlorapp[hf]'." in line for line in lines), said
    assert lines[4].startswith("qlorapp.LoraConfig needs transformers")


@pytest.mark.parametrize(
    "name", ["Accumulator", "GradScaler", "QuantizedTensor", "Quantizer", "LoraLinear", "CheckpointedBlock"]
)
def test_the_docstrings_of_the_classes_are_complete_by_themselves(name):
    """A pip user has no header to look into."""
    kind = getattr(qlorapp, name)
    assert len(kind.__doc__.splitlines()) >= 3 and ".hpp" not in kind.__doc__
    for member in ("quantize", "dequantize", "share_of", "add", "mean_loss"):
        assert not hasattr(kind, member) or len(getattr(kind, member).__doc__.splitlines()) >= 3, member


def test_packages_outside_of_what_was_tested_are_named_in_one_line(caplog):
    from qlorapp import hf

    newest = {package: f"{major}.{minor}.3" for package, (_, (major, minor)) in hf.TESTED.items()}
    hf._check(newest)
    assert not caplog.records
    hf._check({**newest, "peft": "99.0.0.dev1", "trl": "98.1"})
    (line,) = (record.getMessage() for record in caplog.records)
    assert "peft 99.0.0.dev1 (0.20 to" in line and "trl 98.1 (1.16 to" in line and "pip install 'peft==0." in line
    with pytest.raises(ImportError, match=r"needs transformers 5\.22 to 5\.\d+; 4\.57\.1 is installed: pip install -U"):
        hf._check({**newest, "transformers": "4.57.1"})


def test_the_stated_range_is_the_one_that_is_tested():
    """./dev versions installs these files."""
    from qlorapp import hf

    def pins(end):
        lines = (ROOT / "requirements" / f"{end}.txt").read_text().splitlines()
        return dict(line.split("==") for line in lines)

    stated = re.search(r"^hf = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    lowest = dict(re.findall(r'"([a-z]+)>=([0-9.]+)"', stated))
    oldest, newest = pins("oldest"), pins("newest")
    assert (
        all((oldest[package] + ".").startswith(version + ".") for package, version in lowest.items())
        and oldest.keys() == newest.keys()
    )
    for package, ends in hf.TESTED.items():
        for end, pinned in zip(ends, (oldest, newest), strict=True):
            assert pinned[package].startswith(".".join(map(str, end)) + "."), package
