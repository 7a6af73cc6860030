#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs PEFT's LoRA tests over this library's models and over transformers', and compares the results.

PYTHONPATH=build/dev/python python scripts/originals.py [--four_bit] [pytest's arguments]

PEFT's sdist contains its tests; transformers' and TRL's contain none of their trainers' tests. pip downloads the sdist of the installed version.
The script makes the hub checkpoints of the tests with random weights, so it needs no network except pip's index. Exits 1 if less than 97 % of
the tests that pass with transformers pass.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

CONFTEST = '''
import os, pathlib, sys, types
import torch, transformers

# a helper of the tests names a class of it, for other models
sys.modules.setdefault("diffusers", types.SimpleNamespace(StableDiffusionPipeline=type("StableDiffusionPipeline", (), {})))

HERE = pathlib.Path(__file__).parent
OURS, FOUR_BIT = os.environ["ORIGINALS_OURS"] == "1", os.environ["ORIGINALS_FOUR_BIT"] == "1"
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000, max_position_embeddings=512)
MADE = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(intermediate_size=64, num_key_value_heads=4, **SMALL),
    "qwen2": lambda: transformers.Qwen2Config(intermediate_size=64, num_key_value_heads=2, **SMALL),
    "OPTForCausalLM": lambda: transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=1000, n_positions=512),
    "GPTJForCausalLM": lambda: transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=1000, n_positions=512),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(intermediate_size=64, num_key_value_heads=2, head_dim=8, **SMALL),
}


def folder_of(name):
    """The hub's name of a checkpoint as a folder here."""
    name = str(name)
    kind = next((kind for kind in MADE if kind in name), None)
    if kind is None or os.path.isdir(name):
        return name
    folder = HERE / "checkpoints" / kind
    if not folder.is_dir():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(MADE[kind]()).save_pretrained(folder)
    return str(folder)


theirs = transformers.AutoModelForCausalLM.from_pretrained
if OURS:
    import qlorapp

    def load(name, *args, **options):
        if FOUR_BIT:
            options.setdefault("quantization_config", transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
        return qlorapp.AutoModelForCausalLM.from_pretrained(folder_of(name), *args, **options)
else:
    def load(name, *args, **options):
        return theirs(folder_of(name), *args, **options)

transformers.AutoModelForCausalLM.from_pretrained = load
'''


def unpacked(folder: pathlib.Path) -> pathlib.Path:
    """PEFT's tests, as a package."""
    version = importlib.metadata.version("peft")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "peft", "-d", folder, f"peft=={version}"],
        check=True,
    )
    with tarfile.open(next(folder.glob("peft-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"peft-{version}" / "tests"


def run(tests: pathlib.Path, ours: bool, four_bit: bool, arguments: list[str]) -> dict[str, str]:
    """{test: passed, failed or skipped}"""
    package = importlib.util.find_spec("qlorapp")
    assert package is not None and package.origin is not None, "qlorapp is not installed: PYTHONPATH=build/dev/python"
    environment = {
        **os.environ,
        "ORIGINALS_OURS": str(int(ours)),
        "ORIGINALS_FOUR_BIT": str(int(four_bit)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(pathlib.Path(os.path.abspath(package.origin)).parents[1]),
    }
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "-o", "addopts=", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "-k", "lora or Lora",
               "tests/test_decoder_models.py", "tests/test_config.py", *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^(PASSED|FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", done.stdout, re.M)
    if not found:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return {name: result for result, name in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--four_bit", action="store_true", help="load our models with four-bit linear layers")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = unpacked(pathlib.Path(folder))
        (tests / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        (tests / "__init__.py").touch()
        theirs = run(tests, False, False, arguments)
        ours = run(tests, True, options.four_bit, arguments)
    wanted = sorted(name for name, result in theirs.items() if result == "PASSED")
    lost = [name for name in wanted if ours.get(name) != "PASSED"]
    for name in lost:
        print("not passed:", name)
    share = 1 - len(lost) / len(wanted)
    print(
        f"PEFT {importlib.metadata.version('peft')}: {len(wanted) - len(lost)} of {len(wanted)} tests that pass with transformers pass ({100 * share:.1f} %)"
    )
    return int(share < 0.97)


if __name__ == "__main__":
    sys.exit(main())
