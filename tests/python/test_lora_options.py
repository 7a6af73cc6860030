# SPDX-License-Identifier: Apache-2.0
"""Every option that PEFT's LoraConfig has is used, accepted and said once, or refused with a reason: none raises TypeError, none is
dropped. The names come from the installed PEFT."""

import dataclasses
import logging
import subprocess
import sys

import peft
import pytest
import qlorapp

#: A value that differs from the default, and the outcome: None for used, else a part of what is said ("has no effect …") or
#: refused ("… is not supported").
VALUES = {
    "r": (4, None),
    "target_modules": (["k_proj"], None),
    "exclude_modules": (["k_proj"], None),
    "lora_alpha": (3, None),
    "lora_dropout": (0.25, None),
    "fan_in_fan_out": (True, "has no effect"),
    "bias": ("all", None),
    "use_rslora": (True, None),
    "modules_to_save": (["lm_head"], None),
    "init_lora_weights": ("gaussian", None),
    "layers_to_transform": ([1], None),
    "layers_pattern": ("layers", None),
    "rank_pattern": ({"q_proj": 3}, None),
    "alpha_pattern": ({"q_proj": 3}, None),
    "megatron_config": ({"x": 1}, "megatron_config is not supported"),
    "megatron_core": ("other.core", "has no effect"),
    "trainable_token_indices": ([1, 2], "trainable_token_indices is not supported"),
    "loftq_config": ({"loftq_iter": 2}, "has no effect: init_lora_weights is not 'loftq'"),
    "eva_config": ({"rho": 2.0}, "eva_config is not supported"),
    "corda_config": ({"x": 1}, "corda_config is not supported"),
    "lora_ga_config": ({"x": 1}, "lora_ga_config is not supported"),
    "use_dora": (True, None),
    "velora_config": ({"x": 1}, "velora_config is not supported"),
    "alora_invocation_tokens": ([1], "alora_invocation_tokens is not supported"),
    "use_qalora": (True, "use_qalora is not supported"),
    "qalora_group_size": (32, "has no effect"),
    "monteclora_config": ({"x": 1}, "monteclora_config is not supported"),
    "layer_replication": ([(0, 2)], "layer_replication is not supported"),
    "runtime_config": (peft.LoraRuntimeConfig(ephemeral_gpu_offload=True), "has no effect"),
    "lora_bias": (True, "lora_bias is not supported"),
    "target_parameters": (["w"], "target_parameters is not supported"),
    "use_bdlora": ({"x": 1}, "use_bdlora is not supported"),
    "arrow_config": ({"x": 1}, "arrow_config is not supported"),
    "kasa_config": ({"x": 1}, "kasa_config is not supported"),
    "ensure_weight_tying": (True, None),
    "task_type": ("SEQ_CLS", "task_type must be 'CAUSAL_LM'"),
    "peft_type": ("IA3", "peft_type must be 'LORA'"),
    "auto_mapping": ({"x": 1}, "has no effect"),
    "peft_version": ("0.1", None),
    "base_model_name_or_path": ("x", None),
    "revision": ("main", None),
    "inference_mode": (True, None),
}
BESIDE = {"layers_to_transform": {"target_modules": ["q_proj"]}, "layers_pattern": {"layers_to_transform": [1]}}


def test_the_table_has_pefts_options_and_no_other():
    theirs = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert theirs == set(VALUES) == {field.name for field in dataclasses.fields(qlorapp.LoraConfig)}


@pytest.mark.parametrize("name", VALUES)
def test_an_option_is_used_or_said_or_refused(name, build_dir):
    value, outcome = VALUES[name]
    options = {**BESIDE.get(name, {}), name: value}
    if outcome and not outcome.startswith("has no effect"):
        with pytest.raises(ValueError) as error:
            qlorapp.LoraConfig(**options)
        assert outcome in str(error.value) and str(error.value).endswith((".", "'."))
        return
    if outcome:  # once in a process: in one of its own
        code = f"import qlorapp, peft; c = lambda: qlorapp.LoraConfig(**{{{name!r}: {value!r}}}); c(); c()".replace(
            "LoraRuntimeConfig(", "peft.LoraRuntimeConfig("
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": str(build_dir / "python")},
        )
        assert done.stderr.count(outcome) == 1 and name in done.stderr, done.stderr
        return
    config = qlorapp.LoraConfig(**options)
    kept = config.to_dict()[name]
    assert kept == (value if not isinstance(kept, list) or isinstance(value, list) else [value])


@pytest.mark.parametrize("name", ["eva", "corda", "lora_ga", "mica", "nonsense"])
def test_initializations_that_need_more_than_weights_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        qlorapp.LoraConfig(init_lora_weights=name)


def test_a_config_is_read_and_written_as_peft_does(tmp_path):
    options = {"r": 4, "lora_alpha": 6, "use_dora": True, "modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"],
               "rank_pattern": {"q_proj": 2}, "bias": "lora_only", "ensure_weight_tying": True, "task_type": "CAUSAL_LM"}  # fmt: skip
    peft.LoraConfig(**options, base_model_name_or_path="a base").save_pretrained(tmp_path / "theirs")
    config = qlorapp.PeftConfig.from_pretrained(tmp_path / "theirs")
    assert isinstance(config, qlorapp.LoraConfig) and config.base_model_name_or_path == "a base"
    config.target_modules.sort()  # PEFT writes a set in the order of its hashes
    assert {name: getattr(config, name) for name in options} == options
    config.save_pretrained(tmp_path / "ours")
    back = peft.PeftConfig.from_pretrained(tmp_path / "ours").to_dict()
    assert back == peft.PeftConfig.from_pretrained(tmp_path / "theirs").to_dict()


def test_a_target_that_the_model_does_not_have_is_said_and_one_that_cannot_be_is_refused(tmp_path, caplog):
    import peer

    peer.write_llama(tmp_path)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path)
    for target in ("lm_head", "embed_tokens", r".*(q_proj|lm_head)"):
        with pytest.raises(ValueError, match="modules_to_save"):
            model.add_adapters(qlorapp.LoraConfig(target_modules=target if "*" in target else ["q_proj", target]))
    for module in ("norm", "q_proj"):
        with pytest.raises(ValueError, match=f"modules_to_save can hold embed_tokens and lm_head; got '{module}'"):
            model.add_adapters(qlorapp.LoraConfig(modules_to_save=[module]))
    assert not model.peft_config
    with caplog.at_level(logging.WARNING, logger="qlorapp"):
        model.add_adapters(qlorapp.LoraConfig(target_modules=["q_proj", "k_prj"], bias="lora_only"))
    assert "'k_prj', which this model does not have. Did you mean 'k_proj'?" in caplog.text
    assert "bias='lora_only' trains nothing: a llama model has no biases" in caplog.text
