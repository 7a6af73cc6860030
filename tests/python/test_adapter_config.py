# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json, byte for byte PEFT's."""

import json
import subprocess

import peft
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig


def rewritten(build_dir, folder):
    (folder / "ours").mkdir(exist_ok=True)
    result = subprocess.run(
        [build_dir / "tests/format/format_probe", "adapter-config", folder, folder / "ours"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "ours" / "adapter_config.json"


def with_sorted_targets(text: str) -> str:
    """PEFT writes a set in the order of its hashes; ours is sorted."""
    config = json.loads(text)
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    return json.dumps(config, indent=2, sort_keys=True)


def test_every_key_that_peft_writes_is_written_and_no_other(build_dir, tmp_path):
    LoraConfig(task_type="CAUSAL_LM").save_pretrained(tmp_path)
    theirs = (tmp_path / "adapter_config.json").read_text()
    theirs = theirs.replace(
        f'"peft_version": "{peft.__version__}"', '"peft_version": "0.21.2"'
    )  # ours names the one whose keys it knows
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "task_type": "CAUSAL_LM"}')
    assert rewritten(build_dir, tmp_path).read_text() == theirs


module = st.text(st.sampled_from('qkvo_projéΩ.\\"0'), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    r=st.integers(1, 65536),
    lora_alpha=st.one_of(st.integers(1, 10**6), st.floats(0.001, 10**6).filter(lambda x: x != int(x))),
    lora_dropout=st.floats(0, 0.999),
    use_rslora=st.booleans(),
    target_modules=st.one_of(
        st.none(), st.just("all-linear"), st.lists(module, min_size=1, max_size=5, unique=True), st.just(r".*\.(q|v)_proj")
    ),
    rank_pattern=st.dictionaries(module, st.integers(1, 64), max_size=3),
    alpha_pattern=st.dictionaries(module, st.one_of(st.integers(1, 64), st.just(0.5)), max_size=3),
    init_lora_weights=st.sampled_from([True, False, "gaussian", "orthogonal"]),
    bias=st.sampled_from(["none", "all", "lora_only"]),
    use_dora=st.booleans(),
    modules_to_save=st.sampled_from([None, ["lm_head"], ["embed_tokens", "lm_head"]]),
    ensure_weight_tying=st.booleans(),
    base_model_name_or_path=st.one_of(st.none(), st.text(st.characters(exclude_categories=("Cs",)), max_size=12)),
    task_type=st.sampled_from([None, "CAUSAL_LM"]),
    inference_mode=st.booleans(),
)
def test_any_config_is_written_to_the_bytes_of_peft(build_dir, tmp_path, r, init_lora_weights, **values):
    config = LoraConfig(
        r=r - r % 2 + 2 if init_lora_weights == "orthogonal" and r < 65536 else r, init_lora_weights=init_lora_weights, **values
    )
    config.save_pretrained(tmp_path)
    ours = rewritten(build_dir, tmp_path)
    assert ours.read_text() == with_sorted_targets((tmp_path / "adapter_config.json").read_text())
    loaded = PeftConfig.from_pretrained(ours.parent)
    assert (
        loaded.r == config.r and loaded.target_modules == config.target_modules and loaded.alpha_pattern == config.alpha_pattern
    )


@pytest.mark.parametrize(
    "change",
    [
        {"r": -1},
        {"r": 10**9},
        {"lora_alpha": float("nan")},
        {"lora_bias": True},
        {"init_lora_weights": "pissa"},
        {"fan_in_fan_out": True},
    ],
)
def test_what_peft_writes_and_we_cannot_honour_is_refused(build_dir, tmp_path, change):
    LoraConfig().save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = subprocess.run(
        [build_dir / "tests/format/format_probe", "adapter-config", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert str(path) in result.stderr
