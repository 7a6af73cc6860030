# SPDX-License-Identifier: Apache-2.0
"""What a plan names beside its numbers: the dtype with its reason, ways of a comparison within a budget, a deadline's assumptions."""

import json

import pytest
import qlorapp as package
from conftest import ROOT
from tiny_run import qlorapp


@pytest.mark.parametrize(
    ("gpu", "asked", "dtype", "reason"),
    [
        ("T4", ["--bf16"], "float16", "float16: bfloat16 is requested, and sm_75 has no bfloat16 arithmetic"),
        ("T4", [], "float16", "float16: the checkpoint is bfloat16, and sm_75 has no bfloat16 arithmetic"),
        ("A10", [], "bfloat16", "bfloat16, the dtype of the checkpoint"),
        ("A10", ["--dtype", "float32"], "float32", "float32, as requested"),
        ("A10", ["--fp16"], "float16", "float16, as requested"),
    ],
)
def test_the_dtype_that_is_planned_is_named_with_its_reason(gpu, asked, dtype, reason):
    """As train chooses it: what is asked for, else the checkpoint's; float16 where the card has no bfloat16."""
    common = ["plan", "--model", "llama-3.2-1b", "--gpu", gpu, "--batch", 8, "--seq", 64]
    said = qlorapp(*common, *asked)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0].startswith("plan: ") and f" at most in {dtype}, in " in lines[0]
    assert lines[1] == f"The run computes in {reason}."
    explained = qlorapp(*common, "--explain", *asked)
    assert explained.stdout.splitlines()[0] == f"The run computes in {reason}."


def test_python_plans_in_the_dtype_of_the_command(caplog):
    with caplog.at_level("INFO", logger="qlorapp"):
        planned = package.plan("llama-3.2-1b", max_seq_length=64, gpu="T4")
    assert " at most in float16, in " in str(planned)
    assert (
        "plan: the run computes in float16: the checkpoint is bfloat16, and sm_75 has no bfloat16 arithmetic" in caplog.messages
    )
    assert " at most in float32, in " in str(package.plan("llama-3.2-1b", max_seq_length=64, gpu="T4", dtype="float32"))
    assert " at most in bfloat16, in " in str(package.plan("llama-3.2-1b", max_seq_length=64, gpu="A10"))


def test_a_comparison_plans_the_same_dtype_and_takes_a_budget():
    compared = qlorapp(
        "plan", "--model", "llama-3.2-1b", "--seq", 256, "--compare", "T4:2x4,A10:8x1", "--memory_budget", "4GiB"
    )
    assert compared.returncode == 0, compared.stderr
    rows = [line for line in compared.stdout.splitlines() if line.startswith("  T4, 2 x 4") or line.startswith("  A10, 8 x 1")]
    assert "float16" in rows[0].split() and "bfloat16" in rows[1].split()
    assert "with the settings that memory_budget chooses in 4.00 GiB:" in compared.stdout


def test_a_deadline_lists_what_it_assumes():
    said = qlorapp(
        "plan", "--model", "llama-3.2-1b", "--gpu", "A10", "--hours", 1, "--dataset_rows", 1000, "--avg_tokens", 100, "--seq", 256, "--r", 8
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assumed = said.stdout.partition("Assumed:\n")[2]
    for wanted in (
        "1000 rows",
        "100 tokens each",
        "without padding",
        "3 of 3 epochs",
        "60 TFLOP/s",
        "saving",
        "Quality is not estimated: rank 8",
    ):
        assert wanted in assumed, wanted


def test_an_amount_of_memory_is_planned_by_the_defaults_too():
    said = qlorapp("plan", "--model", "llama-3.2-1b", "--gpu", "24GiB")
    assert said.returncode == 0 and "memory_budget 23.5 GiB" in said.stdout and " fits" in said.stdout, said.stderr


@pytest.mark.parametrize("words", [[], ["--explain"], ["--seq", "512"]], ids=str)
def test_a_model_that_does_not_fit_is_planned_all_the_same(words):
    said = qlorapp("plan", "--model", "llama-3.2-3b", "--gpu", "2GiB", *words)
    assert "are not enough" in said.stdout and said.returncode == (0 if words == ["--explain"] else 3), said.stderr
    assert ("prepare_model_for_kbit_training" if words == ["--explain"] else "does not fit") in said.stdout
    asked = qlorapp("plan", "--model", "llama-3.2-3b", "--gpu", "T4", "--memory_budget", "1GiB")
    assert asked.returncode == 2 and "are not enough" in asked.stderr


@pytest.mark.parametrize("weights", [None, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"])
def test_a_folder_without_its_weights_is_planned_by_its_config(tmp_path, weights):
    (tmp_path / "config.json").write_text((ROOT / "examples/data/tiny-llama/config.json").read_text())
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if weights is not None:
        (tmp_path / "model-00001-of-00001.safetensors").write_text(weights)
    said = qlorapp("plan", "--model", tmp_path, "--gpu", "T4")
    assert said.returncode == 0 and "fits" in said.stdout, said.stderr
