# SPDX-License-Identifier: Apache-2.0
"""SFTConfig: every name of named releases of TRL, set, has its effect, or says why not.

option_names.json is what those releases' signatures hold, read by scripts/list_option_names.py.
"""

import ast
import dataclasses
import inspect
import json

import pytest
import qlorapp
import torch
import transformers
from qlorapp import sft_config
from test_option_names import EFFECTS as TRAINING_EFFECTS
from test_option_names import NAMES, heard_in_a_fresh_process, other_value
from test_sft_trainer import MODEL, ROWS, trainer

OWN = {row[0]: row for row in sft_config.fields()}
LISTED = sorted(set().union(*NAMES["SFTConfig"].values()))
TEXTS = [{"text": row["messages"][1]["content"]} for row in ROWS]


def test_each_list_is_whole():
    counts = {release: len(options) for release, options in NAMES["SFTConfig"].items()}
    assert counts == {
        "trl-1.16.0": 22, "trl-0.24.0": 21, "trl-0.19.1": 21, "trl-0.15.2": 12, "trl-0.12.2": 12, "trl-0.9.6": 11
    }  # fmt: skip
    assert {release: len(options) for release, options in NAMES["SFTTrainer"].items()} == {
        "trl-1.16.0": 15, "trl-0.24.0": 14, "trl-0.9.6": 25
    }  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_no_name_that_trl_had_is_unknown(name):
    assert name in qlorapp.SFTConfig.field_status or name in qlorapp.SFTConfig.field_aliases


def test_no_argument_that_trl_s_trainer_had_is_unknown():
    mine = set(inspect.signature(qlorapp.SFTTrainer).parameters)
    for release, arguments in NAMES["SFTTrainer"].items():
        assert not set(arguments) - mine - set(qlorapp.SFTConfig.field_status) - set(qlorapp.SFTConfig.field_aliases), release


def test_names_and_defaults_are_those_of_trl_1_16():
    defaults = qlorapp.SFTConfig("out")
    listed = NAMES["_BaseConfig"]["trl-1.16.0"] | NAMES["SFTConfig"]["trl-1.16.0"]
    assert {name: getattr(defaults, name) for name in listed} == {
        name: ast.literal_eval(default) for name, (_, default) in listed.items()
    }
    assert isinstance(defaults, qlorapp.TrainingArguments)
    assert {field.name for field in dataclasses.fields(qlorapp.TrainingArguments)} < {
        f.name for f in dataclasses.fields(defaults)
    }


def test_it_is_a_dataclass_for_argparse_replace_and_json():
    (parsed,) = transformers.HfArgumentParser(qlorapp.SFTConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--packing", "--max_length", "77", "--assistant_only_loss", "--learning_rate", "1e-3",
         "--dataset_kwargs", '{"skip_prepare_dataset": true}']
    )  # fmt: skip
    assert (parsed.packing, parsed.max_length, parsed.assistant_only_loss, parsed.learning_rate) == (True, 77, True, 1e-3)
    assert parsed.dataset_kwargs == {"skip_prepare_dataset": True} and parsed.skip_prepare_dataset
    again = dataclasses.replace(parsed, max_length=33)
    assert (again.packing, again.max_length) == (True, 33)
    assert qlorapp.SFTConfig(**json.loads(parsed.to_json_string())) == parsed
    assert qlorapp.SFTConfig(**dataclasses.asdict(parsed)) == parsed


def test_older_spellings_mean_the_same_and_are_said():
    old = qlorapp.SFTConfig("out", max_seq_length=99, use_liger=True, packing_strategy="bfd-requeue", dataset_text_field=None)
    assert (old.max_length, old.use_liger_kernel, old.packing_strategy) == (99, True, "bfd_split")
    assert (old.max_seq_length, old.dataset_text_field) == (99, "text")
    with pytest.raises(TypeError, match="are the same option"):
        qlorapp.SFTConfig("out", max_seq_length=99, max_length=98)
    options = [
        {"max_seq_length": 99},
        {"use_liger": True},
        {"packing_strategy": "ffd"},
        {"dataset_kwargs": {"append_concat_token": True}},
    ]
    heard = heard_in_a_fresh_process([("SFTConfig", {"output_dir": "out", **option}) for option in options])
    assert heard[0] == ["[SFTConfig] max_seq_length is called max_length now; both are understood."]
    assert heard[1][0] == "[SFTConfig] use_liger is called use_liger_kernel now; both are understood."
    assert heard[2] == ["[SFTConfig] packing_strategy='ffd' is called 'bfd' now."]
    assert heard[3] == [
        "[SFTConfig] dataset_kwargs['append_concat_token'] has no effect: special tokens follow the chat template."
    ]


def test_an_option_without_effect_is_said_once():
    names = [name for name, row in OWN.items() if row[4] == "accepted_and_said"]
    values = {name: other_value(*OWN[name][1:3]) for name in names}
    for name, value in values.items():
        assert getattr(qlorapp.SFTConfig("out", **{name: value}), name) == value
    made = [("SFTConfig", {"output_dir": "out", name: value}) for name, value in values.items()]
    heard = heard_in_a_fresh_process(made + made)
    assert heard[: len(names)] == [[f"[SFTConfig] {name} has no effect: {OWN[name][5]}"] for name in names]
    assert heard[len(names) :] == [[]] * len(names)


@pytest.mark.parametrize("name", [name for name, row in OWN.items() if row[4] == "refused"])
def test_a_refused_option_says_why_and_what_to_do(name):
    _, kind, default, _, _, reason = OWN[name]
    with pytest.raises(ValueError, match=rf"\[SFTConfig\] {name} is not supported: {reason}"):
        qlorapp.SFTConfig("out", **{name: other_value(kind, default)})
    assert reason.count(".") >= 2  # why, and what to do


@pytest.mark.parametrize("name", TRAINING_EFFECTS)
def test_an_option_of_training_arguments_reaches_the_loop(name):
    """What it does there is test_option_names.py's business."""
    options = TRAINING_EFFECTS[name][0]
    loop, plain = qlorapp.SFTConfig("out", **options).training_arguments(), qlorapp.TrainingArguments("out", **options)
    assert {key: getattr(loop, key) for key in options} == {key: getattr(plain, key) for key in options}


def test_what_training_arguments_refuse_or_pass_over_is_so_here_too():
    with pytest.raises(ValueError, match="neftune_noise_alpha is not supported: "):
        qlorapp.SFTConfig("out", neftune_noise_alpha=5)
    (heard,) = heard_in_a_fresh_process([("SFTConfig", {"output_dir": "out", "use_liger_kernel": True})])
    assert heard == ["[TrainingArguments] use_liger_kernel has no effect: fused kernels are always used."]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "dft"}, ValueError, "loss_type='dft' is not supported"),
        ({"loss_type": "nl"}, ValueError, "loss_type must be one of .* Did you mean 'nll'"),
        ({"truncation_mode": "keep_middle"}, ValueError, "truncation_mode must be one of"),
        ({"packing_strategy": "best"}, ValueError, "packing_strategy must be one of"),
        ({"packing": True, "max_length": None}, ValueError, "packing needs a max_length"),
        ({"dataset_kwargs": {"skip": True}}, ValueError, "dataset_kwargs knows skip_prepare_dataset"),
        ({"activation_offloading": True, "gradient_checkpointing": False}, ValueError, "needs gradient_checkpointing=True"),
        ({"asistant_only_loss": True}, TypeError, "unknown option 'asistant_only_loss'. Did you mean 'assistant_only_loss'"),
        ({"learning_rate": -1}, ValueError, "learning_rate must be finite and >= 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        qlorapp.SFTConfig("out", **options)


# --- what is used: the promised effect, on a run of two steps


def computes_in_bf16(trainer):
    """What the loop was told."""
    return json.loads(trainer._core.arguments())["bf16"]


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def ids(run, rows="train_dataset"):
    return [list(row["input_ids"]) for row in getattr(run, rows)]


def untrained(run):
    return sum(label == -100 for row in run.train_dataset for label in row["labels"])


def eval_batches(run):
    """How many batches an evaluation has."""
    counted = []

    class Count(qlorapp.TrainerCallback):
        def on_prediction_step(self, *args, **kwargs):
            counted.append(1)

    run.add_callback(Count)
    run.evaluate()
    return len(counted)


PAIRS = [{"prompt": "Say it: ", "completion": row["text"]} for row in TEXTS]
PREPARED = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}] * 8
EPOCH = {"max_steps": -1, "num_train_epochs": 1}
LONG = {"packing": True, "max_length": 8, **EPOCH}
#: {option: (what the plain run has too, what is set, trainer arguments, what holds of (run, plain run))}
EFFECTS = {
    "learning_rate": ({}, {"learning_rate": 1e-3}, {}, lambda r, p: r.state.log_history[0]["learning_rate"] == 1e-3),
    "logging_steps": ({}, {"logging_steps": 2}, {}, lambda r, p: len(losses(r)) == 1 and len(losses(p)) == 2),
    "gradient_checkpointing": (
        {}, {"gradient_checkpointing": False}, {}, lambda r, p: p.model.is_gradient_checkpointing and not r.model.is_gradient_checkpointing,
    ),
    "bf16": ({}, {"bf16": True}, {}, lambda r, p: computes_in_bf16(r) and not computes_in_bf16(p)),
    "max_length": ({}, {"max_length": 9}, {}, lambda r, p: max(map(len, ids(r))) == 9 < max(map(len, ids(p)))),
    "model_init_kwargs": ({}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {}, lambda r, p: r.model.dtype == torch.bfloat16 != p.model.dtype),
    "chat_template_path": (
        {}, {"chat_template_path": "mine.jinja"}, {}, lambda r, p: r.processing_class.decode(ids(r)[0]).startswith("user: "),
    ),
    "dataset_text_field": (
        {}, {"dataset_text_field": "body"}, {"train_dataset": [{"body": row["text"]} for row in TEXTS]}, lambda r, p: ids(r) == ids(p),
    ),
    "dataset_kwargs": (
        {}, {"dataset_kwargs": {"skip_prepare_dataset": True}}, {"train_dataset": PREPARED}, lambda r, p: r.train_dataset is PREPARED,
    ),
    "eos_token": ({}, {"eos_token": "<|eot_id|>"}, {}, lambda r, p: r.processing_class.decode(ids(r)[0]).endswith("<|eot_id|>")),
    "pad_token": ({}, {"pad_token": "<|start_header_id|>"}, {}, lambda r, p: r.processing_class.pad_token == "<|start_header_id|>" != p.processing_class.pad_token),
    "truncation_mode": (
        {"max_length": 9}, {"truncation_mode": "keep_end"}, {},
        lambda r, p: max(map(len, ids(r))) == 9 and ids(r) != ids(p) and r.processing_class.decode(ids(r)[0]).endswith(r.processing_class.eos_token),
    ),
    "shuffle_dataset": ({}, {"shuffle_dataset": True}, {}, lambda r, p: ids(r) != ids(p) and sorted(ids(r)) == sorted(ids(p))),
    "assistant_only_loss": ({}, {"assistant_only_loss": True}, {"train_dataset": ROWS}, lambda r, p: untrained(r) > untrained(p)),
    "loss_type": ({}, {"loss_type": "chunked_nll"}, {}, lambda r, p: losses(r) == losses(p)),
    "activation_offloading": (
        {}, {"activation_offloading": True}, {},
        lambda r, p: {kept for _, _, kept in r.model.get_base_model().core.segments} == {"input_on_host"} and losses(r) == losses(p),
    ),
    "packing": ({"max_length": 128, **EPOCH}, {"packing": True}, {}, lambda r, p: r.state.max_steps < p.state.max_steps),
    "packing_strategy": (
        LONG, {"packing_strategy": "bfd_split"}, {},
        lambda r, p: r.state.log_history[-2]["num_tokens"] > p.state.log_history[-2]["num_tokens"],
    ),
    "eval_packing": ({"max_length": 128}, {"eval_packing": True}, {"eval_dataset": TEXTS}, lambda r, p: eval_batches(r) < eval_batches(p)),
    "completion_only_loss": ({}, {"completion_only_loss": False}, {"train_dataset": PAIRS}, lambda r, p: untrained(r) < untrained(p)),
}  # fmt: skip


def test_every_used_option_has_a_test_of_its_effect():
    used = {name for name, row in OWN.items() if row[4] == "used"}
    shared = {name for name in LISTED if name not in OWN and qlorapp.SFTConfig.field_status.get(name, ("",))[0] == "used"}
    assert used | shared == set(EFFECTS)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_used_option_does_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    common, options, arguments, holds = EFFECTS[name]
    plain = {key: value for key, value in arguments.items() if name not in ("dataset_text_field", "dataset_kwargs")}
    rows = ROWS if name == "chat_template_path" else TEXTS
    runs = []
    for number, (settings, more) in enumerate([({**common, **options}, arguments), (common, plain)]):
        run = trainer(tmp_path / str(number), config_options=settings, **{"train_dataset": rows, **more})
        run.train()
        runs.append(run)
    assert holds(*runs)
    assert str(MODEL) == runs[0].model.get_base_model().name_or_path
