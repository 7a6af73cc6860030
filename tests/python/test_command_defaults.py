# SPDX-License-Identifier: Apache-2.0
"""The command's own defaults: they learn, win nothing over what is given, and a plan and a resumed run have the same."""

import json
import re

import peft
import pytest
import qlorapp as package
import transformers
from conftest import ROOT
from tiny_run import qlorapp, write_model, write_rows

EXAMPLES = ROOT / "examples" / "data"
DEFAULTS = json.loads(package._C.command_defaults())


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """model/, rows.jsonl of prompts, chat.jsonl of the bundled task."""
    folder = tmp_path_factory.mktemp("defaults")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    chat = (EXAMPLES / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "chat.jsonl").write_text("".join(chat[:256]))
    return folder


def run(here, *arguments, code=0):
    done = qlorapp(*arguments, cwd=here)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(here, output, *arguments, data="rows.jsonl", model="model", code=0):
    return run(here, "train", "--model", model, "--data", data, "--output", output, *arguments, code=code)


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def options_of(folder):
    return json.loads((next(folder.glob("checkpoint-*")) / "training_args.json").read_text())


def adapter(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def test_as_typed_a_run_learns_what_trainers_defaults_do_not(here, tmp_path):
    common = ["--max_steps", 48, "--logging_steps", 4, "--save_strategy", "no"]
    for name, defaults in (("qlora", []), ("trainer", ["--defaults", "trainer", "--assistant_only_loss"])):
        train(here, tmp_path / name, *common, *defaults, data="chat.jsonl", model=EXAMPLES / "tiny-llama")
    ours, theirs = losses(tmp_path / "qlora"), losses(tmp_path / "trainer")
    assert ours[0] == pytest.approx(theirs[0], rel=0.15)
    assert ours[-1] < 0.75 * ours[0] and theirs[-1] > 0.9 * theirs[0], (ours, theirs)


def test_defaults_of_trainer_are_those_of_transformers_and_peft(here, tmp_path):
    train(here, tmp_path / "out", "--defaults", "trainer", "--max_steps", 1)
    options, config = options_of(tmp_path / "out"), json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = transformers.TrainingArguments("x", report_to="none")
    for name in ("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps",
                 "gradient_checkpointing"):  # fmt: skip
        assert options[name] == getattr(theirs, name), name
    assert (options["warmup_ratio"], options["memory_budget"]) == (0, "")
    assert (config["r"], config["lora_alpha"]) == (peft.LoraConfig().r, peft.LoraConfig().lora_alpha)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


def test_one_line_names_the_defaults_in_use_and_what_is_given_wins(here, tmp_path):
    said = train(here, tmp_path / "out", "--max_steps", 1, "--learning_rate", 0.5, "--r", 4)
    (line,) = [line for line in said.splitlines() if line.startswith("defaults ")]
    named = set(re.findall(r"(\w+) [^,]+(?:,|$)", line.partition("): ")[2]))
    assert named == set(DEFAULTS) - {"learning_rate", "r"}
    options, config = options_of(tmp_path / "out"), json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (options["learning_rate"], config["r"], config["lora_alpha"]) == (0.5, 4, 8)
    assert options["lr_scheduler_type"] == DEFAULTS["lr_scheduler_type"]
    assert "[defaults] must be qlora or trainer; got 'unsloth'" in train(here, "x", "--defaults", "unsloth", code=2)


def test_a_batch_that_is_given_alone_is_the_batch(here, tmp_path):
    assert " steps of 3 x 1 rows" in train(here, tmp_path / "batch", "--max_steps", 1, "--per_device_train_batch_size", 3)
    assert " steps of 4 x 1 rows" in train(here, tmp_path / "open", "--max_steps", 1)  # six rows


def test_rows_of_messages_train_the_answers_unless_told_otherwise(here, tmp_path):
    def trained(name, *given, data="chat.jsonl"):
        said = train(here, tmp_path / name, "--dry_run", *given, data=data, model=EXAMPLES / "tiny-llama")
        return [int(number) for number in re.search(r"(\d+) tokens, (\d+) trained", said).groups()], said

    (tokens, answers), _ = trained("default")
    assert answers == trained("asked", "--assistant_only_loss")[0][1] < tokens / 2
    assert (
        trained("whole", "--assistant_only_loss", "false")[0][1] == trained("trainer", "--defaults", "trainer")[0][1] > answers
    )
    assert trained("completions", "--completion_only_loss", "false")[0][1] > answers
    turns = [{"messages": [{"role": "user", "content": "Fay, put the kite near the tower."}]}]
    write_rows(here / "questions.jsonl", turns)
    (tokens, everything), said = trained("questions", data="questions.jsonl")
    assert (
        everything >= tokens - 1
        and "whole rows are trained, prompts too, because the assistant's turns cannot be found" in said
    )


def test_the_plan_is_the_plan_of_the_run(here, tmp_path):
    (here / "ids.jsonl").write_text("".join(json.dumps({"input_ids": [5] * (9 + i % 30)}) + "\n" for i in range(70)))

    def plan(text):
        return next(line for line in text.splitlines() if line.startswith("plan: "))

    ran = train(here, tmp_path / "out", "--max_steps", 1, data="ids.jsonl")
    assert plan(ran) == plan(train(here, tmp_path / "dry", "--max_steps", 1, "--dry_run", data="ids.jsonl"))
    here_on_cpu = ["plan", "--model", "model", "--gpu", "cpu", "--seq", 38]
    assert plan(ran) == plan(run(here, *here_on_cpu)) == str(package.plan(here / "model", gpu="cpu", max_seq_length=38))
    few = train(here, tmp_path / "few", "--dry_run", data="ids.jsonl")
    assert plan(few) == plan(run(here, *here_on_cpu, "--dataset_rows", 70)) != plan(ran)


def test_checkpointing_is_turned_on_where_a_step_needs_it(here):
    common = ["plan", "--model", "llama-3-8b", "--gpu", "T4", "--seq", 2048]
    for batch, said in ((1, False), (4, True)):
        assert ("gradient_checkpointing is on" in run(here, *common, "--batch", batch)) == said
    off = run(here, *common, "--batch", 4, "--gradient_checkpointing", "false", code=3)
    assert "gradient_checkpointing is on" not in off and "does not fit" in off


@pytest.mark.parametrize("explicit", [[], ["--r", 4, "--target_modules", "q_proj", "--init_lora_weights", "pissa"]])
def test_a_run_of_other_defaults_goes_on_with_its_own(here, tmp_path, explicit):
    """As an older version's, whose defaults were Trainer's: without a word about its options, the same bytes."""
    older = [
        "--defaults",
        "trainer",
        "--gradient_accumulation_steps",
        2,
        "--per_device_train_batch_size",
        1,
    ]
    common = ["--max_steps", 4, "--save_steps", 2, "--lora_dropout", 0.1]
    if explicit:
        common += explicit[-2:]
    train(here, tmp_path / "whole", *common, *older, *explicit[:-2])
    said = train(here, tmp_path / "again", *common, "--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-2")
    assert adapter(tmp_path / "again") == adapter(tmp_path / "whole")
    assert "resume: as in " in said and "learning_rate 5e-05" in said
    plain = train(here, tmp_path / "plain", "--max_steps", 4, "--save_steps", 2)
    assert "of 4 x 1 rows" in plain
    train(here, tmp_path / "plain again", "--max_steps", 4, "--resume_from_checkpoint", tmp_path / "plain" / "checkpoint-2")
    assert adapter(tmp_path / "plain again") == adapter(tmp_path / "plain")


def test_a_written_configuration_has_every_value_that_decides_the_result_and_runs(here):
    deadline = ["plan", "--model", "model", "--gpu", "T4", "--hours", 24, "--dataset_rows", 6, "--avg_tokens", 20, "--seq", 64]
    run(here, *deadline, "--effective_batch", 4, "--lora_dropout", 0.1, "--data", "rows.jsonl", "--output", "planned", "--write_config",
        "written.json")  # fmt: skip
    text = (here / "written.json").read_text()
    config = json.loads(text)
    for name in ("learning_rate", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "lora_dropout", "save_strategy", "save_steps", "r",
                 "lora_alpha", "target_modules", "optim", "weight_decay", "max_grad_norm", "max_length", "seed",
                 "gradient_checkpointing"):  # fmt: skip
        assert name in config, name
    assumed = list(config)[list(config).index("// assumed") + 1 :]
    assert {"learning_rate", "r", "save_steps", "target_modules"} <= set(assumed)
    assert not {"lora_dropout", "max_length", "per_device_train_batch_size", "num_train_epochs", "fp16"} & set(assumed)
    run(here, "train", "--config", "written.json", "--use_cpu", "--dtype", "float32", "--fp16", "false", "--max_steps", 1)
    options = options_of(here / "planned")
    for name in set(config) & set(options) - {"fp16"}:
        assert options[name] == config[name], name
