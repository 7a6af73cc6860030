# SPDX-License-Identifier: Apache-2.0
"""A bitsandbytes checkpoint, byte for byte."""

import json
import subprocess

import bitsandbytes.functional as bnb
import pytest
import safetensors.torch
import torch


def quant_states(build_dir, folder) -> dict:
    result = subprocess.run(
        [build_dir / "tests/format/format_probe", "quant-state", folder], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_quant_states_of_bitsandbytes_are_read_and_written_to_the_same_bytes(build_dir, tmp_path, quant_type, double_quant):
    torch.manual_seed(0)
    tensors, expected = {}, {}
    cases = [
        ((64, 128), 64, torch.bfloat16),
        ((33, 70), 64, torch.float16),
        ((5, 7), 32, torch.float32),
        ((1, 1), 4096, torch.float32),
        ((128, 512), 128, torch.bfloat16),
    ]
    for i, (shape, blocksize, dtype) in enumerate(cases):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        packed, state = bnb.quantize_4bit(
            torch.randn(shape, dtype=dtype), blocksize=blocksize, compress_statistics=double_quant, quant_type=quant_type
        )
        parts = {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        tensors |= parts
        text = bytes(parts[f"{name}.quant_state.bitsandbytes__{quant_type}"].tolist()).decode()
        kinds = {torch.uint8: "U8", torch.float32: "F32"}
        expected[name] = {
            "json": text,
            "tensors": {key: [kinds[value.dtype], list(value.shape)] for key, value in parts.items()},
        }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert quant_states(build_dir, tmp_path) == expected


def test_one_scale_short_is_refused_where_bitsandbytes_reads_on(build_dir, tmp_path):
    packed, state = bnb.quantize_4bit(torch.randn(64, 128), compress_statistics=False, quant_type="nf4")
    tensors = {"w.weight": packed} | {f"w.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    tensors["w.weight.absmax"] = tensors["w.weight.absmax"][:-1].clone()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    result = subprocess.run(
        [build_dir / "tests/format/format_probe", "quant-state", tmp_path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "'w.weight.absmax' must be F32 [128]" in result.stderr
