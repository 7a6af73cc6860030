# SPDX-License-Identifier: Apache-2.0
"""LoraConfig's matching, ranks, scalings and defaults against PEFT's own functions; TrainingArguments' against transformers'."""

import ast
import dataclasses
import json
import pathlib
import re
import subprocess

import pytest

peft = pytest.importorskip("peft")

NAMES = [
    f"{root}.{layer}.{module}"
    for root in ("model.layers", "transformer.h", "layers")
    for layer in (0, 1, 2, 10, 11)
    for module in (
        "self_attn.q_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
        "mlp.experts.2.up_proj",
    )
] + [
    "q_proj",
    "xq_proj",
    "model.q_proj",
    "lm_head",
    "model.embed_tokens",
    "model.layers.x.q_proj",
    "a.b.c.7.q_proj",
    "a.b.7.q_proj",
]


def ask(build_dir, requests):
    probe = build_dir / "tests" / "train" / "config_probe"
    assert probe.exists(), "build the target config_probe first"
    script = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([probe], input=script, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines()]


CONFIGS = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["self_attn.q_proj", "gate_proj"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.[0-9]\.mlp\.(gate|down)_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 10]},
    {"target_modules": ["q_proj"], "layers_to_transform": 2},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [2], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [2, 7], "layers_pattern": ["h", "experts", "b"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1[0-9]?\..*"},
    {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"1.self_attn.q_proj": 64}},
    {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"model\.layers\.1.*\.q_proj": 2, "v_proj": 16}},
    {"target_modules": ["q_proj"], "alpha_pattern": {"proj": 3, r"^model.layers.2.self_attn.q_proj": 5}, "use_rslora": True},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: json.dumps(c)[:60])
def test_matching_is_pefts(build_dir, config):
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    theirs = peft.LoraConfig(r=8, lora_alpha=16, **config)
    (answer,) = ask(build_dir, [{"lora": {"r": 8, "lora_alpha": 16, **config}, "names": NAMES}])
    assert "error" not in answer, answer
    matched = 0
    for name, mine in zip(NAMES, answer["modules"], strict=True):
        found = check_target_module_exists(theirs, name)
        expected = isinstance(found, re.Match) or found is True
        assert mine["matches"] == expected, name
        rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern.keys(), name), theirs.r)
        alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern.keys(), name), theirs.lora_alpha)
        assert (mine["rank"], mine["alpha"]) == (rank, alpha), name
        assert mine["scaling"] == (alpha / rank**0.5 if theirs.use_rslora else alpha / rank), name
        matched += expected
    assert matched > 0 or config["target_modules"] in (["proj"], "q_proj")


def test_all_linear_is_pefts_choice_on_a_real_model(build_dir):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    linears = [name for name, module in model.named_modules() if type(module).__name__ == "Linear"]
    for targets in ("all-linear", None):
        (answer,) = ask(build_dir, [{"lora": {"target_modules": targets}, "names": linears}])
        chosen = {name for name, mine in zip(linears, answer["modules"], strict=True) if mine["matches"]}
        adapted = peft.get_peft_model(
            transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM")
        )
        prefix = "base_model.model."
        expected = {
            n[len(prefix) : -len(".lora_A.default")] for n, _ in adapted.named_modules() if n.endswith(".lora_A.default")
        }
        assert chosen == expected


@pytest.mark.parametrize(
    "config, text",
    [
        (
            {"target_modules": "all-linear", "layers_to_transform": [1]},
            "`layers_to_transform` cannot be used when `target_modules` is a str",
        ),
        ({"target_modules": "x", "layers_pattern": "h"}, "`layers_pattern` cannot be used when `target_modules` is a str"),
        (
            {"target_modules": ["x"], "layers_pattern": "h"},
            "When `layers_pattern` is specified, `layers_to_transform` must also be specified.",
        ),
    ],
)
def test_what_peft_refuses_is_refused_with_its_words(build_dir, config, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        peft.LoraConfig(**config)
    (answer,) = ask(build_dir, [{"lora": config, "names": []}])
    assert text in answer["error"]


def test_defaults_are_pefts(build_dir):
    (answer,) = ask(build_dir, [{"defaults": True}])
    theirs = peft.LoraConfig()
    assert (
        {"r", "lora_alpha", "target_modules"}
        < set(answer["lora_config"])
        < {field.name for field in dataclasses.fields(theirs)}
    )
    for name, mine in answer["lora_config"].items():
        if name == "task_type":  # PEFT leaves it open; here it can be nothing else
            assert mine == "CAUSAL_LM"
        elif name == "peft_version":  # which PEFT wrote a file: none yet
            assert mine is None
        else:
            assert mine == getattr(theirs, name), name


def test_training_argument_defaults_are_those_of_the_newest_release_that_has_the_name(build_dir):
    (answer,) = ask(build_dir, [{"defaults": True}])
    listed = json.loads((pathlib.Path(__file__).parent / "option_names.json").read_text())["TrainingArguments"]
    theirs = {name: spec for options in reversed(listed.values()) for name, (_, spec) in options.items()}
    ours = {
        "output_dir": "trainer_output",
        "report_to": ["none"],
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "ddp_timeout": 60,  # a rank that hangs ends the others within a minute; transformers waits half an hour
    }
    assert set(answer["training_arguments"]) - set(theirs) == {
        "checkpoint_keep", "count_position_zero", "resume_with_changes", "on_non_finite", "completion_only_loss", "max_length", "packing", "packing_strategy", "eval_packing", "assistant_only_loss",
        "log_num_tokens", "loss_chunk_rows", "mlp_tile_rows", "weight_workspace", "embedding_on_host", "base_on_host",
        "memory_budget", "worst_case_first", "fp8", "cuda_graphs", "ddp_sum_in_bf16", "base_sharding", "val_size", "early_stopping_patience",
        "early_stopping_threshold", "eval_generate", "eval_max_new_tokens",
    }  # fmt: skip
    for name, mine in answer["training_arguments"].items():
        if name in theirs:
            expected = ours.get(name, [] if theirs[name] == "list()" else None)
            assert mine == (expected if expected is not None else ast.literal_eval(theirs[name])), name
