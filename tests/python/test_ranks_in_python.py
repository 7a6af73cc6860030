# SPDX-License-Identifier: Apache-2.0
"""A Python script as several processes: C++ computes the steps of all, in transformers' process group."""

import json
import os
import re
import signal
import subprocess

import pytest
from conftest import ROOT
from forked import Process, ranks_of
from safetensors.torch import load_file
from test_data_parallel import environment, forked, free_port, is_whole, torchrun

SCRIPT = """
import functools, gc, json, os, signal, sys, time
sys.path.insert(0, {tests!r})
import qlorapp, torch, transformers
from tiny_trainer import TINY, ByAutograd, adapted, base_model, in_cpp, made, rows
def leave():  # or a thread of torch's Gloo may abort the process when Python ends
    globals().pop("trainer", None)  # DistributedDataParallel holds the group
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
class Slow(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        print("step", state.global_step, os.getpid(), os.environ.get("RANK", "0"), flush=True)
class Ends(transformers.TrainerCallback):  # what happens to the last process in the second step, between two micro-batches, or at the end
    def on_train_end(self, args, state, control, **others):
        if own["ends"] == "late" and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    def on_substep_end(self, args, state, control, **others):
        if own["ends"] not in ("late", "passes") and state.global_step == 1 and args.process_index == args.world_size - 1:
            if own["ends"] == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGSTOP if own["ends"] == "stop" else signal.SIGTERM)
options, out, own = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
resume, slow, seed, lora = (own.get(name) for name in ("resume", "slow", "seed", "lora"))
folder = own.get("folder", str(TINY))
rank = int(os.environ.get("RANK", "0"))
if own.get("sharding") == "node":  # two processes a machine
    os.environ["GROUP_RANK"] = str(rank // 2)
resume = own.get("other", resume) if rank else resume
options = {{"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
           "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": "all", "ddp_backend": "gloo" if "RANK" in os.environ else None, **options}}
more = {{"eval_dataset": rows(8, seed=4), "callbacks": [Slow()] if slow else [Ends()] if own.get("ends") else []}}
data = rows(own.get("rows", 26), seed=9 + (rank if seed else 0))
model = None
if own.get("sharding", "no") != "no" or own.get("wide"):
    options_of_base = {{"dtype": torch.float32}} if own.get("wide") else {{"base_sharding": own["sharding"]}}
    model = adapted(base_model(folder, device_map="cpu", **options_of_base), **(lora or {{}}))
by = own.get("by", "cpp")
kind = ByAutograd if by == "autograd" else qlorapp.Trainer
trainer = made(kind, folder, out, more=more, data=data, lora=lora, model=model, **options)
if own.get("ends") == "passes" and rank:  # C++ asks after each step, and between the micro-batches of a window
    asked, is_signalled = [], trainer._is_signalled
    def is_asked():
        asked.append(trainer.state.global_step)
        if asked.count(1) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return is_signalled()
    trainer._is_signalled = is_asked
try:
    result = trainer.train(resume_from_checkpoint=resume)
except BaseException:
    leave()
    raise
assert in_cpp(trainer) == (by == "cpp")
trainer.save_model(out)
if trainer.is_world_process_zero():
    names = ("eval_loss", "step", "loss", "learning_rate", "grad_norm", "num_input_tokens_seen", "total_flos")
    history = [[entry.get(name) for name in names] for entry in trainer.state.log_history]
    with open(os.path.join(out, "history.json"), "w") as file:
        json.dump(history, file)
print(trainer._told)
print("SUM", float(sum(p.detach().double().sum() for p in trainer.model.parameters() if p.requires_grad)))
leave()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT.format(tests=str(ROOT / "tests/python")))
    return path


def run(script, ranks: int, out, options: dict, check: bool = True, **own) -> subprocess.CompletedProcess:
    return forked(ranks, script, json.dumps(options), out, json.dumps(own), check=check)


def by_hand(script, *given) -> list[Process]:
    """Two processes without torchrun, which would end one because of the other."""
    return ranks_of(2, script, *given, env=environment(), port=free_port())


def error_of_first(both: list[Process]) -> str:
    """What process 0 fails with while process 1 hangs."""
    try:
        _, error = both[0].communicate(timeout=90)
    finally:
        both[1].kill()
        both[1].communicate(timeout=90)
    assert both[0].returncode == 1, error
    return error


def results(out) -> tuple[list, dict]:
    return json.loads((out / "history.json").read_text()), load_file(out / "adapter_model.safetensors")


@pytest.mark.parametrize("lora", [{}, {"lora_dropout": 0.2}], ids=["plain", "dropout"])
def test_two_processes_train_what_one_trains_with_twice_the_accumulation(script, tmp_path, lora):
    options = {} if lora else {"load_best_model_at_end": True, "save_steps": 3, "save_total_limit": 1}
    run(script, 1, tmp_path / "one", {"gradient_accumulation_steps": 4, **options}, lora=lora, rows=32)
    given = [
        json.dumps({"gradient_accumulation_steps": 2, **options}),
        tmp_path / "two",
        json.dumps({"lora": lora, "rows": 32}),
    ]
    (forked if lora else torchrun)(2, script, *given)
    left = [sorted(path.name for path in (tmp_path / each).glob("*")) for each in ("one", "two")]
    assert left[0] == left[1] and {"MANIFEST.json", "qlorapp_base.json"} <= set(left[0]) and is_whole(tmp_path / "two")
    (mine, adapter), (other, reference) = results(tmp_path / "two"), results(tmp_path / "one")
    assert len(mine) == len(other) > 7
    for one, expected in zip(mine, other, strict=True):
        assert [value is None for value in one] == [value is None for value in expected]
        assert [v or 0 for v in one[1:]] == pytest.approx([v or 0 for v in expected[1:]], rel=1e-5, abs=1e-6)
        # transformers weighs the batches that processes evaluate side by side by their tokens, and otherwise does not.
        assert (one[0] or 0) == pytest.approx(expected[0] or 0, rel=2e-2)
    for name, value in reference.items():
        assert (adapter[name] - value).norm() <= 1e-5 * value.norm(), name


ODD = """
def odd(given, theirs=trainer.data_collator):  # some batches have labels on padding, which transformers counts
    batch = theirs(given)
    if int(batch["input_ids"][0, 0]) % 2:
        batch["labels"][batch["attention_mask"] == 0] = 7
    return batch
trainer.data_collator = odd
try:
"""


OPEN = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(18))
trainer.train_dataset = Stream()
def odd(given, theirs=trainer.data_collator):  # the second epoch's first batches have labels on padding
    batch = theirs(given)
    odd.calls += 1
    if odd.calls in (6, 7):
        batch["labels"][batch["attention_mask"] == 0] = 7
    return batch
odd.calls = 0
trainer.data_collator = odd
"""


@pytest.mark.parametrize("kind", ["plain", "odd"])
def test_steps_of_two_processes_are_those_of_distributed_data_parallel(script, tmp_path, kind):
    if kind == "odd":
        text = script.read_text().replace("try:\n", ODD.lstrip("\n"), 1)
        script = tmp_path / "odd.py"
        script.write_text(text)
    options = {"gradient_accumulation_steps": 2, "load_best_model_at_end": True, "save_steps": 3, "save_total_limit": 1}
    for by in ("cpp", "autograd"):
        run(script, 2, tmp_path / by, options, by=by, wide=True)
        assert (tmp_path / by / "checkpoint-6/MANIFEST.json").is_file() or (
            tmp_path / by / "checkpoint-3/MANIFEST.json"
        ).is_file()
    assert all(is_whole(tmp_path / by) for by in ("cpp", "autograd"))
    (mine, adapter), (other, reference) = results(tmp_path / "cpp"), results(tmp_path / "autograd")
    assert len(mine) == len(other) > 7
    for one, expected in zip(mine, other, strict=True):
        assert [value is None for value in one] == [value is None for value in expected]
        assert [v or 0 for v in one] == pytest.approx([v or 0 for v in expected], rel=1e-5, abs=1e-6)
    for name, value in reference.items():
        assert (adapter[name] - value).norm() <= 1e-4 * value.norm(), name


def test_what_process_0_fails_to_save_ends_all(script, tmp_path):
    fails = tmp_path / "fails.py"
    fails.write_text(
        script.read_text().replace(
            "try:\n    result",
            "trainer._save_optimizer_and_scheduler = lambda folder: 1 / (rank if own['late'] else 1 - rank)\ntry:\n    result",
            1,
        )
    )
    for late in (True, False):  # process 0 fails, or the other one
        both = by_hand(fails, json.dumps({"ddp_timeout": 60}), tmp_path / "out", json.dumps({"late": late}))
        ends = [process.communicate(timeout=55)[1] for process in both]
        assert all("division by zero" in err for err in ends), ends
        assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_base_divided_over_each_machine_trains_one_adapter(script, tmp_path):
    done = run(script, 4, tmp_path, {"max_steps": 3, "logging_steps": 1, "eval_strategy": "no"}, sharding="node")
    sums = [line for line in done.stdout.splitlines() if line.startswith("SUM")]
    assert len(sums) == 4 and len(set(sums)) == 1, sums


def test_entropy_and_accuracy_are_of_all_processes(tmp_path):
    script = tmp_path / "sft.py"
    script.write_text(f"""
import functools, gc, json, os, sys
sys.path.insert(0, {str(ROOT / "tests/python")!r})
import datasets, qlorapp, torch, trl
from tiny_trainer import TINY, adapted, rows, tokenizer
load = functools.partial(qlorapp.AutoModelForCausalLM.from_pretrained, TINY, device_map="cpu", dtype=torch.float32)
found = []
for kind in (qlorapp.SFTTrainer, trl.SFTTrainer):
    args = qlorapp.SFTConfig(output_dir=sys.argv[1], max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
                             ddp_backend="gloo", use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True)
    trainer = kind(adapted(load()), args, train_dataset=datasets.Dataset.from_list(rows(24)), processing_class=tokenizer())
    trainer.train()
    found.append([[entry.get(key) for key in ("loss", "entropy", "mean_token_accuracy", "num_tokens")] for entry in trainer.state.log_history[:3]])
    del trainer
    gc.collect()
print("FOUND" + json.dumps(found))
torch.distributed.destroy_process_group()
""")
    done = forked(2, script, tmp_path / "out")
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(lines) == 2
    for mine, theirs in lines:
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-5) and None not in one


def test_a_stream_that_begins_again_within_a_window_is_that_of_distributed_data_parallel(tmp_path, script):
    """The open gradients of its last window are sums already when autograd computes the next."""
    text = script.read_text().replace("try:\n    result", OPEN.lstrip("\n") + "try:\n    result", 1)
    stream = tmp_path / "stream.py"
    stream.write_text(text)
    options = {
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
    }
    for by in ("cpp", "autograd"):
        run(
            stream,
            2,
            tmp_path / by,
            {**options, "include_num_input_tokens_seen": "no", "accelerator_config": {"dispatch_batches": False}},
            by=by,
            wide=True,
        )
    (mine, _), (other, _) = results(tmp_path / "cpp"), results(tmp_path / "autograd")
    for one, expected in zip(mine, other, strict=True):
        assert [v or 0 for v in one] == pytest.approx([v or 0 for v in expected], rel=1e-5, abs=1e-6)


def test_a_run_of_two_resumes_in_the_same_bytes(script, tmp_path):
    options = {"gradient_accumulation_steps": 2}
    own = {"lora": {"lora_dropout": 0.1}}
    run(script, 2, tmp_path / "whole", options, **own)
    first = (tmp_path / "whole/adapter_model.safetensors").read_bytes()
    resume = tmp_path / "whole/checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in resume.iterdir()}
    run(script, 2, tmp_path / "again", options, **own, resume=str(resume), other="/nowhere")
    assert (tmp_path / "again/adapter_model.safetensors").read_bytes() == first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_ends_all_with_a_checkpoint(script, tmp_path, rank):
    given = [
        json.dumps({"max_steps": 100_000, "save_steps": 50_000, "eval_strategy": "no"}),
        tmp_path / "out",
        json.dumps({"slow": True}),
    ]
    both = by_hand(script, *given)
    while not (line := both[rank].stdout.readline()).startswith("step 3 "):
        assert line, both[rank].stderr.read()
    os.kill(both[rank].pid, signal.SIGTERM)
    ends = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [143, 143], ends
    step = int(re.search(r"stopped after step (\d+) of 100000 and saved a checkpoint", ends[0][1])[1])
    assert (tmp_path / "out" / f"checkpoint-{step}" / "optimizer.pt").is_file() and is_whole(tmp_path / "out")


@pytest.mark.parametrize("sharding", ["no", "full"])
def test_a_signal_ends_all_between_two_micro_batches(script, tmp_path, sharding):
    options = {
        "gradient_accumulation_steps": 4,
        "eval_strategy": "no",
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    own = {"lora": {"lora_dropout": 0.1}, "sharding": sharding}
    run(script, 2, tmp_path / "whole", options, **own)
    expected = (tmp_path / "whole/adapter_model.safetensors").read_bytes()
    given = [json.dumps(options), tmp_path / "out", json.dumps({**own, "ends": "passes"})]
    both = by_hand(script, *given)
    ends = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [143, 143], ends
    assert "stopped after step 1 of 3 and saved a checkpoint" in ends[0][1]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"] and is_whole(tmp_path / "out")
    run(script, 2, tmp_path / "out", options, resume=str(tmp_path / "out/checkpoint-1"), **own)
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == expected


def test_a_signal_after_the_last_step_ends_all(script, tmp_path):
    options = {"eval_strategy": "no", "max_steps": 2, "save_strategy": "steps", "save_steps": 50}
    both = by_hand(script, json.dumps(options), tmp_path / "out", json.dumps({"ends": "late"}))
    ends = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [143, 143], ends
    assert (tmp_path / "out/checkpoint-2/trainer_state.json").is_file() and is_whole(tmp_path / "out")


@pytest.mark.parametrize(("ends", "sharding"), [("hang", "no"), ("stop", "full")])
def test_a_process_that_hangs_is_named_by_the_others(script, tmp_path, ends, sharding):
    options = {
        "gradient_accumulation_steps": 4,
        "eval_strategy": "no",
        "save_strategy": "no",
        "ddp_timeout": 7,
        "include_num_input_tokens_seen": "no",
    }  # for which transformers exchanges numbers after each micro-batch
    both = by_hand(script, json.dumps(options), tmp_path / "out", json.dumps({"ends": ends, "sharding": sharding}))
    assert "for rank [1], which did not come" in error_of_first(both)


def test_a_process_that_does_not_come_to_a_pass_is_named(tmp_path):
    script = tmp_path / "pass.py"
    script.write_text(f"""
import datetime, os, sys, time
sys.path.insert(0, {str(ROOT / "tests/python")!r})
import torch
from tiny_trainer import TINY, base_model
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=7))
model = base_model(TINY, device_map="cpu", base_sharding="full")
if os.environ["RANK"] == "1":
    time.sleep(600)
model(torch.tensor([[3, 4, 5]]))
""")
    both = by_hand(script)
    assert "in an exchange for rank [1], which did not come to it" in error_of_first(both)


def test_what_one_process_fails_of_ends_the_others(script, tmp_path):
    fails = tmp_path / "fails.py"
    fails.write_text(
        script.read_text().replace(
            "try:\n    result",
            "collate = trainer.data_collator\n"
            "trainer.data_collator = lambda given: {k: v + 10**6 * rank * (k == 'input_ids') for k, v in collate(given).items()}\n"
            "try:\n    result",
            1,
        )
    )
    both = by_hand(fails, json.dumps({"ddp_timeout": 60}), tmp_path / "out", "{}")
    ends = [process.communicate(timeout=55)[1] for process in both]
    assert all("token ids must be from 0 to" in err for err in ends), ends


STOPS = """
class StopsInFirst(transformers.TrainerCallback):
    def on_log(self, args, state, control, **others):
        if state.is_world_process_zero and state.global_step == 3:
            control.should_training_stop = True
"""


def test_a_flag_that_a_callback_of_process_0_sets_counts_in_all(script, tmp_path):
    stops = tmp_path / "stops.py"
    text = (
        script.read_text()
        .replace("class Slow(", STOPS + "class Slow(", 1)
        .replace("[Slow()] if slow", "[StopsInFirst()] if slow", 1)
    )
    stops.write_text(text)
    run(stops, 2, tmp_path / "out", {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1}, slow=True)
    steps = [entry[1] for entry in results(tmp_path / "out")[0]]
    assert max(steps) == 3


@pytest.mark.parametrize(
    "options", [{"dataloader_drop_last": True}, {"accelerator_config": {"split_batches": True}}], ids=["dropped", "split"]
)
def test_batches_that_are_dealt_out_differently_are_those_of_distributed_data_parallel(script, tmp_path, options):
    given = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, **options}
    for by in ("cpp", "autograd"):
        run(script, 2, tmp_path / by, given, by=by, wide=True)
    (mine, _), (other, _) = results(tmp_path / "cpp"), results(tmp_path / "autograd")
    for one, expected in zip(mine, other, strict=True):
        assert [v or 0 for v in one] == pytest.approx([v or 0 for v in expected], rel=1e-5, abs=1e-6)


def test_weights_of_tokens_that_differ_between_processes_are_torchs(script, tmp_path):
    given = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "average_tokens_across_devices": False}
    done = run(script, 2, tmp_path / "out", given, by="torch")
    assert "average_tokens_across_devices=False weighs the rows of each process on their own" in done.stderr


def test_processes_with_different_rows_are_refused(script, tmp_path):
    done = run(script, 2, tmp_path / "out", {}, check=False, seed=True)
    assert done.returncode != 0 and "all ranks must have the same training data" in done.stderr
    assert not list((tmp_path / "out").glob("checkpoint-*"))
