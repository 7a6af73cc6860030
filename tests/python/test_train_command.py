# SPDX-License-Identifier: Apache-2.0
"""qlorapp train as a person meets it: the dtype it computes in, what it prints and when, adapters that it continues, modules that it saves."""

import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import termios

import conftest
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import qlorapp, write_model, write_rows

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> pathlib.Path:
    """model/ and tied/ in float32, in_bfloat16/, in_float16/, and rows.jsonl."""
    folder = tmp_path_factory.mktemp("train_command")
    write_model(folder / "model")
    write_model(folder / "tied", tie_word_embeddings=True)
    for name in ("bfloat16", "float16"):
        stored_in(write_model(folder / f"in_{name}"), name)
    write_rows(folder / "rows.jsonl")
    return folder


def stored_in(model: pathlib.Path, name: str) -> None:
    """The checkpoint in another dtype, as a person downloads it."""
    for shard in model.glob("*.safetensors"):
        save_file({key: value.to(KINDS[name]) for key, value in load_file(shard).items()}, shard, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config.pop("torch_dtype", None)
    (model / "config.json").write_text(json.dumps({**config, "dtype": name}))


def run(here: pathlib.Path, output: str, *arguments: object, model: str = "model", **options) -> subprocess.CompletedProcess:
    return qlorapp("train", "--model", model, "--data", "rows.jsonl", "--output", output, *arguments, cwd=here, **options)


def trained(here: pathlib.Path, output: str, *arguments: object, model: str = "model") -> str:
    result = run(here, output, *arguments, model=model)
    assert result.returncode == 0, result.stderr
    return result.stdout


def history(folder: pathlib.Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


# --- the dtype


@pytest.mark.parametrize(
    ("model", "given", "said", "flags"),
    [
        ("model", [], "computes in float32, the dtype of the checkpoint", (False, False)),
        ("in_bfloat16", [], "computes in bfloat16, the dtype of the checkpoint", (True, False)),
        ("in_bfloat16", ["--bf16", "false"], "computes in float32, as requested", (False, False)),
        ("in_bfloat16", ["--dtype", "float32"], "computes in float32, as requested", (False, False)),
        ("in_bfloat16", ["--fp16"], "computes in float16, as requested", (False, True)),
        ("model", ["--bf16"], "computes in bfloat16, as requested", (True, False)),
        ("model", ["--bnb_4bit_compute_dtype", "torch.bfloat16"], "computes in bfloat16, as requested", (True, False)),
        ("model", ["--dtype", "float16"], "computes in float16, as requested", (False, True)),
        ("in_float16", [], "computes in float32: the checkpoint is float16, which needs loss scaling on a CPU", (False, False)),
    ],
)
def test_a_run_computes_in_the_dtype_of_its_checkpoint_unless_told_otherwise(here, tmp_path, model, given, said, flags):
    printed = trained(here, tmp_path / "out", "--use_cpu", "--max_steps", 1, *given, model=model)
    assert said in printed
    arguments = json.loads((tmp_path / "out" / "checkpoint-1" / "training_args.json").read_text())
    assert (arguments["bf16"], arguments["fp16"]) == flags
    planned = qlorapp(
        "train",
        "--model",
        model,
        "--data",
        "rows.jsonl",
        "--output",
        tmp_path / "dry",
        "--use_cpu",
        "--dry_run",
        *given,
        cwd=here,
    )
    assert said in planned.stdout
    line = next(line for line in printed.splitlines() if line.startswith("plan: "))
    assert line in planned.stdout  # the same bytes before anything is loaded


def test_eval_computes_in_the_dtype_of_the_checkpoint_too(here):
    for model, given, said in [("in_bfloat16", [], "bfloat16, the dtype"), ("in_bfloat16", ["--dtype", "float32"], "float32, as"), ("model", [], "float32, the")]:  # fmt: skip
        result = qlorapp("eval", "--model", model, "--data", "rows.jsonl", "--device", "cpu", *given, cwd=here)
        assert result.returncode == 0 and f"computes in {said}" in result.stdout.splitlines()[0]


# --- the first lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "NF4 with double quantization (the defaults of BitsAndBytesConfig are --quant_type fp4 --double_quant false)"),
        (
            ["--bnb_4bit_quant_type", "nf4"],
            "NF4 with double quantization (the defaults of BitsAndBytesConfig are --double_quant false)",
        ),
        (["--quant_type", "fp4", "--bnb_4bit_use_double_quant", "false"], "FP4 without double quantization"),
        (["--load_in_4bit", "false"], "not quantized (--load_in_4bit false)"),
    ],
)
def test_the_first_line_says_how_weights_are_stored(here, tmp_path, given, said):
    first = trained(here, tmp_path / "out", "--max_steps", 1, *given).splitlines()[0]
    assert first.startswith("model: model, ") and first.endswith(", " + said)


def test_names_of_bits_and_bytes_config_mean_the_same(here, tmp_path):
    ours = ["--quant_type", "fp4", "--double_quant", "false"]
    theirs = ["--bnb_4bit_quant_type", "fp4", "--bnb_4bit_use_double_quant", "false", "--load_in_4bit"]
    for name, given in [("ours", ours), ("theirs", theirs), ("default", [])]:
        trained(here, tmp_path / name, "--max_steps", 2, *given)
    adapters = {name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("ours", "theirs", "default")}
    assert adapters["ours"] == adapters["theirs"] != adapters["default"]


# --- losses


def losses_in(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for loss, step in re.findall(r"\{'loss': ([\d.e+-]+),.*'step': (\d+)\}", text)]


def test_the_first_and_the_last_step_are_printed_and_not_kept(here, tmp_path):
    # Six steps of one row: logging_steps is 10 unless given.
    common = ["--max_steps", 6, "--per_device_train_batch_size", 1, "--save_strategy", "no"]
    every = trained(here, tmp_path / "every", *common, "--logging_steps", 1)
    wanted = losses_in(every)
    assert [step for step, _ in wanted] == [1, 2, 3, 4, 5, 6]
    assert losses_in(trained(here, tmp_path / "default", *common)) == [wanted[0], wanted[-1]]
    assert [entry for entry in history(tmp_path / "default") if "loss" in entry] == []  # as transformers' log_history
    some = losses_in(trained(here, tmp_path / "some", *common, "--logging_steps", 4))
    assert [step for step, _ in some] == [1, 4, 6]
    assert [entry["step"] for entry in history(tmp_path / "some") if "loss" in entry] == [4]
    assert [step for step, _ in losses_in(trained(here, tmp_path / "epoch", *common, "--logging_strategy", "epoch"))] == [1, 6]
    assert losses_in(trained(here, tmp_path / "no", *common, "--logging_strategy", "no")) == []


def on_a_terminal(here: pathlib.Path, *arguments: object) -> str:
    """What the program writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    child = subprocess.Popen(
        [conftest.BUILD / "qlorapp", *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=here
    )
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
    assert child.wait(timeout=60) == 0, seen.decode()
    return seen.decode()


def as_a_person_sees_it(text: str) -> list[str]:
    """The lines that stay: a carriage return begins the line again, and ESC [K clears it from there."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            cleared = part.split("\033[K")
            shown = cleared[-1] if len(cleared) > 1 else part + shown[len(part) :]
            if len(cleared) > 1 and not cleared[-1]:
                shown = cleared[0]
        lines.append(shown)
    return lines


def test_the_bar_shows_the_loss_and_no_line_shares_its_own(here, tmp_path):
    text = on_a_terminal(
        here, "train", "--model", "model", "--data", "rows.jsonl", "--output", tmp_path / "out", "--max_steps", 6
    )
    bars = re.findall(r"training \[[#.]{30}\] (\d+)/6, loss (\d+\.\d+), ", text)
    assert bars and bars[-1][0] == "6"
    assert float(bars[-1][1]) == pytest.approx(losses_in(text)[-1][1])
    counts = [int(bar or line) for bar, line in re.findall(r"\] (\d+)/6, loss|'loss': .*'step': (\d+)\}", text)]
    assert counts == sorted(counts), "a bar behind the line of a later step"
    lines = as_a_person_sees_it(text)
    assert [line for line in lines if "training [" in line or "loading [" in line] == []
    assert [line for line in lines if line.startswith("adapter written to ")] == [lines[-2]] and lines[-1] == ""


# --- adapters


def test_a_run_continues_an_adapter_whose_options_are_given_again(here, tmp_path):
    shape = ["--lora_r", 4, "--lora_alpha", 12, "--target_modules", "q_proj,v_proj", "--lora_dropout", 0.1]
    trained(here, tmp_path / "first", "--max_steps", 2, *shape)
    plain = [*("--init_adapter", tmp_path / "first"), "--max_steps", 2]
    trained(here, tmp_path / "plain", *plain)
    trained(here, tmp_path / "again", *plain, *shape)
    # The same layers, named in another way; scaling 12 / 4 in another order of names.
    trained(here, tmp_path / "pattern", *plain, "--target_modules", r".*\.(q|v)_proj", "--alpha", 12)
    adapters = {
        name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("first", "plain", "again", "pattern")
    }
    assert adapters["plain"] == adapters["again"] == adapters["pattern"] != adapters["first"]
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["r"] == 4


def test_a_dry_run_plans_the_adapter_that_is_continued(here, tmp_path):
    trained(here, tmp_path / "first", "--max_steps", 1, "--r", 32, "--target_modules", "all-linear")
    printed = trained(here, tmp_path / "second", "--max_steps", 1, "--init_adapter", tmp_path / "first")
    dry = trained(here, tmp_path / "dry", "--dry_run", "--init_adapter", tmp_path / "first")
    assert next(line for line in printed.splitlines() if line.startswith("plan: ")) in dry


@pytest.mark.parametrize("model", ["model", "tied"])
@pytest.mark.parametrize("modules", ["embed_tokens", "lm_head", "embed_tokens,lm_head"])
@pytest.mark.parametrize(
    "options", [[], ["--bf16"], ["--gradient_checkpointing", "--ensure_weight_tying"]], ids=["float32", "bfloat16", "tied"]
)
def test_every_module_that_may_be_saved_is_trained(here, tmp_path, model, modules, options):
    given = [
        "--modules_to_save",
        modules,
        "--learning_rate",
        0.05,
        "--logging_steps",
        1,
        "--per_device_train_batch_size",
        6,
        "--defaults",
        "trainer",
        *options,
    ]
    printed = trained(here, tmp_path / "out", "--max_steps", 4, *given, model=model)
    losses = [loss for _, loss in losses_in(printed)]
    assert losses[-1] < losses[0]
    names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    for module in modules.split(","):
        assert [name for name in names if module in name], names
    plan = next(line for line in printed.splitlines() if line.startswith("plan: "))
    assert plan in trained(here, tmp_path / "dry", "--dry_run", *given, model=model)
    batch = ["--batch", 6, "--seq", 64, "--gpu", "T4", *given[:2], *(["--fp16"] if "--bf16" in options else [])]
    assert qlorapp("plan", "--model", model, *batch, cwd=here).returncode == 0


# --- launchers


def test_a_launcher_that_says_half_of_what_a_rank_must_know_is_named(here, tmp_path, monkeypatch):
    for alone in ["", "1", "01"]:
        monkeypatch.setenv("WORLD_SIZE", alone)
        trained(here, tmp_path / f"alone {alone}", "--max_steps", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    result = run(here, tmp_path / "out", "--max_steps", 1)
    assert result.returncode == 2 and not (tmp_path / "out").exists() and result.stdout == ""
    assert re.match(r"error: \[ranks\] a launcher must set LOCAL_RANK; it is missing\. Start with torchrun", result.stderr)
    assert result.stderr.count("\n") == 1
