# SPDX-License-Identifier: Apache-2.0
"""The qlorapp program, and checkpoints that it does something with in half a second."""

import json
import os
import pathlib
import subprocess

import command_server
import conftest
import torch
from test_tokenizer import llama3_like
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = [{"prompt": f"What is {i} + {i}?", "completion": f" It is {2 * i}."} for i in range(6)]


def qlorapp(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The program with its output piped, on two threads."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    if options.keys() <= {"cwd"}:
        return command_server.run(*arguments, env=env, timeout=120, **options)
    command = [str(conftest.BUILD / "qlorapp"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env, **options)


def write_model(folder: pathlib.Path, hidden_size: int = 64, **options) -> pathlib.Path:
    """A Llama of two layers in several shards, as transformers writes it, with a byte-level tokenizer."""
    tokenizer = llama3_like(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden_size, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=tokenizer.token_to_id("<|begin_of_text|>"), eos_token_id=tokenizer.token_to_id("<|eot_id|>"), **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")
    return folder


def write_rows(path: pathlib.Path, rows: list = ROWS) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
