# SPDX-License-Identifier: Apache-2.0
"""The commands: every option is there and documented, spelled as people spell it; what they print and write is what tools expect."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import conftest
import pytest
import qlorapp as package
import transformers
from tiny_run import ROWS, qlorapp, write_model, write_rows

COMMANDS = ["train", "eval", "generate", "chat", "quantize", "merge", "export"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> pathlib.Path:
    """model/, rows.jsonl, and run/ with its output: three epochs of three steps, evaluated after each."""
    folder = tmp_path_factory.mktemp("cli")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    options = {
        "defaults": "trainer",
        "per-device-train-batch-size": 2,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "learning-rate": 0.01,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    result = train(folder, "run", *arguments, "--eval_data", "rows.jsonl", "--target_modules", "all-linear")
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    return folder


def train(folder, output, *arguments) -> subprocess.CompletedProcess:
    command = ["train", "--model", "model", "--data", "rows.jsonl", "--output", output, *arguments]
    result = qlorapp(*command, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result


def arguments_of(folder) -> dict:
    return json.loads((next(folder.glob("checkpoint-*")) / "training_args.json").read_text())


def adapter_of(folder) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def options_in(help_text: str) -> dict[str, tuple[str, str, str]]:
    """{name: (type, default, text)}"""
    options, last = {}, ""
    for line in help_text.splitlines():
        if found := re.match(r"  --(\S+) ([A-Z]+)(?:=(.*?))?(?:  +(.*))?$", line):
            last, kind, default, text = found.groups()
            options[last] = (kind, default or "", text or "")
        elif line.startswith("    "):
            kind, default, text = options[last]
            options[last] = (kind, default, f"{text} {line.strip()}")
    return options


# --- help and version


@pytest.mark.parametrize("command", [*COMMANDS, "plan"])
@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help_of_each_command(command, flag):
    result = qlorapp(command, flag)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith(f"usage: qlorapp {command} --model DIR ")
    options = options_in(result.stdout)
    assert options["model"][0] == "TEXT" and options["model"][2].startswith("required: ")
    assert [name for name, (_, _, text) in options.items() if not text] == []
    lines = result.stdout.splitlines()
    assert [line for line in lines if len(line) > 120] == []
    if flag != "--help-all":
        assert len(lines) <= 100  # two screens
        assert lines[-1].endswith("--help-all") or "--help-all" not in result.stdout


CONFIGS = [package._C.training_arguments_fields, package._C.lora_config_fields, package._C.bits_and_bytes_config_fields]
OWN_NAMES = {"output_dir": "output", "bnb_4bit_quant_type": "quant_type", "bnb_4bit_use_double_quant": "double_quant",
             "bnb_4bit_compute_dtype": "dtype"}  # fmt: skip
# The command's own: it stores in four bits unless told otherwise.
QLORA = json.loads(package._C.command_defaults())
OWN_DEFAULTS = {"load_in_4bit": "true"}


def as_typed(default: str) -> str:
    value = json.loads(default)
    if value is None or value == {}:
        return ""
    return (
        ",".join(value)
        if isinstance(value, list)
        else value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"))
    )


def test_all_of_the_help_of_train_names_every_field_with_type_and_default():
    whole = qlorapp("train", "--help-all").stdout
    options = options_in(whole)
    kinds = {"bool": "BOOL", "int": "INT", "float": "NUMBER", "str": "TEXT"}
    for field, kind, default, _ in (row for fields in CONFIGS for row in fields()):
        if field in OWN_NAMES:
            assert f"--{field}" in options[OWN_NAMES[field]][2], field
            continue
        said_kind, said_default, _ = options[field]
        assert said_kind == kinds.get(kind.removesuffix(" | None"), said_kind), field
        wanted = OWN_DEFAULTS.get(field, as_typed(json.dumps(QLORA[field]) if field in QLORA else default))
        assert said_default == wanted or float(said_default) == float(wanted), field


def test_the_help_of_train_shows_what_can_be_used_and_nothing_else():
    options = options_in(qlorapp("train", "--help").stdout)
    assert {name for name, (kind, *_) in options.items() if kind == "VALUE"} == set()
    wanted = {"learning_rate", "r", "lora_alpha", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "packing",
              "gradient_checkpointing", "memory_budget", "eval_strategy", "save_steps", "logging_steps", "init_adapter"}  # fmt: skip
    assert wanted <= set(options)
    more = set(options_in(qlorapp("train", "--help-all").stdout)) - set(options)
    assert f"\n{len(more)} more names " in qlorapp("train", "--help").stdout


def test_every_name_of_transformers_arguments_is_understood():
    """Used, or answered with the reason why it is not: scripts are copied with them."""
    understood = set(re.findall(r"--(\w+)", qlorapp("train", "--help-all").stdout))
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    assert {name for name in names if not name.startswith("_")} - understood == set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--dataloader_num_workers", 4], "--dataloader_num_workers has no effect: rows are tokenized once"),
        (["--hub-model-id", "me/x"], "--hub_model_id has no effect"),
        (["--push_to_hub"], "--push_to_hub has no effect"),
        (["--torch_compile"], "--torch_compile is not supported"),
        (["--deepspeed", "ds.json"], "--deepspeed is not supported"),
        (["--report_to", "none", "--dataloader_num_workers", "0", "--torch_compile", "false", "--save_safetensors"], ""),
    ],
)
def test_names_that_are_not_used_are_answered(tmp_path, given, said):
    done = qlorapp("train", "--model", "absent", "--data", "rows.jsonl", "--output", tmp_path / "out", *given)
    assert done.returncode != 0 and said in done.stderr
    assert said or ("no effect" not in done.stderr and "not supported" not in done.stderr)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model": "absent", "data": "rows.jsonl", "output": str(tmp_path), "torch_compile": True}))
    assert "--torch_compile is not supported" in qlorapp("train", "--config", config).stderr


def test_help_without_a_command_names_all():
    result = qlorapp("--help")
    assert result.returncode == 0 and all(f"\n  {command} " in result.stdout for command in COMMANDS)
    nothing = qlorapp()
    assert nothing.returncode == 2 and nothing.stdout == "" and nothing.stderr.startswith("usage: ")


def test_version_is_one_everywhere():
    ours = qlorapp("--version")
    assert ours.returncode == 0 and ours.stdout == f"qlorapp {package.__version__}\n"
    env = {"PYTHONPATH": str(conftest.BUILD / "python")}
    through_python = subprocess.run(
        [sys.executable, "-m", "qlorapp", "--version"], env=env, capture_output=True, text=True, check=False
    )
    assert (through_python.returncode, through_python.stdout) == (0, ours.stdout), through_python.stderr


# --- how options are spelled


def test_dashes_underscores_equals_signs_and_aliases_mean_the_same(here):
    train(
        here,
        "spelled",
        "--max-steps=1",
        "--lora_r",
        "4",
        "--lora-alpha",
        "12",
        "--evaluation_strategy=no",
        "--weight-decay",
        "1e-2",
    )
    arguments, adapter = arguments_of(here / "spelled"), adapter_of(here / "spelled")
    assert (arguments["max_steps"], arguments["weight_decay"], arguments["eval_strategy"]) == (1, 0.01, "no")
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 12)


def test_memory_savers_for_gpus_change_nothing_on_a_cpu_and_paging_says_so_once(here, tmp_path):
    common = ["--max_steps", "3", "--learning_rate", "0.01", "--use_cpu", "--gradient_checkpointing"]
    adapters = {}
    for optim, keep in [("adamw_8bit", "input_only"), ("paged_adamw_8bit", "input_on_host")]:
        output = tmp_path / optim
        result = train(here, output, *common, "--optim", optim, "--checkpoint_keep", keep)
        adapters[optim] = (output / "adapter_model.safetensors").read_bytes()
        said = [line for line in result.stderr.splitlines() if "on a CPU the optimizer state is not paged" in line]
        assert len(said) == (1 if optim.startswith("paged_") else 0), result.stderr
    assert adapters["adamw_8bit"] == adapters["paged_adamw_8bit"]


def test_a_run_that_buys_memory_with_time_trains_as_one_that_does_not(here, tmp_path):
    common = ["--max_steps", "3", "--logging_steps", "1", "--learning_rate", "0.01", "--use_cpu", "--lora_dropout", "0.1"]
    train(here, tmp_path / "plain", *common)
    config = {
        "gradient_checkpointing": True,
        "checkpoint_keep": ["input_on_host", "everything:1"],
        "loss_chunk_rows": 7,
        "mlp_tile_rows": 8,
    }
    (tmp_path / "memory.json").write_text(json.dumps(config | {"weight_workspace": "stack", "embedding_on_host": True}))
    train(here, tmp_path / "small", *common, "--config", tmp_path / "memory.json")
    losses = [
        [
            entry["loss"]
            for entry in json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"]
            if "loss" in entry
        ]
        for run in ("plain", "small")
    ]
    assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert arguments_of(tmp_path / "small")["checkpoint_keep"] == ["input_on_host", "everything:1"]


def test_a_config_file_stands_below_the_line(here):
    config = {"max_steps": 2, "learning_rate": 0.5, "r": 4, "target_modules": ["q_proj"], "gradient_checkpointing": True}
    (here / "config.json").write_text(json.dumps(config))
    train(here, "configured", "--config", "config.json", "--learning_rate", "0.25")
    arguments, adapter = arguments_of(here / "configured"), adapter_of(here / "configured")
    assert (arguments["max_steps"], arguments["learning_rate"], arguments["gradient_checkpointing"]) == (2, 0.25, True)
    assert (adapter["r"], adapter["target_modules"]) == (4, ["q_proj"])


def test_a_yaml_file_is_read_by_the_types_of_the_options(here):
    (here / "config.yaml").write_text(
        "# as for transformers\nmax_steps: 1\nlearning_rate: 1e-4\nbf16: No\nlogging_first_step: on\neval_strategy: no\nsave_total_limit: null\n"
        "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 2}\nr: 4\ntarget_modules:\n  - q_proj\n  - 'v_proj'\n"
        "rank_pattern:\n  q_proj: 2\ngradient_checkpointing: true\ncheckpoint_keep: [input_only:1, everything]\noptim: adamw_torch\n"
    )
    train(here, "from_yaml", "--config", "config.yaml", "--learning_rate", "0.25")
    arguments, adapter = arguments_of(here / "from_yaml"), adapter_of(here / "from_yaml")
    assert (arguments["max_steps"], arguments["learning_rate"], arguments["bf16"], arguments["logging_first_step"]) == (
        1,
        0.25,
        False,
        True,
    )
    assert (arguments["eval_strategy"], arguments["save_total_limit"], arguments["lr_scheduler_kwargs"]) == (
        "no",
        None,
        {"num_cycles": 2},
    )
    assert arguments["checkpoint_keep"] == ["input_only:1", "everything"]
    assert (adapter["r"], adapter["target_modules"], adapter["rank_pattern"]) == (4, ["q_proj", "v_proj"], {"q_proj": 2})


@pytest.mark.parametrize(
    "text, said",
    [
        ("learning_rate: fast\n", "'learning_rate' must be a number; got string '\"fast\"'"),
        ("learning_rate: '0.1'\n", "'learning_rate' must be a number; got string"),
        ("seed: 010\n", "'seed' must be an integer; got string '\"010\"'"),
        ("bf16: maybe\n", "'bf16' must be true or false"),
        ("optim: ~\n", "'optim' must be a string; got null"),
        ("r: [1, 2]\n", "'r' must be an integer; got array"),
        ("seed: 1\nseed: 2\n", "config.yml] line 2, column 1: the key 'seed' is there already."),
        ("r: &x 8\n", "config.yml] line 1, column 4: anchors are not read"),
        ("alpha: 8\nlora_alpha: 16\n", "'alpha' and 'lora_alpha' are the same option"),
        ("- r\n", "must hold a mapping of options"),
        (
            "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: teknium/GPT4-LLM-Cleaned\n    type: alpaca\nmax_sequence: 2048\nlora_r: 16\n",
            "config.yml, line 1. Other keys there that are no options: 'datasets', 'max_sequence'.",
        ),
        ("max_lenght: 7\n", "Did you mean '"),
    ],
)
def test_what_is_wrong_in_a_yaml_file_is_named(tmp_path, text, said):
    (tmp_path / "config.yml").write_text(text)
    result = qlorapp(
        "train", "--config", tmp_path / "config.yml", "--model", "absent", "--data", "rows.jsonl", "--output", tmp_path / "out"
    )
    assert result.returncode != 0 and said in result.stderr


@pytest.mark.parametrize(
    "given, expected", [([], True), (["true"], True), (["1"], True), (["false"], False), (["no"], False), (["False"], False)]
)
def test_a_switch_stands_alone_or_takes_a_word(here, given, expected, tmp_path):
    train(here, tmp_path / "out", "--max_steps", "1", "--dataloader_drop_last", *given, "--per_device_train_batch_size", "2")
    assert arguments_of(tmp_path / "out")["dataloader_drop_last"] is expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        ("q_proj", ["q_proj"]),
        ('["v_proj", "up_proj"]', ["up_proj", "v_proj"]),
        ("[qv]_proj", None),  # an expression that matches no whole name
        (r".*\.(q|o)_proj", r".*\.(q|o)_proj"),
        ("all-linear", "all-linear"),
    ],
)
def test_targets_are_a_list_an_expression_or_a_word(here, given, expected, tmp_path):
    command = ["train", "--model", "model", "--data", "rows.jsonl", "--output", tmp_path / "out", "--max_steps", "1"]
    result = qlorapp(*command, "--target_modules", given, cwd=here)
    if expected is None:
        assert result.returncode == 2 and "target_modules" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    targets = adapter_of(tmp_path / "out")["target_modules"]
    if expected == "all-linear":
        assert "all-linear" in targets or {"q_proj", "down_proj", "gate_proj"} <= {name.split(".")[-1] for name in targets}
    else:
        assert targets == expected


def test_lists_of_numbers_and_maps(here, tmp_path):
    train(here, tmp_path / "out", "--max_steps", "1", "--target_modules", "q_proj,v_proj", "--layers_to_transform", "[1]",
          "--rank_pattern", '{"v_proj": 2}', "--save_total_limit", "none")  # fmt: skip
    adapter = adapter_of(tmp_path / "out")
    assert adapter["layers_to_transform"] == [1] and adapter["rank_pattern"] == {"v_proj": 2}
    assert arguments_of(tmp_path / "out")["save_total_limit"] is None


def test_a_prompt_may_begin_with_a_dash(here):
    result = qlorapp("generate", "--model", "model", "--prompt", "-hello", "--max_new_tokens", "2", cwd=here)
    assert result.returncode == 0 and not result.stdout.startswith("usage")
    again = qlorapp("generate", "--model", "model", "--prompt=--hello", "--max_new_tokens", "2", cwd=here)
    assert again.returncode == 0 and not again.stdout.startswith("usage")


# --- what is printed and written


def test_piped_output_is_plain_lines(here):
    for name in ["stdout", "stderr"]:
        text = (here / name).read_bytes()
        assert not [byte for byte in text if byte < 32 and byte != 10], text
    assert (here / "stderr").read_text() == ""
    assert (here / "stdout").read_text().endswith("\n")


def test_one_sample_is_shown_with_its_trained_tokens(here):
    assert "What is 0 + 0?« It is 0.<|eot_id|>»" in (here / "stdout").read_text()


def test_trainer_state_has_the_keys_of_transformers(here):
    state = json.loads((here / "run" / "trainer_state.json").read_text())
    theirs = transformers.TrainerState().__dict__
    assert sorted(state) == sorted(theirs)
    for key, value in theirs.items():
        if isinstance(value, (bool, list, dict)):
            assert isinstance(state[key], type(value)), key
    assert transformers.TrainerState.load_from_json(str(here / "run" / "trainer_state.json")).global_step == 9
    assert (state["global_step"], state["max_steps"], state["num_train_epochs"], state["train_batch_size"]) == (9, 9, 3, 2)

    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert [sorted(entry) for entry in steps] == [["epoch", "grad_norm", "learning_rate", "loss", "step"]] * 9
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert [entry["epoch"] for entry in steps] == pytest.approx([i / 3 for i in range(1, 10)])
    assert [entry["learning_rate"] for entry in steps] == pytest.approx([0.01 * (9 - i) / 9 for i in range(9)])
    assert steps[-1]["loss"] < steps[0]["loss"]

    evals = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert [entry["step"] for entry in evals] == [3, 6, 9]
    assert {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch", "step"} <= set(evals[0])
    last = state["log_history"][-1]
    assert {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "epoch", "step"} <= set(last)


def test_eval_prints_what_the_run_measured(here):
    def evaluate(*arguments):
        result = qlorapp("eval", "--model", "model", "--data", "rows.jsonl", *arguments, cwd=here)
        assert result.returncode == 0, result.stderr
        return {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines() if line.split()[0] in NUMBERS}

    NUMBERS = ["eval_loss", "perplexity", "exact_match"]
    base, tuned = evaluate(), evaluate("--adapter", "run")
    assert sorted(base) == sorted(NUMBERS)
    assert tuned["eval_loss"] < base["eval_loss"] and 0 <= tuned["exact_match"] <= 1
    assert tuned["perplexity"] == pytest.approx(math.exp(tuned["eval_loss"]), rel=1e-4)
    state = json.loads((here / "run" / "trainer_state.json").read_text())
    measured = [entry["eval_loss_token_weighted"] for entry in state["log_history"] if "eval_loss" in entry][-1]
    assert tuned["eval_loss"] == pytest.approx(measured, rel=1e-5)


def test_exact_match_counts_answers_learned_by_heart(here, tmp_path):
    write_rows(tmp_path / "one.jsonl", ROWS[:1])
    command = ["--model", "model", "--data", tmp_path / "one.jsonl"]
    options = ["--max_steps", "60", "--learning_rate", "0.02", "--target_modules", "all-linear", "--save_strategy", "no"]
    options += ["--defaults", "trainer"]
    assert qlorapp("train", *command, "--output", tmp_path / "out", *options, cwd=here).returncode == 0
    assert "exact_match 0 " in qlorapp("eval", *command, cwd=here).stdout
    assert "exact_match 1 " in qlorapp("eval", *command, "--adapter", tmp_path / "out", cwd=here).stdout
    said = qlorapp("generate", "--model", "model", "--adapter", tmp_path / "out", "--prompt", ROWS[0]["prompt"], cwd=here)
    assert said.stdout == ROWS[0]["completion"] + "\n"


def test_generate_is_deterministic(here):
    def generate(*arguments):
        return qlorapp(
            "generate", "--model", "model", "--prompt", "What is 2 + 2?", "--max_new_tokens", 12, *arguments, cwd=here
        ).stdout

    assert generate() == generate() != ""
    assert generate("--adapter", "run") == generate("--adapter", "run") != generate()


def test_the_same_run_twice_gives_the_same_adapter(here, tmp_path):
    options = ["--max_steps", "3", "--lora_dropout", "0.1", "--seed", "7", "--learning_rate", "0.01"]
    for name in ["a", "b"]:
        train(here, tmp_path / name, *options)
    assert (tmp_path / "a/adapter_model.safetensors").read_bytes() == (tmp_path / "b/adapter_model.safetensors").read_bytes()


def test_a_quantized_folder_evaluates_like_its_source(here, tmp_path):
    assert qlorapp("quantize", "--model", "model", "--output", tmp_path / "q", cwd=here).returncode == 0
    losses = [
        qlorapp("eval", "--model", model, "--data", "rows.jsonl", cwd=here).stdout.splitlines()
        for model in ["model", tmp_path / "q"]
    ]
    assert losses[0][-3:] == losses[1][-3:]
