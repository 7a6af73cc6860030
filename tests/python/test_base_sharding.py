# SPDX-License-Identifier: Apache-2.0
"""A base that is sharded over the processes trains the same bytes as one that each of them has whole."""

import json
import re
import shutil
import subprocess
import sys

import peer
import pytest
import qlorapp
from conftest import BUILD, ROOT
from families import FAMILIES
from test_data_parallel import Alone, command, environment, forked, free_port, history, words

FULL = {"base_sharding": "full"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    # Of two ranks one reads two blocks, the other one. fp8 needs widths that are multiples of 64.
    peer.write_llama(folder / "model", num_hidden_layers=3, num_key_value_heads=4)
    peer.write_rows(folder / "rows.jsonl", 22)
    peer.write_rows(folder / "eval.jsonl", 7, seed=5)
    return folder


def assert_same_bytes(root, tmp_path, ranks: int, **options) -> None:
    command(ranks, *words(root, tmp_path / "whole", **options))
    command(ranks, *words(root, tmp_path / "sharded", **options, **FULL))
    mine, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("sharded", "whole"))
    assert mine == other
    losses = [
        [(entry.get("loss"), entry.get("eval_loss")) for entry in history(tmp_path / name)] for name in ("sharded", "whole")
    ]
    assert losses[0] == losses[1]


# Eleven micro-batches: two ranks have six and five of them, and the last window of four is partial. Evaluation has four batches.
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 3}),
        (4, {}),
        (2, {"load_in_4bit": "false", "checkpoint_keep": "every:2", "gradient_checkpointing": "true"}),
        (2, {"init_lora_weights": "pissa", "lora_dropout": 0.1, "double_quant": "false"}),
        (3, {"use_dora": "true", "target_modules": "all-linear", "packing": "true", "max_length": 48}),
        (2, {"fp8": "true", "dtype": "bfloat16", "eval_strategy": "no"}),
    ],
    ids=["uneven", "four", "dense", "pissa", "dora", "fp8"],
)
def test_the_adapter_is_that_of_a_base_that_is_whole(root, tmp_path, ranks, options):
    assert_same_bytes(root, tmp_path, ranks, **options)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3"])
def test_of_other_families_too(tmp_path, family):
    peer.write_llama(tmp_path / "model", **FAMILIES[family])
    for name in ("rows", "eval"):
        peer.write_rows(tmp_path / f"{name}.jsonl", 11)
    assert_same_bytes(tmp_path, tmp_path, 2, max_steps=3, eval_strategy="no")


def test_of_a_checkpoint_in_four_bits_too(root, tmp_path):
    peer.run_cli("quantize", "--model", root / "model", "--output", tmp_path / "four")
    shutil.copytree(root, tmp_path / "root")
    shutil.rmtree(tmp_path / "root" / "model")
    (tmp_path / "four").rename(tmp_path / "root" / "model")
    assert_same_bytes(tmp_path / "root", tmp_path, 2, max_steps=3, eval_strategy="no")


def test_a_run_continues_whether_or_not_the_base_is_sharded(root, tmp_path):
    command(2, *words(root, tmp_path / "run", **FULL))
    first = (tmp_path / "run/adapter_model.safetensors").read_bytes()
    resumed = command(2, *words(root, tmp_path / "run", resume_from_checkpoint=tmp_path / "run/checkpoint-2"))
    assert "base_sharding" in resumed.stdout and (tmp_path / "run/adapter_model.safetensors").read_bytes() == first
    command(2, *words(root, tmp_path / "run", resume_from_checkpoint=tmp_path / "run/checkpoint-4", **FULL))
    assert (tmp_path / "run/adapter_model.safetensors").read_bytes() == first


def test_on_two_machines_it_may_be_sharded_over_the_ranks_of_each(root, tmp_path):
    command(4, *words(root, tmp_path / "whole"))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    launcher += ["--master-port", str(free_port()), "--no-python", BUILD / "qlorapp"]
    given = words(root, tmp_path / "sharded", base_sharding="node")
    machines = [
        subprocess.Popen(
            list(map(str, [*launcher[:3], "--node-rank", node, *launcher[3:], *given])),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    ends = [machine.communicate(timeout=200)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    mine, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("sharded", "whole"))
    assert mine == other
    half = command(2, *words(root, tmp_path / "two", max_steps=1, eval_strategy="no", **FULL)).stdout
    assert re.search(r"model in memory: .*", half)[0] in ends[0]


def test_each_rank_holds_its_part(root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    peer.write_llama(tmp_path / "root/model", num_hidden_layers=12)

    def held(**options) -> float:
        options = {"max_steps": 1, "overwrite_output_dir": "true", "eval_strategy": "no", "load_in_4bit": "false", **options}
        done = command(2, *words(tmp_path / "root", tmp_path / "out", **options))
        number, unit = re.search(r"model in memory: ([0-9.]+) (\w+)", done.stdout).groups()
        return float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]

    block = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192)  # bytes
    table = 4 * peer.VOCAB * 64  # half of the embedding and half of the head
    assert held() - held(**FULL) == pytest.approx((12 / 2 - 2) * block + table, rel=0.05)


def test_a_budget_divides_a_base_that_does_not_fit_whole(root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    peer.write_llama(tmp_path / "root/model", num_hidden_layers=40)
    options = {"max_steps": 2, "eval_strategy": "no", "load_in_4bit": "false", "target_modules": "q_proj"}

    def run(*more, **budget):
        return command(2, *words(tmp_path / "root", tmp_path / "out", **options, **budget), *more, check=False)

    def least(**more) -> float:
        number, unit = re.search(
            r"needs (?:at least )?([0-9.]+) (\w+)", run("--dry_run", memory_budget="1MiB", **more).stderr
        ).groups()
        return float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]

    whole, sharded = least(), least(**FULL)
    assert sharded < 0.8 * whole
    news = "memory_budget: the base is divided over 2 processes"
    done = run(memory_budget=f"{int((whole + sharded) / 2 / 1024)}KiB")
    assert done.returncode == 0 and news in done.stdout
    assert news not in run("--dry_run", memory_budget=f"{int(whole * 1.2 / 1024)}KiB").stdout


def test_a_share_that_cannot_be_read_ends_all_ranks(root, tmp_path):
    shutil.copytree(root / "model", tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    options = {"ddp_timeout": 8, **FULL}
    given = words(root, tmp_path / "out", **options)
    given[given.index(root / "model")] = tmp_path / "model"
    port = free_port()
    weights.write_bytes(weights.read_bytes()[:-1000])
    both = [Alone(0, 2, port, *words(root, tmp_path / "out", **options)), Alone(1, 2, port, *given)]
    (whole_code, _, whole_err), (code, _, err) = (alone.end() for alone in both)
    assert code == 2 and "model.safetensors" in err, err  # before it meets the other
    assert whole_code == 2 and ("rank [1]" in whole_err or "model.safetensors" in whole_err), whole_err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base_sharding": "half"}, "base_sharding must be"),
        ({"base_on_host": "true", **FULL}, "base_sharding=full must be without base_on_host"),
        ({"cuda_graphs": "true", **FULL}, "cuda_graphs=True must be without base_sharding"),
        ({"base_sharding": "node"}, "--base_sharding node divides the base over several processes; this is one"),
        (FULL, "--base_sharding full divides the base over several processes; this is one"),
    ],
)
def test_what_does_not_fit_is_refused(root, tmp_path, change, why):
    done = peer.run_cli(*words(root, tmp_path / "out", **change), check=False)
    assert done.returncode == 2 and why in done.stderr and not (tmp_path / "out").exists()


def test_a_plan_counts_a_part_of_the_base_on_each_gpu():
    def codes(*more) -> tuple[float, str]:
        plan = peer.run_cli("plan", "--model", "llama-3.1-70b", "--gpu", "H100", "--batch", 1, "--seq", 512, *more).stdout
        return float(re.search(r"codes ([0-9.]+)", plan)[1]), plan

    whole, _ = codes()
    half, plan = codes("--gpus", 2, "--base_sharding", "full")
    assert half == pytest.approx(whole / 2 + 2 * whole / 80, rel=0.05)  # 80 blocks; scales come with the codes
    assert "Base divided over 2 ranks" in plan and "received" in plan
    for more, why in ((["--base_sharding", "full"], "Give --gpus"), (["--gpus", 2], "--gpus needs --hours or --base_sharding")):
        done = peer.run_cli("plan", "--model", "llama-3.1-70b", "--gpu", "H100", *more, check=False)
        assert done.returncode == 2 and why in done.stderr


# --- in Python

SCRIPT = """
import gc, json, os, sys
sys.path.insert(0, {tests!r})
import datasets, peft, pytest, qlorapp, torch
from tiny_trainer import adapted, base_model, in_cpp, made, rows, tokenizer
folder, out, sharding, known, computes = sys.argv[1:6]
class ByTorch:
    def compute_loss(self, *given, **more):
        return super().compute_loss(*given, **more)
of = lambda kind: kind if computes == "C++" else type(kind.__name__, (ByTorch, kind), {{}})
options = {{"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
           "per_device_eval_batch_size": 2, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}}
base = base_model(folder, device_map="cpu", base_sharding=sharding)
def refused(why, call, *given, **more):
    with pytest.raises(ValueError, match=why):
        call(*given, **more)
if sharding != "no":
    assert [base.num_parameters(), *base.model.embed_tokens.weight.shape] == json.loads(known)
    ids = torch.tensor([[3, 4, 5]])
    refused("does not generate", base.generate, ids)
    refused("cannot be written", base.save_pretrained, out)
    refused("forward was given output_hidden_states", base, ids, output_hidden_states=True)
    refused("divided over processes", base.model.layers[0].mlp.up_proj, torch.zeros(1, 64))
    refused("divided over processes", peft.get_peft_model, base, qlorapp.LoraConfig(use_dora=True, target_modules=["q_proj"]))
    base = base_model(folder, device_map="cpu", base_sharding=sharding)
model = adapted(base, lora_dropout=0.1)
trainer = made(of(qlorapp.Trainer), folder, out, more={{"eval_dataset": rows(9, seed=4)}}, model=model, **options)
trainer.train()
assert in_cpp(trainer) == (computes == "C++")
if sharding != "no":
    refused("divided over processes", model.merge_and_unload)
trainer.save_model(out)
model.eval()
loss = model(input_ids=torch.tensor([[3, 4, 5, 6]]), labels=torch.tensor([[3, 4, 5, 6]])).loss
sft = of(qlorapp.SFTTrainer)(  # TRL multiplies by the head itself
    adapted(base_model(folder, device_map="cpu", base_sharding=sharding)), train_dataset=datasets.Dataset.from_list(rows(20)),
    args=qlorapp.SFTConfig(output_dir=out, max_steps=2, per_device_train_batch_size=2, ddp_backend="gloo", bf16=False, report_to="none",
                           eval_strategy="steps", eval_steps=1, save_strategy="no", logging_steps=1, disable_tqdm=True),
    eval_dataset=datasets.Dataset.from_list(rows(9, seed=4)), processing_class=tokenizer())
sft.train()
assert in_cpp(sft) == (computes == "C++")
trainer.state.log_history += sft.state.log_history
if trainer.is_world_process_zero():
    history = [(entry.get("loss"), entry.get("eval_loss")) for entry in trainer.state.log_history]
    with open(os.path.join(out, "history.json"), "w") as file:
        json.dump([history, float(loss)], file)
del sft, trainer, model, base  # DistributedDataParallel holds the group
gc.collect()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("computes", ["C++", "torch"])
def test_python_trains_over_a_sharded_base(root, tmp_path, computes):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests/python")))
    whole = qlorapp.AutoModelForCausalLM.from_pretrained(root / "model")
    known = json.dumps([whole.num_parameters(), *whole.model.embed_tokens.weight.shape])
    for sharding in ("no", "full"):
        forked(2, script, root / "model", tmp_path / sharding, sharding, known, computes)
    losses = json.loads((tmp_path / "full/history.json").read_text())[0]
    assert len(losses) > 12 and not any(value != value for pair in losses for value in pair)  # NaN
    for name in ("adapter_model.safetensors", "history.json"):
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "no" / name).read_bytes()


@pytest.mark.parametrize(("sharding", "why"), [("half", 'must be "no", "full" or "node"'), ("full", "this is one")])
def test_python_refuses_what_cannot_be_sharded(root, sharding, why):
    with pytest.raises(ValueError, match=why):
        qlorapp.AutoModelForCausalLM.from_pretrained(root / "model", load_in_4bit=True, base_sharding=sharding)
