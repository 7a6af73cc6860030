# SPDX-License-Identifier: Apache-2.0
"""What TrainingArguments has beside its options, by the names of transformers': each is there, or is not for a reason."""

import dataclasses
import enum
import logging
import os
import subprocess
import sys

import conftest
import pytest
import qlorapp
import torch
import transformers
from qlorapp.field_table import plain
from tiny_llama import load, write_checkpoint
from tiny_trainer import rows

#: What only transformers' own Trainer has a use for.
ABSENT = {
    "_VALID_DICT_FIELDS": "private", "_apply_legacy_fsdp_to_config": "private", "_dict_dtype_to_str": "private",
    "_no_sync_in_gradient_accumulation": "private", "_process_fsdp_args": "private", "_setup_devices": "private",
    "_validate_args": "private", "_n_gpu": "private",
    "is_torch_greater_or_equal_than_2_8": "a variable of the class body", "deepspeed_plugin": "deepspeed is refused",
    "fsdp_plugin_args": "fsdp is refused", "mixed_precision": "the Trainer's own; bf16 and fp16 say it",
}  # fmt: skip


@pytest.fixture
def theirs(tmp_path):
    return transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")


@pytest.fixture
def ours(tmp_path):
    return qlorapp.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")


def test_every_name_is_there_or_is_not_for_a_reason(theirs, ours):
    names = {name for name in {*dir(theirs), *vars(theirs)} if not name.startswith("__")}
    assert {name for name in names if not hasattr(ours, name)} == ABSENT.keys() & names
    assert not [name for name in ABSENT if hasattr(ours, name)]


SAME = ("world_size", "process_index", "local_process_index", "n_gpu", "device", "parallel_mode", "ddp_timeout_delta", "should_log",
        "should_save", "train_batch_size", "eval_batch_size", "default_optim")  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_what_is_derived_has_transformers_value(theirs, ours, name):
    assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_the_log_level_is_the_number_of_pythons_logging(tmp_path, level):
    args = [kind(str(tmp_path), log_level=level) for kind in (qlorapp.TrainingArguments, transformers.TrainingArguments)]
    assert args[0].get_process_log_level() == args[1].get_process_log_level()


def test_a_passive_log_level_is_that_of_the_librarys_logger(ours, monkeypatch):
    monkeypatch.setattr(logging.getLogger("qlorapp"), "level", logging.ERROR)
    assert ours.get_process_log_level() == logging.ERROR


def test_the_one_process_is_the_main_one_and_runs_everything(ours, theirs, capsys):
    ran = []
    with ours.main_process_first(desc="map"):
        ran.append(1)
    state = ours.distributed_state
    with state.main_process_first(), state.local_main_process_first(), state.split_between_processes([1, 2]) as part:
        ran += part
    state.on_main_process(ran.append)(3)
    state.on_last_process(ran.append)(4)
    state.wait_for_everyone()
    state.print("said")
    assert ran == [1, 1, 2, 3, 4] and capsys.readouterr().out == "said\n"
    for name in ("num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process", "is_last_process",
                 "use_distributed", "device", "distributed_type"):  # fmt: skip
        assert getattr(state, name) == getattr(theirs.distributed_state, name), name


# --- set_…

GROUPS = {
    "set_training": {"learning_rate": 1e-4, "batch_size": 3, "weight_decay": 0.1, "num_epochs": 2, "max_steps": 7,
                     "gradient_accumulation_steps": 2, "seed": 5},
    "set_evaluate": {"strategy": "steps", "steps": 3, "batch_size": 2, "delay": 4, "loss_only": True},
    "set_testing": {"batch_size": 5, "loss_only": True},
    "set_save": {"strategy": "epoch", "steps": 9, "total_limit": 2},
    "set_logging": {"strategy": "epoch", "steps": 9, "report_to": ["tensorboard"], "level": "info", "first_step": True, "nan_inf_filter": True},
    "set_push_to_hub": {"model_id": "me/it", "strategy": "end", "private_repo": True},
    "set_optimizer": {"name": "adamw_8bit", "learning_rate": 1e-3, "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6},
    "set_lr_scheduler": {"name": "cosine", "num_epochs": 4, "max_steps": 11, "warmup_steps": 0.1},
    "set_dataloader": {"train_batch_size": 3, "eval_batch_size": 4, "drop_last": True, "ignore_data_skip": True, "sampler_seed": 8},
}  # fmt: skip
#: Set by transformers to "passive" and False, which would be said to have no effect whenever something else is logged.
UNSET = {"log_level_replica", "log_on_each_node"}


def values_of(args):
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    values["report_to"] = [values["report_to"]] if isinstance(values["report_to"], str) else values["report_to"]
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_sets_the_options_that_transformers_sets(ours, theirs, name, given):
    options = GROUPS[name] if given else {key: value for key, value in GROUPS[name].items() if key == "model_id"}
    before = values_of(theirs)
    assert getattr(ours, name)(**options) is ours
    getattr(theirs, name)(**options)
    found, expected = values_of(ours), values_of(theirs)
    for key in {key for key in expected if expected[key] != before[key]} - UNSET:
        wanted = expected[key] if expected[key] is not None or key != "eval_delay" else 0
        assert plain(found[key]) == plain(wanted), key
    if given:
        assert any(expected[key] != before[key] for key in expected)


def test_a_group_is_checked_as_a_whole_and_sets_nothing_that_is_refused(ours):
    with pytest.raises(ValueError, match="optim_args is not supported"):
        ours.set_optimizer(learning_rate=0.5, args="a=1")
    assert ours.learning_rate == 5e-5
    with pytest.raises(ValueError, match="per_device_train_batch_size must be .*; got 0"):
        ours.set_training(batch_size=0)
    for name in ("set_evaluate", "set_save", "set_logging"):
        with pytest.raises(ValueError, match=rf"\[{name}\] steps must be positive with strategy='steps'; got 0"):
            getattr(ours, name)("steps", 0)


def test_what_has_no_effect_is_said():
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import qlorapp
args = qlorapp.TrainingArguments("out").set_push_to_hub("me/it", always_push=True).set_dataloader(num_workers=2)
assert args.hub_model_id == "me/it" and args.dataloader_num_workers == 2
"""  # a process of its own: it is said once in each
    env = {**os.environ, "PYTHONPATH": str(conftest.BUILD / "python")}
    said = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert "hub_always_push has no effect" in said and "dataloader_num_workers has no effect" in said


def test_the_older_name_of_checkpointing_is_taken_and_sft_arguments_have_groups_too(ours, tmp_path):
    assert ours.set_training(gradient_checkpointing=True).gradient_checkpointing
    assert ours.set_training(activation_checkpointing=True).gradient_checkpointing
    assert not ours.set_training().gradient_checkpointing
    sft = qlorapp.SFTConfig(str(tmp_path), max_length=77).set_training(learning_rate=3e-4)
    assert isinstance(sft, qlorapp.SFTConfig) and (sft.learning_rate, sft.max_length) == (3e-4, 77)


OPTIMIZERS = sorted(
    {name.value for name in transformers.training_args.OptimizerNames} | {"adamw_hf", "paged_adamw", "adamw_apex_fused"}
)
TAKEN = {"adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"}
SAME = {"adamw_hf": "adamw_torch", "paged_adamw": "paged_adamw_32bit"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_name_is_taken_or_says_what_to_give(name):
    if name in TAKEN | set(SAME):
        assert qlorapp.TrainingArguments(optim=name).optim == SAME.get(name, name)
        return
    with pytest.raises(
        ValueError, match=rf"optim must be one of .*; got '{name}'.*Trainer\(optimizers=\(torch.optim.SGD\(parameters"
    ) as told:
        qlorapp.TrainingArguments(optim=name)
    assert "\n" not in str(told.value)


def test_a_schedule_that_is_not_here_says_what_to_give():
    with pytest.raises(ValueError, match=r"got 'reduce_lr_on_plateau'.*give Trainer\(optimizers=\(optimizer, scheduler\)\)"):
        qlorapp.SFTConfig(lr_scheduler_type="reduce_lr_on_plateau")


def test_the_way_out_of_the_list_of_optimizers_trains(tmp_path):
    write_checkpoint(tmp_path / "model")
    model = load(tmp_path / "model")
    parameters = [p for p in model.parameters() if p.requires_grad]
    trainer = qlorapp.Trainer(
        model, qlorapp.TrainingArguments(str(tmp_path), max_steps=3, report_to="none", save_strategy="no"), train_dataset=rows(8),
        optimizers=(torch.optim.SGD(parameters, lr=0.1), None),
    )  # fmt: skip
    before = [p.detach().clone() for p in parameters]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_what_is_set_after_construction(tmp_path, caplog):
    args = qlorapp.SFTConfig(str(tmp_path))
    with caplog.at_level("WARNING"):
        args.max_seq_length = 77
        args.evaluation_strategy = "steps"
        args.learning_rate = 1e-3
        assert args.max_length == 77 == args.max_seq_length and args.eval_strategy == "steps"
        assert "is no option" not in caplog.text
        args.learning_rat = 1.0
    assert "'learning_rat' is no option: setting it changes no run." in caplog.text and "learning_rate" in caplog.text
    assert args.learning_rat == 1.0  # a script's own

    @dataclasses.dataclass
    class Own(qlorapp.TrainingArguments):
        source_max_len: int = 5

    class Plain(qlorapp.TrainingArguments):
        pass

    caplog.clear()
    Own(str(tmp_path)).source_max_len = 7
    Plain(str(tmp_path)).lr_scheduler_kwargs = {}
    assert "no option" not in caplog.text
