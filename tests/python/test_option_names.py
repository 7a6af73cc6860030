# SPDX-License-Identifier: Apache-2.0
"""Every name of named releases of transformers, PEFT and bitsandbytes' config: set, it has its effect, or says why not.

option_names.json is what those releases' signatures hold, read by scripts/list_option_names.py.
"""

import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import sys

import conftest
import notebook_runner
import pytest
import qlorapp
import torch
from tiny_llama import folder, load  # noqa: F401  (folder is a fixture)
from tiny_trainer import rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = json.loads((pathlib.Path(__file__).parent / "option_names.json").read_text())
TRAINING = sorted(set().union(*NAMES["TrainingArguments"].values()))
QUANTIZATION = sorted(set().union(*NAMES["BitsAndBytesConfig"].values()))
ALIASES = qlorapp._C.training_arguments_aliases()
TABLE = {row[0]: row for row in qlorapp._C.training_arguments_fields()}
#: Values that differ from the default and are in range, where the type alone does not tell one.
VALUES = {
    "accelerator_config": {"split_batches": True}, "debug": "underflow_overflow", "deepspeed": "ds.json", "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 1}, "parallelism_config": {"tp_size": 2}, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "activation_checkpointing_kwargs": {"use_reentrant": False}, "liger_kernel_config": {"rope": True},
    "optim_target_modules": "all-linear", "trackio_static_space_id": "a/b",
    "dataloader_multiprocessing_context": "fork",
}  # fmt: skip


SPEAKER = """
import json, logging, sys
import qlorapp
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("qlorapp").addHandler(handler)
heard = []
for kind, options in json.load(sys.stdin):
    del lines[:]
    getattr(qlorapp, kind)(**options)
    heard.append(list(lines))
print(json.dumps(heard))
"""


def heard_in_a_fresh_process(made: list) -> list[list[str]]:
    """What is logged as each of (config, options) is made in turn: some things are said once in a process."""
    environment = {**os.environ, "PYTHONPATH": str(conftest.BUILD / "python")}
    done = subprocess.run(
        [sys.executable, "-c", SPEAKER], input=json.dumps(made), capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)


def other_value(kind: str, default: str):
    """A value of a table's type that is not its default."""
    value = json.loads(default)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    kind = kind.removesuffix(" | None")
    return {"bool": True, "int": 3, "float": 0.5, "str": "x", "list[str]": ["x"], "dict": {"x": 1}}[kind.split(" | ")[0]]


@pytest.mark.parametrize("name", TRAINING)
def test_no_name_that_transformers_had_is_unknown(name):
    assert name in TABLE or name in ALIASES


def test_each_list_is_whole():
    """What the releases were said to have: a list cut short would prove nothing."""
    counts = {release: len(options) for release, options in NAMES["TrainingArguments"].items()}
    assert counts == {"transformers-5.23.0": 114, "transformers-4.57.6": 132, "transformers-4.46.3": 131}
    assert len(NAMES["LoraConfig"]["peft-0.21.2"]) == 35 and len(QUANTIZATION) == 11


def test_the_list_of_the_installed_release_is_its_signature():
    transformers = pytest.importorskip("transformers")
    listed = NAMES["TrainingArguments"].get(f"transformers-{transformers.__version__}")
    if listed is None:
        pytest.skip(f"no list of transformers {transformers.__version__}")
    assert set(listed) == {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[4] == "refused"])
def test_a_refused_option_says_why_and_what_to_do(name):
    _, kind, default, _, _, reason = TABLE[name]
    value = VALUES.get(name, other_value(kind, default))
    with pytest.raises(ValueError, match=rf"\[TrainingArguments\] {name} is not supported: ") as error:
        qlorapp.TrainingArguments(**{name: value})
    assert reason in str(error.value) and reason.count(".") >= 2  # why, and what to do


def test_an_option_without_effect_is_said_once():
    names = [name for name, row in TABLE.items() if row[4] == "accepted_and_said"]
    values = {name: VALUES.get(name, other_value(*TABLE[name][1:3])) for name in names}
    for name, value in values.items():
        assert getattr(qlorapp.TrainingArguments(**{name: value}), name) == value
    made = [("TrainingArguments", {name: value}) for name, value in values.items()]
    heard = heard_in_a_fresh_process(made + made)
    assert heard[: len(names)] == [[f"[TrainingArguments] {name} has no effect: {TABLE[name][5]}"] for name in names]
    assert heard[len(names) :] == [[]] * len(names)


def test_an_option_of_before_the_lists_is_said_or_refused():
    """Names that transformers took away before 4.46."""
    for kind in (qlorapp.TrainingArguments, qlorapp.SFTConfig):
        with pytest.raises(ValueError, match="sharded_ddp is not supported: training runs in one process. Leave it out"):
            kind("out", sharded_ddp="simple")
        for unset in ("", False, None):
            assert kind("out", sharded_ddp=unset, xpu_backend=unset) == kind("out")
        assert kind("out", xpu_backend="ccl") == kind("out")
    heard = heard_in_a_fresh_process([("TrainingArguments", {"xpu_backend": "ccl"})] * 2)
    assert heard == [["[TrainingArguments] xpu_backend has no effect: training runs in one process."], []]


def test_an_older_name_is_the_newer_one_and_is_said():
    values = {}
    for alias, (name, _) in ALIASES.items():
        values[alias] = {"eval_strategy": "epoch"}.get(name, VALUES.get(alias, other_value(*TABLE[name][1:3])))
        args = qlorapp.TrainingArguments(**{alias: values[alias]})
        assert getattr(args, name) == values[alias] == getattr(args, alias)
        assert qlorapp.TrainingArguments(**{alias: None}) == qlorapp.TrainingArguments()
    heard = heard_in_a_fresh_process([("TrainingArguments", {alias: value}) for alias, value in values.items()])
    for (alias, (name, older)), lines in zip(ALIASES.items(), heard, strict=True):
        line = f"[TrainingArguments] {alias} is called {name} now; both are understood."
        assert (line in lines) == older, lines


def test_each_option_of_the_quantization_is_used_said_or_refused():
    fields = {row[0]: row for row in qlorapp._C.bits_and_bytes_config_fields()}
    assert set(QUANTIZATION) <= set(fields)
    values = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "float16"}
    accepted = []
    for name in QUANTIZATION:
        _, kind, default, _, status, reason = fields[name]
        value = values.get(name, other_value(kind, default))
        if name == "quant_method":
            with pytest.raises(ValueError, match="quant_method must be one of"):
                qlorapp.BitsAndBytesConfig(quant_method=value)
        elif status == "refused":
            with pytest.raises(ValueError, match=f"{name} is not supported: {reason}"):
                qlorapp.BitsAndBytesConfig(**{name: value})
        else:
            config = qlorapp.BitsAndBytesConfig(**{name: value})
            shown = getattr(torch, value) if name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") else value
            assert getattr(config, name) == shown and qlorapp.BitsAndBytesConfig.from_dict(config.to_dict()) == config
            accepted.append((name, value))
    heard = heard_in_a_fresh_process([("BitsAndBytesConfig", {name: value}) for name, value in accepted])
    for (name, _), lines in zip(accepted, heard, strict=True):
        said = f"[BitsAndBytesConfig] {name} has no effect: {fields[name][5]}"
        assert (said in lines) == (fields[name][4] == "accepted_and_said"), lines


def test_what_the_quantization_options_do(folder):
    def model(**options):
        config = qlorapp.BitsAndBytesConfig(**options)
        return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    dense, four = model(), model(load_in_4bit=True)
    assert four.get_memory_footprint() < dense.get_memory_footprint()
    assert four.model.layers[0].mlp.up_proj.quant_state.quant_type == "fp4"
    assert model(load_in_4bit=True, bnb_4bit_quant_type="nf4").model.layers[0].mlp.up_proj.quant_state.quant_type == "nf4"
    assert model(load_in_4bit=True, bnb_4bit_use_double_quant=True).get_memory_footprint() < four.get_memory_footprint()
    assert model(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16").dtype == torch.bfloat16
    skipping = model(load_in_4bit=True, llm_int8_skip_modules=["up_proj", "lm_head"])
    assert isinstance(skipping.model.layers[0].mlp.up_proj, torch.nn.Linear)


# --- what is used: the promised effect, on a run


class Run:
    """Four steps of three micro-batches of two rows, an epoch of two steps; `options` may change any of it."""

    def __init__(self, folder, output, train=True, **options):
        self.output = output
        defaults = {
            "output_dir": str(output), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
            "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        self.args = qlorapp.TrainingArguments(**{**defaults, **options})
        evaluates = {"eval_dataset": rows(5)} if self.args.eval_strategy != "no" or self.args.eval_on_start else {}
        self.folder, self.model = folder, load(folder)
        self.events, self.said = [], []
        listener = logging.Handler()
        listener.emit = lambda record: self.said.append(record.getMessage())
        outer = self

        class Watch(qlorapp.TrainerCallback):
            def on_evaluate(self, args, state, control, **kwargs):
                outer.events.append(("evaluate", state.global_step))

            def on_save(self, args, state, control, **kwargs):
                outer.events.append(("save", state.global_step))

            def on_log(self, args, state, control, logs=None, **kwargs):
                if "loss" in logs:
                    outer.events.append(("log", state.global_step))

        self.trainer = qlorapp.Trainer(self.model, self.args, train_dataset=rows(12), callbacks=[Watch], **evaluates)
        logger = logging.getLogger("qlorapp")
        level = logger.level
        logger.addHandler(listener)
        logger.setLevel(logging.INFO if "log_level" not in options else level)
        try:
            if train:
                self.result = self.trainer.train()
        finally:
            logger.removeHandler(listener)
            if "log_level" not in options:
                logger.setLevel(level)

    def planned(self, **options):
        """Bytes at most of this run on a T4, or of one whose options differ so."""
        phases = qlorapp.plan(self.folder, args=dataclasses.replace(self.args, **options), gpu="T4").phases
        return max(phase["allocated"] for name, phase in phases.items() if name not in ("load", "merge"))

    @property
    def history(self):
        return [entry for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def losses(self):
        return [entry["loss"] for entry in self.history]

    @property
    def rates(self):
        return [entry["learning_rate"] for entry in self.history]

    def steps(self, event):
        return [step for name, step in self.events if name == event]

    @property
    def checkpoints(self):
        return sorted(int(path.name.split("-")[1]) for path in self.output.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return lambda **options: Run(folder, tmp_path_factory.mktemp("run"), **options)


@pytest.fixture(scope="module")
def plain(run):
    return run()


def shown_in_a_notebook(run, **options):
    """Which of the callbacks that show a run its trainer has where there is a kernel: elsewhere lines are the default."""
    with notebook_runner.Kernel().running():
        callbacks = qlorapp.Trainer(
            run.model, dataclasses.replace(run.args, **options), train_dataset=rows(12)
        ).callback_handler.callbacks
    names = [type(callback).__name__ for callback in callbacks]
    return [name for name in names if name in ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")]


#: name → (options, what holds of the run, given a run with nothing set).
EFFECTS = {
    "output_dir": ({"save_strategy": "epoch"}, lambda r, p: r.checkpoints == [2, 4]),
    "do_train": ({"do_train": True}, lambda r, p: r.args.do_train),
    "do_eval": ({"eval_strategy": "epoch"}, lambda r, p: r.args.do_eval and not p.args.do_eval),
    "do_predict": ({"do_predict": True}, lambda r, p: r.args.do_predict),
    "per_device_train_batch_size": ({"per_device_train_batch_size": 4}, lambda r, p: len(r.losses) == 2 and len(p.losses) == 4),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 1}, lambda r, p: len(r.losses) == 12),
    "num_train_epochs": ({"num_train_epochs": 1}, lambda r, p: len(r.losses) == 2),
    "max_steps": ({"max_steps": 3}, lambda r, p: len(r.losses) == 3),
    "learning_rate": ({"learning_rate": 1e-3}, lambda r, p: r.losses[-1] > p.losses[-1] and r.rates[0] == 1e-3),
    "lr_scheduler_type": ({"lr_scheduler_type": "constant"}, lambda r, p: set(r.rates) == {1e-2}),
    "lr_scheduler_kwargs": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.9}},
        lambda r, p: 9e-3 < min(r.rates) < 1e-2,
    ),
    "warmup_steps": ({"warmup_steps": 2}, lambda r, p: r.rates[:2] == [0, 5e-3]),
    "warmup_ratio": ({"warmup_ratio": 0.5}, lambda r, p: r.rates[:2] == [0, 5e-3]),
    "optim": ({"optim": "adamw_8bit"}, lambda r, p: r.losses != p.losses),
    "weight_decay": ({"weight_decay": 0.9}, lambda r, p: r.losses[:2] != p.losses[:2] or r.losses[2:] != p.losses[2:]),
    "adam_beta1": ({"adam_beta1": 0.1}, lambda r, p: r.losses[:2] == pytest.approx(p.losses[:2], rel=1e-5) and abs(r.losses[3] / p.losses[3] - 1) > 1e-3),
    "adam_beta2": ({"adam_beta2": 0.1}, lambda r, p: r.losses[:2] == pytest.approx(p.losses[:2], rel=1e-5) and abs(r.losses[3] / p.losses[3] - 1) > 1e-3),
    "adam_epsilon": ({"adam_epsilon": 1.0}, lambda r, p: r.losses[-1] > p.losses[-1]),
    "max_grad_norm": ({"max_grad_norm": 1e-9}, lambda r, p: r.losses[-1] > p.losses[-1]),
    "bf16": ({"bf16": True}, lambda r, p: r.losses == p.losses and r.planned() < p.planned()),
    "fp16": ({"fp16": True}, lambda r, p: json.loads((r.output / "checkpoint-4" / "scaler.json").read_text())["scale"] > 0),
    "tf32": ({"tf32": True}, lambda r, p: torch.backends.cuda.matmul.allow_tf32),
    "gradient_checkpointing": (
        {"gradient_checkpointing": True},
        lambda r, p: r.model.is_gradient_checkpointing and r.losses == p.losses,
    ),
    "checkpoint_keep": (
        {"gradient_checkpointing": True, "checkpoint_keep": "attention_only"},
        lambda r, p: {keep for _, _, keep in r.model.core.segments} != {keep for _, _, keep in p.model.core.segments},
    ),
    "loss_chunk_rows": (
        {"loss_chunk_rows": 3},
        lambda r, p: r.losses == pytest.approx(p.losses, rel=1e-5) and r.planned() < p.planned(),
    ),
    "mlp_tile_rows": (
        {"gradient_checkpointing": True, "mlp_tile_rows": 4},
        lambda r, p: r.losses == pytest.approx(p.losses, rel=1e-5) and r.planned() < r.planned(mlp_tile_rows=0),
    ),
    # A GPU's matters, where tests/cuda and plan_accuracy_cuda.py measure what is planned.
    "weight_workspace": (
        {"gradient_checkpointing": True, "weight_workspace": "stack"},
        lambda r, p: r.losses == p.losses and r.planned() < r.planned(weight_workspace="layer"),
    ),
    "embedding_on_host": ({"embedding_on_host": True}, lambda r, p: r.losses == p.losses and r.planned() < p.planned()),
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},  # there is room: nothing changes
        lambda r, p: r.losses == p.losses and r.trainer.args.per_device_train_batch_size == r.args.per_device_train_batch_size,
    ),
    "worst_case_first": (
        {"worst_case_first": True},
        lambda r, p: r.losses == p.losses and [any("fullest micro-batch of the data" in line for line in run.said) for run in (r, p)] == [True, False],
    ),
    "memory_budget": (
        {"memory_budget": "auto", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
        lambda r, p: r.trainer.args.per_device_train_batch_size == 6 and r.losses == pytest.approx(p.losses, rel=1e-5),
    ),
    "train_sampling_strategy": ({"train_sampling_strategy": "sequential"}, lambda r, p: r.losses != p.losses),
    "group_by_length": ({"group_by_length": True}, lambda r, p: r.losses != p.losses),
    "dataloader_drop_last": (
        {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1},
        lambda r, p: len(r.losses) == 4,
    ),
    "label_names": ({"label_names": ["labels"]}, lambda r, p: r.losses == p.losses),
    "seed": ({"seed": 7}, lambda r, p: r.losses != p.losses),
    "data_seed": ({"data_seed": 7}, lambda r, p: r.losses != p.losses),
    "full_determinism": ({"full_determinism": True}, lambda r, p: r.losses == p.losses),
    "skip_memory_metrics": (
        {"skip_memory_metrics": False},
        lambda r, p: r.result.metrics["train_mem_peak"] > 2**20 and "train_mem_peak" not in p.result.metrics,
    ),
    "logging_strategy": ({"logging_strategy": "epoch"}, lambda r, p: r.steps("log") == [2, 4]),
    "logging_steps": ({"logging_steps": 3}, lambda r, p: r.steps("log") == [3]),
    "logging_first_step": ({"logging_steps": 3, "logging_first_step": True}, lambda r, p: r.steps("log") == [1, 3]),
    "include_num_input_tokens_seen": (
        {"include_num_input_tokens_seen": "all"},
        lambda r, p: r.history[-1]["num_input_tokens_seen"] == 2 * sum(len(row["input_ids"]) for row in rows(12)),
    ),
    "include_tokens_per_second": (
        {"include_tokens_per_second": True},
        lambda r, p: r.result.metrics["train_tokens_per_second"] > 0 and "train_tokens_per_second" not in p.result.metrics,
    ),
    "log_level": ({"log_level": "error"}, lambda r, p: logging.getLogger("qlorapp").level == logging.ERROR),
    "disable_tqdm": (
        {"disable_tqdm": True},
        lambda r, p: shown_in_a_notebook(r) == ["PrinterCallback"]
        and shown_in_a_notebook(r, disable_tqdm=None) == shown_in_a_notebook(r, disable_tqdm=False) == ["NotebookProgressCallback"],
    ),
    "eval_strategy": ({"eval_strategy": "epoch"}, lambda r, p: r.steps("evaluate") == [2, 4]),
    "eval_steps": ({"eval_strategy": "steps", "eval_steps": 3}, lambda r, p: r.steps("evaluate") == [3, 4]),
    "eval_delay": ({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3}, lambda r, p: r.steps("evaluate") == [3, 4]),
    "eval_on_start": ({"eval_on_start": True}, lambda r, p: r.steps("evaluate") == [0]),
    "per_device_eval_batch_size": (
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 1},
        lambda r, p: r.trainer.state.log_history[-2]["eval_steps_per_second"]
        == pytest.approx(r.trainer.state.log_history[-2]["eval_samples_per_second"], rel=1e-3),
    ),
    "save_strategy": ({"save_strategy": "epoch"}, lambda r, p: r.steps("save") == [2, 4] and not p.checkpoints),
    "save_steps": ({"save_strategy": "steps", "save_steps": 3}, lambda r, p: r.checkpoints == [3, 4]),
    "save_total_limit": ({"save_strategy": "epoch", "save_total_limit": 1}, lambda r, p: r.checkpoints == [4]),
    "save_only_model": (
        {"save_strategy": "epoch", "save_only_model": True},
        lambda r, p: not (r.output / "checkpoint-4" / "run_state.json").exists()
        and (r.output / "checkpoint-4" / "adapter_model.safetensors").exists(),
    ),
    "load_best_model_at_end": (
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 3e-1},
        lambda r, p: r.trainer.state.best_model_checkpoint.endswith(f"checkpoint-{r.trainer.state.best_global_step}"),
    ),
    "metric_for_best_model": (
        {"eval_strategy": "epoch", "metric_for_best_model": "runtime"},
        lambda r, p: r.trainer.state.best_metric == max(e["eval_runtime"] for e in r.trainer.state.log_history if "eval_runtime" in e),
    ),
    "greater_is_better": (
        {"eval_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": True},
        lambda r, p: r.trainer.state.best_metric == max(e["eval_loss"] for e in r.trainer.state.log_history if "eval_loss" in e),
    ),
}  # fmt: skip
EFFECTS["fp16"][0]["save_strategy"] = "epoch"
#: Shown by a test of their own, beside what they belong to.
ELSEWHERE = {
    "overwrite_output_dir": "test_bad_input.py", "max_length": "test_packing.py", "completion_only_loss": "test_data.py", "use_cpu": "test_option_names.py",
    "resume_from_checkpoint": "test_trainer_semantics.py", "ignore_data_skip": "test_trainer_semantics.py",
    "restore_callback_states_from_checkpoint": "test_callback_states.py", "remove_unused_columns": "test_trainer_subclasses.py", "logging_nan_inf_filter": "test_trainer_semantics.py",
    "prediction_loss_only": "test_trainer_metrics.py", "eval_do_concat_batches": "test_trainer_metrics.py",
    "batch_eval_metrics": "test_trainer_metrics.py", "include_for_metrics": "test_trainer_metrics.py",
    "include_inputs_for_metrics": "test_trainer_metrics.py", "enable_jit_checkpoint": "test_trainer_semantics.py",
    "report_to": "test_trainer_semantics.py", "logging_dir": "test_trainer_semantics.py", "run_name": "test_trainer_semantics.py",
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "test_reporting.py"),
    "packing": "test_packing.py", "packing_strategy": "test_packing.py", "eval_packing": "test_packing.py",
    "count_position_zero": "test_trainer_semantics.py", "torch_empty_cache_steps": "test_objects_cuda.py", "log_num_tokens": "test_sft_trainer.py", "fp8": "test_float8.py", "cuda_graphs": "test_cuda_graphs.py",
}  # fmt: skip


def test_every_used_option_has_a_test_of_its_effect():
    used = {name for name, row in TABLE.items() if row[4] == "used"}
    assert used == set(EFFECTS) | set(ELSEWHERE) and not set(EFFECTS) & set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        assert name in (pathlib.Path(__file__).parent / file).read_text(), name


@pytest.mark.parametrize("name", EFFECTS)
def test_a_used_option_does_what_it_says(name, run, plain, request):
    before = torch.backends.cuda.matmul.allow_tf32, logging.getLogger("qlorapp").level
    options, holds = EFFECTS[name]
    try:
        assert holds(run(**options), plain)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]
        logging.getLogger("qlorapp").setLevel(before[1])


def test_use_cpu_is_where_a_model_goes_and_refuses_one_that_is_elsewhere(folder, tmp_path, monkeypatch):
    model = load(folder)
    asked, not_asked = (qlorapp.TrainingArguments(str(tmp_path), use_cpu=value, report_to="none") for value in (True, False))
    assert qlorapp.Trainer(model, asked, train_dataset=rows(4)).model.device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (asked.device, asked.n_gpu) == (torch.device("cpu"), 0)
    assert (not_asked.device, not_asked.n_gpu) == (torch.device("cuda:0"), 1)
    monkeypatch.setattr(qlorapp.CausalLM, "device", property(lambda self: torch.device("cuda:0")))
    with pytest.raises(ValueError, match="use_cpu=True, but the model is on cuda:0. Load it with device_map='cpu'"):
        qlorapp.Trainer(model, asked, train_dataset=rows(4))


# --- the dataclasses


def test_the_three_are_dataclasses_that_survive_replace_asdict_and_json():
    for made in (
        qlorapp.TrainingArguments("out", learning_rate=2e-4, lr_scheduler_kwargs={}, report_to="none", save_total_limit=2),
        qlorapp.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2}),
        qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"),
    ):
        kind = type(made)
        assert dataclasses.is_dataclass(kind) and dataclasses.replace(made) == made
        assert kind(**dataclasses.asdict(made)) == made == kind(**json.loads(made.to_json_string()))
    assert qlorapp.TrainingArguments("out").output_dir == "out"
    assert dataclasses.replace(qlorapp.TrainingArguments(seed=3), max_steps=4).seed == 3


def test_a_misspelling_gets_the_nearest_name():
    with pytest.raises(TypeError, match="unknown option 'evaluation_stratgy'. Did you mean 'evaluation_strategy'"):
        qlorapp.TrainingArguments(evaluation_stratgy="no")
    with pytest.raises(ValueError, match="unknown setting|there is no setting 'num_cycle'"):
        qlorapp.TrainingArguments(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycle": 1})


def test_transformers_enums_and_json_strings_are_understood():
    transformers = pytest.importorskip("transformers")
    args = qlorapp.TrainingArguments(
        eval_strategy=transformers.IntervalStrategy.EPOCH, lr_scheduler_type=transformers.SchedulerType.POLYNOMIAL,
        lr_scheduler_kwargs='{"power": 2.0}', report_to=None, output_dir=None,
    )  # fmt: skip
    assert (args.eval_strategy, args.lr_scheduler_type, args.lr_scheduler_kwargs) == ("epoch", "polynomial", {"power": 2.0})
    assert (args.report_to, args.output_dir) == (["none"], "trainer_output")


def test_the_page_of_all_options_is_current():
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "make_configuration_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize(
    "options",
    [{"fsdp": ""}, {"fsdp": []}, {"fsdp": False}, {"debug": []}, {"debug": ""}, {"deepspeed": ""}, {"torch_compile": False}],
    ids=str,
)
def test_what_is_refused_may_be_off_in_any_spelling(options):
    assert qlorapp.TrainingArguments("out", **options) == qlorapp.TrainingArguments("out")


def test_no_noise_is_no_noise():
    assert qlorapp.SFTConfig("out", neftune_noise_alpha=0).neftune_noise_alpha is None


def test_save_steps_of_zero_saves_at_the_end_alone(tmp_path):
    """Of a widely copied notebook."""
    from tiny_llama import write_checkpoint
    from tiny_trainer import trained

    write_checkpoint(tmp_path / "model")
    trained(tmp_path / "model", tmp_path / "out", save_strategy="steps", save_steps=0, max_steps=3)
    assert [path.name for path in sorted((tmp_path / "out").glob("checkpoint-*"))] == ["checkpoint-3"]
