# SPDX-License-Identifier: Apache-2.0
"""The program's output: no control character of a file reaches the terminal, and a result that could not be written is an error."""

import json
import os
import re
import shutil
import subprocess

import conftest
import pytest
import qlorapp as package
import torch
from lost_runs import root, train, whole  # noqa: F401  (fixtures)
from safetensors.torch import save_file
from tiny_run import qlorapp, write_model, write_rows

#: ESC with a title and a clear screen, BEL, BS, CR, C1's CSI, right-to-left override, isolates, line separator.
HOSTILE = "a\x1b]0;title\x07\x1b[2J\b\rb\x9b31m\u202egpj.\u2066\u2028z"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("printed") / "model")


def run_bytes(*words):
    """@returns the exit code and all that was printed."""
    done = subprocess.run([conftest.BUILD / "qlorapp", *map(str, words)], capture_output=True, check=False, timeout=120)
    return done.returncode, (done.stdout + done.stderr).decode()


def rows(tmp_path, *given):
    return write_rows(tmp_path / "rows.jsonl", list(given))


def csv(tmp_path):
    (tmp_path / "rows.csv").write_text(f'"{HOSTILE}",b\n1,2\n', encoding="utf-8", newline="")
    return tmp_path / "rows.csv"


DATA = {
    "a text": (0, lambda tmp_path: rows(tmp_path, *[{"text": HOSTILE}] * 2)),
    "keys": (2, lambda tmp_path: rows(tmp_path, {HOSTILE: "x", "b": 1})),
    "a key of a later row": (2, lambda tmp_path: rows(tmp_path, {"text": "x"}, {HOSTILE: "x"})),
    "a key that is not used": (0, lambda tmp_path: rows(tmp_path, *[{"text": "x", HOSTILE: 1}] * 2)),
    "a role": (2, lambda tmp_path: rows(tmp_path, {"messages": [{"role": HOSTILE, "content": "x"}]})),
    "a speaker": (2, lambda tmp_path: rows(tmp_path, {"conversations": [{"from": HOSTILE, "value": "x"}]})),
    "a header": (2, csv),
    "the name of the file": (2, lambda tmp_path: tmp_path / HOSTILE.replace("/", "")),
}


@pytest.mark.parametrize("name", DATA)
def test_control_characters_of_rows_are_escaped(model, tmp_path, name):
    code, make = DATA[name]
    options = (
        ["--max_steps", 1, "--use_cpu", "--chat_template", "zephyr"]
        if name in ("a role", "a speaker")
        else ["--max_steps", 1, "--use_cpu"]
    )
    ended, printed = run_bytes("train", "--model", model, "--data", make(tmp_path), "--output", tmp_path / "out", *options)
    assert ended == code, printed
    assert CONTROL.search(printed) is None
    assert r"\x1b" in printed and (r"\u202egpj." in printed or r"\xe2\x80\xae" in printed)


@pytest.mark.parametrize("key", ["model", "pre_tokenizer", "decoder"])
def test_control_characters_of_a_tokenizer_are_escaped(model, tmp_path, key):
    folder = shutil.copytree(model, tmp_path / "model")
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**file, key: {**file[key], "type": HOSTILE}}))
    data = rows(tmp_path, {"text": "x"})
    code, printed = run_bytes("train", "--model", folder, "--data", data, "--output", tmp_path / "out", "--use_cpu")
    assert code == 2 and CONTROL.search(printed) is None and r"\x1b]0;title\x07" in printed


def test_control_characters_of_names_are_escaped(model, tmp_path):
    out = tmp_path / HOSTILE
    data = rows(tmp_path, *[{"text": "x y z"}] * 2)
    code, printed = run_bytes("train", "--model", model, "--data", data, "--output", out, "--max_steps", 1, "--save_steps", 1)
    assert code == 0 and CONTROL.search(printed) is None and "adapter written to" in printed
    code, printed = run_bytes("inspect", out)
    assert code == 0 and CONTROL.search(printed) is None and r"\u202egpj." in printed


def test_pythons_errors_and_log_are_escaped_too(model, tmp_path, caplog):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": HOSTILE}))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"x1b") as error:
        package.merge(model, tmp_path / "adapter", tmp_path / "out")
    assert CONTROL.search(str(error.value)) is None
    package._C.log_warning_once(HOSTILE)
    logged = [record.getMessage() for record in caplog.records]
    assert any("x1b" in line for line in logged) and all(CONTROL.search(line) is None for line in logged)


# --- a result that could not be written


@pytest.mark.parametrize("command", ["eval", "generate", "inspect", "plan", "quantize", "help", "version", "train"])
@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
def test_output_that_cannot_be_written_is_an_error(model, tmp_path, command, to):
    data = rows(tmp_path, *[{"text": "x y z"}] * 2)
    words = {
        "eval": ["eval", "--model", model, "--data", data, "--device", "cpu"],
        "generate": ["generate", "--model", model, "--prompt", "x", "--raw", "--max_new_tokens", 1, "--device", "cpu"],
        "inspect": ["inspect", model], "plan": ["plan", "--model", model, "--gpu", "T4", "--batch", 1, "--seq", 64],
        "quantize": ["quantize", "--model", model, "--output", tmp_path / "out"], "help": ["--help"], "version": ["--version"],
        "train": ["train", "--model", model, "--data", data, "--output", tmp_path / "out", "--max_steps", 1, "--use_cpu"],
    }[command]  # fmt: skip
    line = ["sh", "-c", f'exec "$0" "$@" {to}', conftest.BUILD / "qlorapp", *words]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and "error: [stdout] cannot be written" in done.stderr
    if command in ("train", "quantize"):  # what was made is there
        assert qlorapp("inspect", tmp_path / "out").returncode == 0


def test_a_file_that_is_written_does_not_get_the_number_of_a_closed_stream(model, tmp_path):
    line = [
        "sh",
        "-c",
        'exec "$0" "$@" <&- >&- 2>&-',
        conftest.BUILD / "qlorapp",
        "quantize",
        "--model",
        model,
        "--output",
        tmp_path / "o",
    ]
    assert subprocess.run(list(map(str, line)), check=False, timeout=120).returncode == 1
    assert qlorapp("quantize", "--model", model, "--output", tmp_path / "whole").returncode == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "o" / path.name).read_bytes() == path.read_bytes()


# --- wording


def test_resuming_names_skipped_checkpoints_only_if_there_are_some(root, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    words = train(root, out, overwrite_output_dir="true", resume_from_checkpoint="true")
    assert "skipped" not in qlorapp(*words).stderr
    (out / "checkpoint-6" / "run_state.json").write_text("{")
    assert "skipped: [checkpoint-6 (" in qlorapp(*words).stderr
    (out / "checkpoint-4" / "MANIFEST.json").write_text("{")
    named = qlorapp(*train(root, out, resume_from_checkpoint=out / "checkpoint-4")).stderr
    assert "is damaged: " in named and ".." not in named.replace(str(out), "")


@pytest.mark.parametrize(
    "changed",
    [{"target_modules": ["no_such"]}, {"target_modules": "("}, {"task_type": "SEQ_CLS"}],
    ids=["unknown", "regex", "task"],
)
def test_what_an_adapters_config_asks_for_in_vain_is_named_with_its_file(root, whole, tmp_path, changed):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(whole / name, folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    for words in (
        ["eval", "--model", root / "model", "--data", root / "rows.jsonl", "--device", "cpu", "--adapter", folder],
        ["merge", "--model", root / "model", "--adapter", folder, "--output", tmp_path / "m"],
    ):
        result = qlorapp(*words)
        assert result.returncode == 2 and str(config) in result.stderr, result.stderr


def test_a_name_in_a_manifest_is_quoted_once(whole, tmp_path):
    out = shutil.copytree(whole / "checkpoint-6", tmp_path / "checkpoint-6")
    text = (out / "MANIFEST.json").read_text()
    (out / "MANIFEST.json").write_text(text.replace('"run_state.json"', '"../x"'))
    assert "''" not in qlorapp("inspect", out).stdout


def test_adapters_of_any_name_are_saved_and_of_none_outside(root, tmp_path):
    model = package.AutoModelForCausalLM.from_pretrained(root / "model")
    config = package.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft = package.get_peft_model(model, config)
    peft.add_adapter("two\nlines", config)
    peft.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/two\nlines/adapter_model.safetensors").is_file()
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]
    peft.add_adapter(str(tmp_path / "elsewhere"), config)
    with pytest.raises(ValueError, match="Rename the adapter"):
        peft.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()
