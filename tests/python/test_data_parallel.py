# SPDX-License-Identifier: Apache-2.0
"""Several processes train one run: the same adapter as one process with as much more accumulation, one set of files, one end."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import peer
import pytest
import torch
from conftest import BUILD, ROOT
from forked import Process
from forked import ranks_of as as_ranks
from safetensors.torch import load_file

STEPS = 6


def free_port() -> int:
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(BUILD / "python"), **more}


def torchrun(ranks: int, *words, check: bool = True, more: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port()]
    result = subprocess.run(
        [*map(str, launcher), *map(str, words)],
        env=environment(**(more or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def command(ranks: int, *words, check: bool = True) -> subprocess.CompletedProcess:
    """The command as so many ranks, without a launcher. The output is that of all of them, of rank 0 first."""
    port = free_port()
    all_ranks = [Alone(rank, ranks, port, *words) for rank in range(ranks)]
    return together([alone.process for alone in all_ranks], check)


def forked(ranks: int, script, *words, check: bool = True) -> subprocess.CompletedProcess:
    """A Python script as so many ranks, without a launcher; one rank: on its own."""
    if ranks == 1:
        return together([Process(script, *words, env=environment())], check)
    return together(as_ranks(ranks, script, *words, env=environment(), port=free_port()), check)


def together(processes: list, check: bool) -> subprocess.CompletedProcess:
    ends = [process.communicate(timeout=300) for process in processes]
    code = next((process.returncode for process in processes if process.returncode != 0), 0)
    out, err = ("".join(part) for part in zip(*ends, strict=True))
    assert not check or code == 0, out + err
    return subprocess.CompletedProcess([], code, out, err)


class Alone:
    """One rank started by hand, as a launcher would."""

    def __init__(self, rank: int, size: int, port: int, *words) -> None:
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.process = subprocess.Popen(
            [BUILD / "qlorapp", *map(str, words)],
            env=environment(**place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout: float = 90) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("ranks")
    peer.write_llama(folder / "model", num_hidden_layers=2)
    peer.write_rows(folder / "rows.jsonl", 22)
    peer.write_rows(folder / "eval.jsonl", 7, seed=5)
    return folder


def words(root, out, **options) -> list:
    """Eleven micro-batches of two rows an epoch: windows of four are partial at its end."""
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-2, "dtype": "float32",
        "lora_r": 4, "target_modules": "q_proj,down_proj", "device": "cpu", "eval_data": root / "eval.jsonl", "eval_strategy": "steps",
        "eval_steps": 3, "per_device_eval_batch_size": 2, "ddp_timeout": 30, "lr_scheduler_type": "constant", **options,
    }  # fmt: skip
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return ["train", "--model", root / "model", "--data", root / "rows.jsonl", "--output", out, *given]


def history(folder: pathlib.Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def adapter(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_same_run(found: pathlib.Path, expected: pathlib.Path) -> None:
    for mine, other in zip(history(found), history(expected), strict=True):
        assert mine["step"] == other["step"]
        for name in ("loss", "eval_loss", "eval_loss_token_weighted", "learning_rate", "grad_norm", "num_input_tokens_seen"):
            assert (name in mine) == (name in other), name
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-6, rel=1e-5), name
    values, reference = adapter(found), adapter(expected)
    for name, value in reference.items():
        assert (values[name] - value).norm() <= 1e-5 * value.norm(), name


# --- the same run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_dropout": 0.2, "group_by_length": "true"},
        {"packing": "true", "max_length": 48, "per_device_train_batch_size": 1},
    ],
    ids=["plain", "dropout", "packed"],
)
def test_two_processes_train_what_one_trains_with_twice_the_accumulation(root, tmp_path, options):
    options = {"include_num_input_tokens_seen": "all", **options}
    peer.run_cli(*words(root, tmp_path / "one", gradient_accumulation_steps=4, **options))
    done = command(2, *words(root, tmp_path / "two", gradient_accumulation_steps=2, **options))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert done.stdout.count("adapter written to") == 1 and "on each of 2 processes" in done.stdout
    assert sorted(os.listdir(tmp_path / "two")) == sorted(os.listdir(tmp_path / "one"))


def test_torchrun_starts_the_command(root, tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    command(2, *words(root, tmp_path / "alone", **options))
    torchrun(2, "--no-python", BUILD / "qlorapp", *words(root, tmp_path / "launched", **options))
    assert_same_run(tmp_path / "launched", tmp_path / "alone")


def test_four_processes_too_and_a_run_continues_with_two(root, tmp_path):
    peer.run_cli(*words(root, tmp_path / "one", gradient_accumulation_steps=4))
    command(4, *words(root, tmp_path / "four", gradient_accumulation_steps=1))
    assert_same_run(tmp_path / "four", tmp_path / "one")
    # The first half by four processes, the second by two, with the same rows in each step.
    command(4, *words(root, tmp_path / "part", gradient_accumulation_steps=1, max_steps=STEPS - 2))
    resumed = command(
        2, *words(root, tmp_path / "part", gradient_accumulation_steps=2, resume_from_checkpoint=tmp_path / "part/checkpoint-2")
    )
    assert "per_device_train_batch_size x gradient_accumulation_steps x processes 2 x 1 x 4 → 2 x 2 x 2" in resumed.stdout
    assert_same_run(tmp_path / "part", tmp_path / "one")
    # Another global batch is another run.
    refused = command(
        2, *words(root, tmp_path / "part", gradient_accumulation_steps=1, resume_from_checkpoint=tmp_path / "part/checkpoint-2"),
        check=False,
    )  # fmt: skip
    assert refused.returncode != 0 and "x processes 2 x 1 x 4 → 2 x 1 x 2" in refused.stderr


def test_a_resumed_run_of_two_ends_in_the_same_bytes(root, tmp_path):
    command(2, *words(root, tmp_path / "whole", gradient_accumulation_steps=2, lora_dropout=0.1))
    resume = {"resume_from_checkpoint": tmp_path / "whole/checkpoint-2"}
    command(2, *words(root, tmp_path / "again", gradient_accumulation_steps=2, lora_dropout=0.1, **resume))
    for name in (
        "adapter_model.safetensors",
        f"checkpoint-{STEPS}/optimizer.safetensors",
        f"checkpoint-{STEPS}/run_state.json",
    ):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


# --- how it ends


def long_run(root, out, **options) -> list:
    options = {
        "max_steps": 100_000,
        "save_steps": 3,
        "eval_strategy": "no",
        "save_total_limit": 2,
        "logging_steps": 1000,
        **options,
    }
    return words(root, out, **options)


def start(ranks: int, *given) -> subprocess.Popen:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        ranks,
        "--master-port",
        free_port(),
        "--no-python",
    ]
    return subprocess.Popen(
        [*map(str, launcher), BUILD / "qlorapp", *map(str, given)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def ranks_of(launcher: subprocess.Popen, count: int) -> list[int]:
    """The processes of the ranks, in their order."""
    for _ in range(600):
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        own = {}
        for child in children:
            with contextlib.suppress(OSError):
                variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                rank = [v.partition(b"=")[2] for v in variables if v.startswith(b"RANK=")]
                if rank and b"qlorapp" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                    own[int(rank[0])] = int(child)
        if len(own) == count:
            return [own[rank] for rank in range(count)]
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def wait_for_checkpoint(out: pathlib.Path) -> None:
    for _ in range(1200):
        if list(out.glob("checkpoint-*/MANIFEST.json")):
            return
        time.sleep(0.05)
    raise AssertionError("no checkpoint came")


def is_whole(out: pathlib.Path) -> bool:
    return "damaged" not in peer.run_cli("inspect", out).stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(root, tmp_path, rank):
    launcher = start(2, *long_run(root, tmp_path / "out"))
    processes = ranks_of(launcher, 2)
    wait_for_checkpoint(tmp_path / "out")
    os.kill(processes[rank], signal.SIGTERM)
    output, _ = launcher.communicate(timeout=90)
    assert re.search(r"stopped by SIGTERM after step (\d+)", output), output
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", output)[1])
    assert (tmp_path / "out" / f"checkpoint-{step}").is_dir() and is_whole(tmp_path / "out")
    assert not any(pathlib.Path(f"/proc/{process}").exists() for process in processes)


def test_a_rank_that_dies_ends_the_other_which_names_it(root, tmp_path):
    port = free_port()
    both = [Alone(rank, 2, port, *long_run(root, tmp_path / "out", ddp_timeout=4)) for rank in (0, 1)]
    wait_for_checkpoint(tmp_path / "out")
    both[1].process.kill()
    begin = time.monotonic()
    code, _, err = both[0].end()
    # 4: there is a checkpoint from which the run can go on.
    assert code == 4 and "rank 0 waited 4 s for rank [1]" in err and time.monotonic() - begin < 60
    both[1].end()
    assert is_whole(tmp_path / "out")
    report = json.loads((tmp_path / "out/run_report.json").read_text())
    assert report["outcome"] == "failed" and "rank [1]" in report["error"]


def test_rank_0_dies_and_the_others_end(root, tmp_path):
    port = free_port()
    both = [Alone(rank, 2, port, *long_run(root, tmp_path / "out", ddp_timeout=4)) for rank in (0, 1)]
    wait_for_checkpoint(tmp_path / "out")
    both[0].process.kill()
    code, _, err = both[1].end()
    assert code == 4 and "rank 0" in err and "--resume_from_checkpoint true" in err
    both[0].end()
    peer.run_cli(*words(root, tmp_path / "out", max_steps=1, resume_from_checkpoint="true", gradient_accumulation_steps=2))
    assert is_whole(tmp_path / "out") and not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_rank_that_fails_ends_the_others_with_its_message(root, tmp_path):
    port = free_port()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "trainer_state.json").write_text("{}")  # rank 0 is refused; rank 1 does not look
    both = [Alone(rank, 2, port, *words(root, tmp_path / "used")) for rank in (0, 1)]
    begin = time.monotonic()
    for alone in both:
        code, _, err = alone.end()
        assert code == 2 and "holds another run" in err, err
    assert time.monotonic() - begin < 25


# --- what does not fit


def test_a_world_that_does_not_form_names_the_missing_rank(root, tmp_path):
    code, _, err = Alone(0, 2, free_port(), *words(root, tmp_path / "out", ddp_timeout=3)).end()
    assert code == 2 and "rank 0 waited 3 s for rank [1], which did not come to the start of the run" in err
    code, _, err = Alone(1, 2, free_port(), *words(root, tmp_path / "out", ddp_timeout=3)).end()
    assert code == 2 and "rank 1 of 2 cannot reach the store" in err and "rank 0 or its launcher is missing" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("what", "change"),
    [("options", {"learning_rate": 1e-3}), ("training data", {"max_length": 7}), ("base model", {"double_quant": "false"})],
)
def test_ranks_that_differ_are_refused_before_the_first_step(root, tmp_path, what, change):
    port = free_port()
    both = [Alone(rank, 2, port, *words(root, tmp_path / "out", **(change if rank else {}))) for rank in (0, 1)]
    for alone in both:
        code, _, err = alone.end()
        assert code == 2 and "all ranks must have the same" in err and "on rank [0]" in err and "on rank [1]" in err, err
        assert what in err or what != "options"


def test_more_ranks_than_micro_batches_are_refused(root, tmp_path):
    done = command(2, *words(root, tmp_path / "out", per_device_train_batch_size=22), check=False)
    assert done.returncode != 0 and "an epoch must have a micro-batch for each of 2 ranks" in done.stderr


def test_a_dry_run_plans_once(root, tmp_path):
    plan = command(2, *words(root, tmp_path / "out"), "--dry_run")
    assert plan.stdout.count("host memory: ") == 1 and not (tmp_path / "out").exists()


# --- Hugging Face's own loop

SCRIPT = """
import gc, json, os, sys
import qlorapp, torch, transformers
sys.path.insert(0, {tests!r})
from tiny_trainer import NF4, rows, tokenizer
accumulation, out = int(sys.argv[1]), sys.argv[2]
model = qlorapp.AutoModelForCausalLM.from_pretrained({model!r}, quantization_config=qlorapp.BitsAndBytesConfig(**NF4), dtype=torch.float32)
torch.manual_seed(5)
model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
args = transformers.TrainingArguments(
    out, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_steps=5, learning_rate=3e-3, logging_steps=1,
    save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, ddp_backend="gloo" if accumulation == 1 else None,
)
trainer = transformers.Trainer(
    model, args, train_dataset=rows(32), data_collator=transformers.DataCollatorForSeq2Seq(tokenizer())
)
trainer.train()
if trainer.is_world_process_zero():
    with open(os.path.join(out, "losses.json"), "w") as file:
        json.dump([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], file)
del trainer  # DistributedDataParallel holds the group
gc.collect()
if torch.distributed.is_initialized():  # or a thread of torch's Gloo may abort the process when Python ends
    torch.distributed.destroy_process_group()
"""


def test_transformers_loop_under_torchrun_gives_the_losses_of_one_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests/python"), model=str(ROOT / "examples/data/tiny-llama")))
    losses = []
    for ranks, accumulation in ((1, 2), (2, 1)):
        out = tmp_path / str(ranks)
        out.mkdir()
        if ranks == 1:
            forked(1, script, accumulation, out)
        else:
            torchrun(ranks, script, accumulation, out)
        losses.append(json.loads((out / "losses.json").read_text()))
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], abs=1e-5)
