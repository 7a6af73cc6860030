# SPDX-License-Identifier: Apache-2.0
"""A hostile model folder and transformers' tokenizer, through `python -m qlorapp`: nothing outside is read, nothing runs for ever."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import conftest
import pytest
from test_folder_text import CHAT, TRAIN, UNUSUAL, through_python, train, unusual  # noqa: F401
from tiny_run import write_rows

SECRET = "S3CRET"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def model(unusual, tmp_path):
    return pathlib.Path(shutil.copytree(unusual, tmp_path / "model"))


def outside(tmp_path, name, text):
    (tmp_path / "outside").mkdir(exist_ok=True)
    path = tmp_path / "outside" / name
    path.write_text(text)
    return path


# --- N1: what C++ refuses for safety or damage is not tried by transformers


def replaced(name, text=None):
    def make(model, tmp_path):
        kept = (model / name).read_text() if (model / name).exists() else ""
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(outside(tmp_path, "x", text or kept or "{}"))

    return make


HOSTILE = {
    "template linked out": replaced("chat_template.jinja", SECRET + UNUSUAL),
    "template linked to nothing": lambda model, tmp_path: (
        (model / "chat_template.jinja").unlink(),
        (model / "chat_template.jinja").symlink_to(tmp_path / "later"),
    ),
    "tokenizer linked out": replaced("tokenizer.json"),
    "tokenizer config linked out": replaced("tokenizer_config.json"),
    "special tokens linked out": replaced("special_tokens_map.json"),
    "added tokens linked out": replaced("added_tokens.json"),
    "vocabulary linked out": replaced("vocab.json"),
    "sentencepiece model linked out": replaced("tokenizer.model", "x"),
    "template is a pipe": lambda model, tmp_path: (
        (model / "chat_template.jinja").unlink(),
        os.mkfifo(model / "chat_template.jinja"),
    ),
    "tokenizer cut off": lambda model, tmp_path: (model / "tokenizer.json").write_text(
        (model / "tokenizer.json").read_text()[:-9]
    ),
    "tokenizer config with a key twice": lambda model, tmp_path: (model / "tokenizer_config.json").write_text(
        '{"eos_token": "<|eot_id|>", "eos_token": "x"}'
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_refusal_of_safety_or_damage_is_final(model, tmp_path, name):
    HOSTILE[name](model, tmp_path)
    result = train(through_python, model, [CHAT] * 2, tmp_path)
    assert result.returncode == 2 and SECRET not in result.stdout + result.stderr, result.stdout + result.stderr
    assert str(model) in result.stderr and ("read through transformers" not in result.stdout or "template" in name)
    assert result.stderr.count("\n") == 1


def test_a_config_that_names_files_elsewhere_opens_none(model, tmp_path):
    there = outside(tmp_path, "tokenizer.0.1.json", (model / "tokenizer.json").read_text())
    config = json.loads((model / "tokenizer_config.json").read_text())
    names = dict.fromkeys(("tokenizer_file", "vocab_file", "chat_template_file"), str(there))
    names["fast_tokenizer_files"] = [f"../outside/{there.name}"]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, **names}))
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    data = write_rows(tmp_path / "rows.jsonl", [CHAT] * 2)
    command = ["strace", "--seccomp-bpf", "-f", "-qq", "-e", "trace=open,openat,readlink", "-o", str(trace)]
    command += [*conftest.MODULE, "train"]
    done = subprocess.run(
        [*command, "--model", model, "--data", data, "--output", tmp_path / "o", *TRAIN], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(conftest.BUILD / "python")}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "read through transformers" in done.stdout, done.stderr
    assert "/outside/" not in trace.read_text()


def test_a_folder_of_the_hugging_face_cache_is_read_with_its_links(unusual, tmp_path, monkeypatch):
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setenv("TMPDIR", str(copies))
    snapshot, blobs = tmp_path / "hub/snapshots/1", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(unusual.iterdir())):
        shutil.copy(file, blobs / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    result = train(through_python, snapshot, [CHAT] * 2, tmp_path)
    assert result.returncode == 0 and "read through transformers" in result.stdout, result.stderr
    assert not list(copies.iterdir())


# --- N10


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_custom_code_is_neither_run_nor_asked_about(model, tmp_path, name):
    (model / "theirs.py").write_text("raise SystemExit('ran')\n")
    file = json.loads((model / name).read_text())
    file["auto_map"] = {"AutoTokenizer": ["theirs.Tokenizer", None], "AutoConfig": "theirs.Config"}
    if name == "tokenizer_config.json":
        file["tokenizer_class"] = "TheirTokenizer"
    (model / name).write_text(json.dumps(file))
    begin = time.monotonic()
    result = train(through_python, model, [CHAT] * 2, tmp_path)
    assert time.monotonic() - begin < 120
    assert result.returncode in (0, 2) and "ran" not in (result.stdout + result.stderr).split()
    assert "[y/N]" not in result.stdout + result.stderr


# --- N3


def test_an_endless_template_is_stopped(model, tmp_path):
    (model / "chat_template.jinja").write_text(ENDLESS + UNUSUAL)
    result = train(through_python, model, [CHAT] * 2, tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "chat_template" in result.stderr and "more than 10000000 steps; is there a loop without an end?" in result.stderr


def test_a_pattern_without_an_end_is_stopped(model, tmp_path):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    endless = {"type": "Split", "pattern": {"Regex": "x*(?!x|$)"}, "behavior": "Isolated", "invert": False}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": endless}))
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 400_000}])
    result = through_python(
        "train", "--model", model, "--data", data, "--output", tmp_path / "o", *TRAIN, QLORAPP_TEXT_SECONDS="6"
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "tokenizer.json" in result.stderr and "6 s of CPU time" in result.stderr and "QLORAPP_TEXT_SECONDS" in result.stderr


def services(folder):
    """Processes of text_service.py below this folder of temporary files."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"text_service.py" in line and str(folder).encode() in line:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_the_service_ends_with_the_command_while_it_works(model, tmp_path, sent):
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "weather zone " * 2_000_000}])
    (tmp_path / "temporary").mkdir()
    run = subprocess.Popen(
        [*conftest.MODULE, "train", "--model", model, "--data", data, "--output", tmp_path / "o", *TRAIN],
        env={**os.environ, "PYTHONPATH": str(conftest.BUILD / "python"), "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in run.stdout:
        if line.startswith("read through transformers"):
            break
    service = services(tmp_path / "temporary")
    assert len(service) == 1
    time.sleep(0.5)  # it encodes 26 MB
    run.send_signal(sent)
    run.wait(30)
    run.stdout.close()
    assert run.returncode == -sent
    deadline = time.monotonic() + 20
    while services(tmp_path / "temporary") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not services(tmp_path / "temporary")
