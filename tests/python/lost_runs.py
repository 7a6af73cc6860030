# SPDX-License-Identifier: Apache-2.0
"""A tiny model and rows to train on, for the tests of work that must not be lost."""

import peer
import pytest

STEPS = 6
BASE = {
    "--max_steps": STEPS, "--save_steps": 2, "--per_device_train_batch_size": 2, "--gradient_accumulation_steps": 2, "--r": 4,
    "--learning_rate": 1e-2, "--defaults": "trainer",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    peer.write_llama(folder / "model", num_hidden_layers=1)
    peer.write_rows(folder / "rows.jsonl", 21)
    return folder


@pytest.fixture(scope="module")
def whole(root):
    peer.run_cli(*train(root, root / "whole"))
    return root / "whole"


def train(root, out, **options):
    given = {f"--{name}": value for name, value in options.items()}
    values = {"--model": root / "model", "--data": root / "rows.jsonl", "--output": out, **BASE, **given}
    return ["train", *(word for pair in values.items() for word in pair)]


def refused(*words):
    """The one line of a command that was not carried out."""
    result = peer.run_cli(*words, check=False)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def damage(checkpoint, file, harm):
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "zero":
        content[:] = bytes(len(content))
    elif harm == "other step":
        content = (checkpoint.parent / "checkpoint-4" / file).read_bytes()
    path.unlink() if harm == "remove" else path.write_bytes(content)
