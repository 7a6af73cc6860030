# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with what the program is given: exit code 2, one line that says where and what to do, nothing half-written."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable

import conftest
import pytest
import safetensors.torch
import torch
from tiny_run import ROWS, qlorapp, write_model, write_rows

SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    """model/, another/ (twice as wide), rows.jsonl, and run/: a finished run of two steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    write_model(folder / "another", hidden_size=128)
    write_rows(folder / "rows.jsonl")
    for model, run in [("model", "run"), ("another", "another_run")]:
        done = qlorapp(
            "train",
            "--model",
            model,
            "--data",
            "rows.jsonl",
            "--output",
            run,
            "--max_steps",
            2,
            "--defaults",
            "trainer",
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def here(made, tmp_path) -> pathlib.Path:
    """A copy of all that, to be damaged."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def snapshot(folder: pathlib.Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def check_refusal(result: subprocess.CompletedProcess, fragments: list[str], code: int = 2) -> None:
    assert result.returncode == code, (result.returncode, result.stderr)
    # An adapter that is not as its manifest says, or of another base, is named before what is wrong with it.
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: [adapter] ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
    for noise in ["Traceback", "Exception raised from", "frame #", "terminate called", "libtorch", ".cpp:"]:
        assert noise not in result.stderr
    assert lines[0].endswith((".", "?", ")")), lines[0]


# --- what is done to the files beforehand


def edit_json(path: str, **changes) -> Callable[[pathlib.Path], None]:
    """Sets keys, removes those that are set to `...`."""

    def edit(here: pathlib.Path) -> None:
        values = json.loads((here / path).read_text())
        for key, value in changes.items():
            values.pop(key, None)
            if value is not ...:
                values[key] = value
        (here / path).write_text(json.dumps(values))

    return edit


def edit_tensors(path: str, change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    def edit(here: pathlib.Path) -> None:
        tensors = safetensors.torch.load_file(here / path)
        change(tensors)
        safetensors.torch.save_file(tensors, here / path, metadata={"format": "pt"})

    return edit


def reshape_first(tensors: dict) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("gate_proj.weight"))
    tensors[name] = tensors[name][:, :-1].contiguous()


def poison_first(tensors: dict) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("gate_proj.weight"))
    tensors[name][0, 0] = float("nan")


def drop_norm(here: pathlib.Path) -> None:
    """A shard without the tensor that the index promises."""
    index = json.loads((here / "model/model.safetensors.index.json").read_text())
    shard = "model/" + index["weight_map"]["model.norm.weight"]
    edit_tensors(shard, lambda tensors: tensors.pop("model.norm.weight"))(here)


def remove(*paths: str) -> Callable[[pathlib.Path], None]:
    def edit(here: pathlib.Path) -> None:
        for path in paths:
            (here / path).unlink()

    return edit


def write(path: str, content: str | bytes) -> Callable[[pathlib.Path], None]:
    def edit(here: pathlib.Path) -> None:
        (here / path).parent.mkdir(exist_ok=True)
        (here / path).write_bytes(content.encode() if isinstance(content, str) else content)

    return edit


def write_lines(*rows: object) -> Callable[[pathlib.Path], None]:
    return write("rows.jsonl", "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def truncate(path: str, size: int) -> Callable[[pathlib.Path], None]:
    return lambda here: os.truncate(here / path, size)


def only_bin(here: pathlib.Path) -> None:
    for path in (here / "model").glob("model*"):
        path.unlink()
    (here / "model" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def leave_run_of(config: str) -> Callable[[pathlib.Path], None]:
    """out/ holds another run."""
    return lambda here: shutil.copytree(here / config, here / "out")


# --- the table

TRAIN = ["train", "--model", "model", "--data", "rows.jsonl", "--output", "out", "--max_steps", "1"]
QUANTIZE = ["quantize", "--model", "model", "--output", "out"]
MERGE = ["merge", "--model", "model", "--adapter", "run", "--output", "out"]
EVAL = ["eval", "--model", "model", "--data", "rows.jsonl"]
GENERATE = ["generate", "--model", "model", "--prompt", "hello"]


@dataclasses.dataclass
class Case:
    name: str
    command: list[str]
    fragments: list[str]
    damage: Callable[[pathlib.Path], object] | None = None


def of_all(name: str, fragments: list[str], damage: Callable, merges: bool = False) -> list[Case]:
    """A damaged model, met by each command that reads one. merges: names and shapes are whole, which is all that merge needs."""
    commands = [command for command in (TRAIN, QUANTIZE, MERGE, EVAL, GENERATE) if not (merges and command is MERGE)]
    return [Case(f"{name}, {command[0]}", command, fragments, damage) for command in commands]


MODEL = [
    *of_all("no such model folder", ["model/config.json", "No such file"], lambda here: shutil.rmtree(here / "model"), merges=True),
    Case("no such model folder, merge", MERGE, ["[model]", "must exist"], lambda here: shutil.rmtree(here / "model")),
    *of_all("shard is missing", [SHARD], remove(f"model/{SHARD}")),
    *of_all("shard is cut short", [SHARD], truncate(f"model/{SHARD}", 100_000)),
    *of_all("shard is empty", [SHARD], truncate(f"model/{SHARD}", 0)),
    *of_all("shard's header is cut", [SHARD], truncate(f"model/{SHARD}", 60)),
    *of_all("tensor of another shape", ["gate_proj.weight", "shape"], edit_tensors(f"model/{SHARD}", reshape_first), merges=True),
    *of_all("weight is not finite", ["gate_proj.weight", "finite"], edit_tensors(f"model/{SHARD}", poison_first)),
    *of_all("tensor is missing", ["model.norm.weight"], drop_norm),
    *of_all("no config.json", ["config.json", "No such file"], remove("model/config.json")),
    *of_all("config.json is no JSON", ["config.json", "JSON"], write("model/config.json", '{"model_type": "llama",')),
    *of_all("unknown architecture", ["mamba"], edit_json("model/config.json", model_type="mamba", architectures=["MambaForCausalLM"]), merges=True),
    *of_all("unsupported key", ["attn_logit_softcapping", "not supported"], edit_json("model/config.json", attn_logit_softcapping=50.0), merges=True),
    *of_all("code of its own", ["auto_map"], edit_json("model/config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"}), merges=True),
    *of_all("key of the wrong type", ["hidden_size"], edit_json("model/config.json", hidden_size="big"), merges=True),
    *of_all("another layer count", ["model.layers.2"], edit_json("model/config.json", num_hidden_layers=3), merges=True),
    *of_all("only a .bin", ["model", "safetensors"], only_bin),
    Case("index leads out of the folder", TRAIN, ["index.json", "../"],
         lambda here: (here / "model/model.safetensors.index.json").write_text(
             json.dumps({"weight_map": {"model.norm.weight": "../another/model-00001-of-00004.safetensors"}}))),
    Case("no tokenizer, rows of text", TRAIN, ["tokenizer", "input_ids"], remove("model/tokenizer.json")),
    Case("no tokenizer, a prompt", GENERATE, ["tokenizer.json"], remove("model/tokenizer.json")),
    Case("tokenizer is no JSON", TRAIN, ["tokenizer.json"], write("model/tokenizer.json", "<html>")),
    Case("quantized already", [*QUANTIZE[:-1], "again"], ["model", "quantized already"],
         lambda here: (qlorapp("quantize", "--model", "model", "--output", "q", cwd=here), shutil.rmtree(here / "model"),
                       (here / "q").rename(here / "model"))),
]  # fmt: skip

ADAPTER = [
    case
    for name, fragments, damage in [
        ("of another base", ["adapter_model.safetensors", "shape", "another base"], lambda here: (shutil.rmtree(here / "run"), (here / "another_run").rename(here / "run"))),
        ("folder is not there", ["run/adapter_config.json", "No such file"], lambda here: shutil.rmtree(here / "run")),
        ("folder without files", ["run/adapter_config.json", "No such file"], remove("run/adapter_config.json", "run/adapter_model.safetensors")),
        ("folder without weights", ["adapter_model.safetensors"], remove("run/adapter_model.safetensors")),
        ("folder with a .bin only", ["adapter_model"], lambda here: (here / "run/adapter_model.safetensors").rename(here / "run/adapter_model.bin")),
        ("weights are cut short", ["adapter_model.safetensors"], truncate("run/adapter_model.safetensors", 5000)),
        ("weights are not finite", ["adapter_model.safetensors", "finite"], edit_tensors("run/adapter_model.safetensors", lambda t: t[sorted(t)[0]].fill_(float("inf")))),
        ("a tensor is missing", ["adapter_model.safetensors", "lora_A"], edit_tensors("run/adapter_model.safetensors", lambda t: t.pop(sorted(t)[0]))),
        ("a tensor too many", ["adapter_model.safetensors", "zzz"], edit_tensors("run/adapter_model.safetensors", lambda t: t.update(zzz=torch.ones(2)))),
        ("r is -1", ["adapter_config.json", "r must be", "-1"], edit_json("run/adapter_config.json", r=-1)),
        ("r is a word", ["adapter_config.json", "r must be", "eight"], edit_json("run/adapter_config.json", r="eight")),
        ("lora_alpha is NaN", ["adapter_config.json", "lora_alpha", "JSON"], edit_json("run/adapter_config.json", lora_alpha=float("nan"))),
        ("lora_alpha is 0", ["adapter_config.json", "lora_alpha"], edit_json("run/adapter_config.json", lora_alpha=0)),
        ("of another kind", ["adapter_config.json", "peft_type", "LORA"], edit_json("run/adapter_config.json", peft_type="IA3")),
        ("DoRA without its magnitudes", ["adapter_config.json", "lora_magnitude_vector"], edit_json("run/adapter_config.json", use_dora=True)),
        ("config is cut short", ["adapter_config.json", "invalid JSON"], truncate("run/adapter_config.json", 40)),
        ("config is no object", ["adapter_config.json", "object"], write("run/adapter_config.json", "[1]")),
        ("names no layer", ["target_modules"], edit_json("run/adapter_config.json", target_modules=["c_attn"])),
    ]
    for case in [Case(f"adapter {name}, init", [*TRAIN, "--init_adapter", "run"], fragments, damage),
                 Case(f"adapter {name}, merge", MERGE, fragments, damage),
                 Case(f"adapter {name}, eval", [*EVAL, "--adapter", "run"], fragments, damage)]
]  # fmt: skip

OPTIONS = [
    Case("misspelled command", ["trian"], ["'trian'", "Did you mean 'train'?", "--help"]),  # codespell:ignore trian
    Case("unknown option", [*TRAIN, "--learning_rte", "1"], ["--learning_rte", "Did you mean 'learning_rate'?", "train --help-all"]),
    Case("unknown option with dashes", [*TRAIN, "--max-step", "1"], ["max_step", "Did you mean 'max_steps'?"]),
    Case("unknown option of eval", [*EVAL, "--adaptor", "run"], ["--adaptor", "Did you mean 'adapter'?"]),
    Case("unknown key in the config file", [*TRAIN, "--config", "c.json"], ["lora_rank", "--help"], write("c.json", '{"lora_rank": 8}')),
    Case("config file is not there", [*TRAIN, "--config", "c.json"], ["c.json", "No such file"]),
    Case("config file is no object", [*TRAIN, "--config", "c.json"], ["c.json", "object"], write("c.json", "[1]")),
    Case("config file holds a key twice", [*TRAIN, "--config", "c.json"], ["c.json", "'r'"], write("c.json", '{"r": 8, "r": 4}')),
    Case("value in the config file is of another type", [*TRAIN, "--config", "c.json"], ["'r'", "integer"], write("c.json", '{"r": "8"}')),
    Case("option without value", [*TRAIN, "--learning_rate"], ["--learning_rate needs a value"]),
    Case("option without value before another", ["train", "--model", "--data", "rows.jsonl"], ["--model needs a value"]),
    Case("--config without value", [*TRAIN, "--config"], ["--config", "--help"]),
    Case("needed option is missing", ["train", "--model", "model", "--output", "out"], ["--data is required"]),
    Case("option given twice", [*TRAIN, "--seed", "1", "--seed", "2"], ["--seed is given twice"]),
    Case("option and its alias", [*TRAIN, "--r", "1", "--lora_r", "2"], ["--r and --lora_r are the same option"]),
    Case("word that is no option", [*TRAIN, "extra"], ["'extra' is not an option"]),
    Case("one dash", [*TRAIN, "-x"], ["'-x' is not an option"]),
    Case("word for an integer", [*TRAIN, "--r", "eight"], ["'r'", "integer", "eight"]),
    Case("fraction for an integer", [*TRAIN, "--r", "1.5"], ["'r'", "integer", "1.5"]),
    Case("integer that is too big", [*TRAIN, "--seed", "99999999999999999999"], ["'seed'", "integer"]),
    Case("word for a number", [*TRAIN, "--learning_rate", "fast"], ["'learning_rate'", "number", "fast"]),
    Case("NaN for a number", [*TRAIN, "--learning_rate", "nan"], ["learning_rate", "nan"]),
    Case("word for true or false", [*TRAIN, "--bf16", "maybe"], ["'bf16'", "true or false", "maybe"]),
    Case("broken JSON for a map", [*TRAIN, "--rank_pattern", "{"], ["--rank_pattern", "JSON"]),
    Case("map with values of another type", [*TRAIN, "--rank_pattern", '{"q_proj": "x"}'], ["'rank_pattern'", "integer"]),
    Case("optim", [*TRAIN, "--optim", "adamw8bit"], ["optim", "adamw_8bit", "adamw8bit"]),
    Case("lr_scheduler_type", [*TRAIN, "--lr_scheduler_type", "cosin"], ["lr_scheduler_type", "Did you mean 'cosine'?"]),
    Case("eval_strategy", [*TRAIN, "--eval_strategy", "step"], ["eval_strategy", "Did you mean 'steps'?"]),
    Case("checkpoint_keep", [*TRAIN, "--checkpoint_keep", "all"], ["everything", "attention_only", "input_only", "all"]),
    Case("mixture of more blocks", [*TRAIN, "--gradient_checkpointing", "--checkpoint_keep", "everything:99"], ["99", "blocks"]),
    Case("mlp_tile_rows", [*TRAIN, "--mlp_tile_rows", "3"], ["mlp_tile_rows", "multiple of 4", "3"]),
    Case("weight_workspace", [*TRAIN, "--weight_workspace", "layers"], ["weight_workspace", "Did you mean 'layer'?"]),
    Case("quant_type", [*TRAIN, "--quant_type", "nf5"], ["quant_type", "nf4 or fp4", "nf5"]),
    Case("block_size", [*TRAIN, "--block_size", "33"], ["block_size", "33", "64"]),
    Case("block_size of quantize", [*QUANTIZE, "--block_size", "0"], ["block_size", "64"]),
    Case("compat", [*QUANTIZE, "--compat", "bitsandbytes"], ["compat", "bnb", "bitsandbytes"]),
    Case("compute_dtype", [*QUANTIZE, "--compute_dtype", "int8"], ["dtype", "float32", "int8"]),
    Case("dtype", [*EVAL, "--dtype", "float8"], ["dtype", "bfloat16", "float8"]),
    Case("batch of nothing in eval", [*EVAL, "--per_device_eval_batch_size", "0"], ["per_device_eval_batch_size", "0"]),
    Case("batch of nothing", [*TRAIN, "--per_device_train_batch_size", "0"], ["per_device_train_batch_size", ">= 1"]),
    Case("no new tokens", [*GENERATE, "--max_new_tokens", "0"], ["max_new_tokens", "at least 1"]),
    Case("a prompt that is no text", [*GENERATE[:-1], "a\udcff"], ["UTF-8", "byte 255"]),
    Case("fewer than no tokens", [*GENERATE, "--min_new_tokens", "-1"], ["min_new_tokens", "at least 0"]),
    Case("system without a template", [*GENERATE, "--system", "Be brief."], ["--system", "chat template"]),
    Case("fp16 and bf16", [*TRAIN, "--fp16", "--bf16"], ["fp16", "bf16"]),
    Case("steps of 0", [*TRAIN[:-1], "0"], ["max_steps", "-1"]),
    Case("dropout of 1", [*TRAIN, "--lora_dropout", "1"], ["lora_dropout", "[0, 1)"]),
    Case("rank of 0", [*TRAIN, "--r", "0"], ["r must be", "0"]),
    Case("refused option", [*TRAIN, "--torch_compile"], ["torch_compile", "Leave it out"]),
    Case("refused option of LoRA", [*TRAIN, "--lora_bias"], ["lora_bias", "not supported"]),
    Case("targets that the model lacks", [*TRAIN, "--target_modules", "c_attn"], ["target_modules", "q_proj"]),
    Case("targets that are no expression", [*TRAIN, "--target_modules", "("], ["target_modules", "regular expression"]),
    Case("init_adapter and another r", [*TRAIN, "--init_adapter", "run", "--r", "4"], ["[init_adapter] r must match", "run has 8; got 4", "Leave the option out"]),
    Case("init_adapter and another alias", [*TRAIN, "--init_adapter", "run", "--lora_r", "4"], ["[init_adapter] r must match", "; got 4"]),
    Case("init_adapter and another alpha", [*TRAIN, "--init_adapter", "run", "--lora_alpha", "3"], ["lora_alpha must match", "run has 8.0; got 3.0"]),
    Case("init_adapter and other targets", [*TRAIN, "--init_adapter", "run", "--target_modules", "q_proj"], ["target_modules must match", '["q_proj","v_proj"]', 'got ["q_proj"]']),
    Case("init_adapter and another dropout", [*TRAIN, "--init_adapter", "run", "--lora_dropout", "0.5"], ["lora_dropout must match", "got 0.5"]),
    Case("init_adapter and DoRA", [*TRAIN, "--init_adapter", "run", "--use_dora"], ["use_dora must match", "run has false; got true"]),
    Case("init_adapter and another r in a file", [*TRAIN, "--init_adapter", "run", "--config", "c.json"], ["[init_adapter] r must match", "; got 4"], write("c.json", '{"lora_r": 4}')),
    Case("output and output_dir", [*TRAIN, "--output_dir", "elsewhere"], ["--output and --output_dir are the same option", "Give one"]),
    Case("output and output_dir in a file", ["train", "--config", "c.json"], ["c.json", "'output' and 'output_dir' are the same option"],
         write("c.json", '{"model": "model", "data": "rows.jsonl", "output": "out", "output_dir": "elsewhere"}')),
    Case("fp8 in float32", [*TRAIN, "--fp8"], ["[fp8]", "needs bfloat16", "computes in float32", "--bf16"]),
    Case("fp8 and bf16 false", [*TRAIN, "--fp8", "--bf16", "false"], ["[fp8]", "needs bfloat16", "--bf16"]),
    Case("dtype and bf16", [*TRAIN, "--dtype", "float16", "--bf16"], ["--dtype float16 and --bf16 true", "Give one of them"]),
    Case("dtype and not bf16", [*TRAIN, "--bnb_4bit_compute_dtype", "bfloat16", "--bf16", "false"], ["--dtype bfloat16 and --bf16 false"]),
    Case("dtype of train", [*TRAIN, "--dtype", "int8"], ["[dtype]", "bfloat16", "int8"]),
    Case("evaluations without rows", [*TRAIN, "--eval_strategy", "steps"], ["[train] --eval_strategy steps needs rows", "--eval_data"]),
    Case("evaluations without rows, dry run", [*TRAIN, "--eval_strategy", "epoch", "--dry_run"], ["--eval_strategy epoch needs rows", "--eval_data"]),
    Case("evaluation on start without rows", [*TRAIN, "--eval_on_start"], ["--eval_on_start needs rows", "--eval_data"]),
    Case("eight bits", [*TRAIN, "--load_in_8bit"], ["load_in_8bit is not supported", "four bits"]),
    Case("quant_type and its other name", [*TRAIN, "--quant_type", "nf4", "--bnb_4bit_quant_type", "fp4"], ["--quant_type and --bnb_4bit_quant_type are the same option"]),
    Case("bnb_4bit_quant_type", [*TRAIN, "--bnb_4bit_quant_type", "nf5"], ["quant_type", "nf4 or fp4", "nf5"]),
    *[Case(f"a name on the hub, {command[0]}", [command[0], "--model", "HuggingFaceTB/SmolLM2-135M", *command[3:]],
           ["there is no folder 'HuggingFaceTB/SmolLM2-135M'", "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M", "--model SmolLM2-135M"])
      for command in (TRAIN, QUANTIZE, MERGE, EVAL, GENERATE)],
]  # fmt: skip

DATA = [
    Case("no such file", TRAIN, ["rows.jsonl", "No such file"], remove("rows.jsonl")),
    Case("no such eval file", [*TRAIN, "--eval_data", "nope.jsonl"], ["nope.jsonl", "No such file"]),
    Case("a folder", [*TRAIN[:3], "--data", "run", "--output", "out"], ["run", "directory"]),
    Case("empty file", TRAIN, ["rows.jsonl", "empty"], write_lines()),
    Case("blank lines only", TRAIN, ["rows.jsonl", "empty"], write("rows.jsonl", "\n\n \n")),
    Case("empty array", TRAIN, ["rows.jsonl", "empty"], write("rows.jsonl", "[]")),
    Case("nothing to train, labels", TRAIN, ["rows.jsonl", "a trained token"], write_lines({"input_ids": [5, 6], "labels": [-100, -100]})),
    Case("nothing to train, cut off", [*TRAIN, "--max_length", "2"], ["a trained token", "Raise max_length"], None),
    Case("nothing to evaluate", EVAL, ["rows.jsonl", "a trained token"], write_lines({"input_ids": [5], "labels": [5]})),
    Case("token id is too big", TRAIN, ["rows.jsonl:2", "vocabulary", "9999"], write_lines({"input_ids": [5, 6]}, {"input_ids": [5, 9999]})),
    Case("token id is negative", TRAIN, ["rows.jsonl:1", "token ids", "-3"], write_lines({"input_ids": [5, -3]})),
    Case("label is too big", EVAL, ["rows.jsonl:1", "9999"], write_lines({"input_ids": [5, 6], "labels": [5, 9999]})),
    Case("labels of another length", TRAIN, ["rows.jsonl:1", "labels", "2 and 3"], write_lines({"input_ids": [5, 6, 7], "labels": [5, 6]})),
    Case("malformed JSON", TRAIN, ["rows.jsonl:3"], write_lines(ROWS[0], ROWS[1], '{"prompt": "a", "completion": ')),
    Case("JSON that is no object", TRAIN, ["rows.jsonl:2", "object"], write_lines(ROWS[0], "[1, 2]")),
    Case("not UTF-8", TRAIN, ["rows.jsonl:1"], write("rows.jsonl", b'{"text": "\xff\xfe\xfa"}\n')),
    Case("UTF-16", TRAIN, ["rows.jsonl", "UTF-8"], write("rows.jsonl", '\ufeff{"text": "a"}'.encode("utf-16-le"))),
    Case("mixed formats", TRAIN, ["rows.jsonl:2", "'prompt'", "text"], write_lines(ROWS[0], {"text": "hello"})),
    Case("unknown format", TRAIN, ["rows.jsonl:1", "'text'", "'messages'", "--prompt_column"], write_lines({"ask": "a", "reply": "b"})),
    Case("text is a number", TRAIN, ["rows.jsonl:1", "'text'", "string"], write_lines({"text": 5})),
    Case("messages without a template", TRAIN, ["rows.jsonl", "chat template"], write_lines({"messages": [{"role": "user", "content": "a"}]})),
    Case("completion loss of plain text", [*TRAIN, "--completion_only_loss", "true"], ["completion_only_loss", "Leave it unset"], write_lines({"text": "a b c"})),
]  # fmt: skip

OUTPUT = [
    Case("holds another run", TRAIN, ["out", "--resume_from_checkpoint", "--overwrite_output_dir"], leave_run_of("run")),
    Case("is a file", TRAIN, ["out", "a file"], write("out", "mine")),
    Case("is inside a file", [*TRAIN[:-3], "rows.jsonl/out"], ["rows.jsonl", "Not a directory"]),
    Case("of quantize is not empty", QUANTIZE, ["out", "new or empty"], leave_run_of("run")),
    Case("of quantize is the model", [*QUANTIZE[:-1], "model"], ["model", "new or empty"]),
    Case("of merge is not empty", MERGE, ["out", "new or empty"], leave_run_of("run")),
    Case("of merge is the model", [*MERGE[:-1], "model"], ["model", "new or empty"]),
    Case("of quantize is a file", QUANTIZE, ["out", "a file"], write("out", "mine")),
]

RESUME = [
    Case("nothing to resume", [*TRAIN, "--resume_from_checkpoint"], ["resume_from_checkpoint", "out", "Leave the option out"]),
    Case("no such checkpoint", [*TRAIN, "--resume_from_checkpoint", "nope"], ["nope", "is not a checkpoint"]),
    Case("a model is no checkpoint", [*TRAIN, "--resume_from_checkpoint", "model"], ["model", "not a checkpoint", "checkpoint-"]),
    Case("checkpoint of another base", [*TRAIN, "--resume_from_checkpoint", "another_run/checkpoint-2"], ["another_run/checkpoint-2", "another base"]),
    Case("checkpoint of the base quantized otherwise", [*TRAIN, "--quant_type", "fp4", "--resume_from_checkpoint", "run/checkpoint-2"],
         ["run/checkpoint-2", "another base model, or to this one quantized differently"]),
    Case("checkpoint of another rank", [*TRAIN, "--r", "4", "--resume_from_checkpoint", "run/checkpoint-2"], ["run/checkpoint-2", "rank"]),
    Case("checkpoint of another optimizer", [*TRAIN, "--optim", "adamw_8bit", "--resume_from_checkpoint", "run/checkpoint-2"],
         ["run/checkpoint-2", "optim adamw_torch_fused → adamw_8bit"]),
    Case("checkpoint without optimizer", [*TRAIN, "--resume_from_checkpoint", "run/checkpoint-2"], ["optimizer.safetensors"],
         remove("run/checkpoint-2/optimizer.safetensors")),
    Case("checkpoint whose optimizer is cut short", [*TRAIN, "--resume_from_checkpoint", "run/checkpoint-2"], ["optimizer.safetensors"],
         truncate("run/checkpoint-2/optimizer.safetensors", 3000)),
    Case("checkpoint without run_state.json", [*TRAIN, "--resume_from_checkpoint", "run/checkpoint-2"], ["run_state.json"],
         remove("run/checkpoint-2/run_state.json")),
    Case("checkpoint with a broken run_state.json", [*TRAIN, "--resume_from_checkpoint", "run/checkpoint-2"], ["run_state.json: it has"],
         edit_json("run/checkpoint-2/run_state.json", global_step=-1)),
    Case("checkpoint with a broken history", [*TRAIN, "--resume_from_checkpoint", "run/checkpoint-2"], ["trainer_state.json: it has"],
         edit_json("run/checkpoint-2/trainer_state.json", log_history=3)),
]  # fmt: skip


@pytest.mark.parametrize("case", MODEL + ADAPTER + OPTIONS + DATA + OUTPUT + RESUME, ids=lambda case: case.name)
def test_bad_input_is_one_line_and_leaves_nothing(here, case):
    if case.damage:
        case.damage(here)
    before = snapshot(here)
    result = qlorapp(*case.command, cwd=here)
    check_refusal(result, case.fragments)
    assert snapshot(here) == before


# --- what the file system says


def in_small_disk(command: list[str], here: pathlib.Path, kib: int | None) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs with disk/ on a file system of so many KiB, or on one that is mounted read-only; what is on it afterwards."""
    (here / "disk").mkdir(exist_ok=True)
    mount = "mount -t tmpfs -o ro none disk" if kib is None else f"mount -t tmpfs -o size={kib}k none disk"
    script = f'{mount} || exit 77; "$@"; code=$?; find disk -mindepth 1 > left; exit $code'
    program = str(conftest.BUILD / "qlorapp")
    shell = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c", script, "sh"]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [*shell, program, *command], cwd=here, capture_output=True, text=True, check=False, timeout=120, env=env
    )
    if result.returncode == 77 or result.stderr.startswith("unshare:"):
        pytest.skip(f"this machine lets nobody mount a small disk: {result.stderr.strip()}")
    return result, (here / "left").read_text().split()


DISK_TRAIN = [*TRAIN[:-3], "disk/out", "--max_steps", "1"]


@pytest.mark.parametrize(
    "command", [DISK_TRAIN, [*QUANTIZE[:-1], "disk/out"], [*MERGE[:-1], "disk/out"]], ids=["train", "quantize", "merge"]
)
def test_read_only_disk_is_said_before_the_work_begins(here, command):
    result, left = in_small_disk(command, here, None)
    check_refusal(result, ["disk", "Read-only file system"])
    assert left == [] and "steps of" not in result.stdout


@pytest.mark.parametrize("kib", [8, 24, 60, 80])
def test_full_disk_while_training_leaves_no_half_of_anything(here, kib):
    """The adapter takes 15 KB, its optimizer 30 KB: the disk is full at another file each time."""
    result, left = in_small_disk([*DISK_TRAIN, "--r", "8"], here, kib)
    # The report of the run does not fit either; that alone fails no run.
    result.stderr = "".join(line for line in result.stderr.splitlines(keepends=True) if "run_report.json was not" not in line)
    check_refusal(result, ["disk/out", "No space left on device"], code=1)  # a step was computed, and nothing can go on
    assert not [name for name in left if "tmp" in name or "trash" in name], left
    assert "disk/out/adapter_config.json" not in left  # without it no reader takes the folder for an adapter
    for name in left:
        if "/checkpoint-" in name:  # one that has its name is whole
            assert "disk/out/checkpoint-1/trainer_state.json" in left


@pytest.mark.parametrize("kib", [8, 100, 240, 268])
def test_full_disk_while_quantizing_leaves_nothing(here, kib):
    result, left = in_small_disk([*QUANTIZE[:-1], "disk/out"], here, kib)
    check_refusal(result, ["disk/out", "No space left on device"])
    assert left == []


@pytest.mark.parametrize("kib", [8, 150, 400, 560])
def test_full_disk_while_merging_leaves_nothing(here, kib):
    """Shards come one by one: the disk is full at another each time."""
    result, left = in_small_disk([*MERGE[:-1], "disk/out", "--max_shard_size", "100KB"], here, kib)
    check_refusal(result, ["disk/out", "No space left on device"])
    assert left == []


def test_an_empty_folder_is_a_fine_place_for_a_quantized_model(here):
    (here / "out").mkdir()
    assert qlorapp(*QUANTIZE, cwd=here).returncode == 0
    assert (here / "out" / "config.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only disk above is the same check")
def test_folder_without_permission(here):
    (here / "locked").mkdir(mode=0o555)
    check_refusal(qlorapp(*TRAIN[:-3], "locked/out", cwd=here), ["locked", "Permission denied"])
