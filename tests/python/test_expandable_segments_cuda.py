# SPDX-License-Identifier: Apache-2.0
"""torch's CUDA allocator under the library: expandable segments, unless the user or the program has set it up; and plans know which."""

import os
import subprocess
import sys

import conftest
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Segments of before the first use stay; what follows is mapped.
PROGRAM = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
import torch
before = torch.ones(3 << 20, device="cuda")
exec(sys.argv[2])
import qlorapp
weight = torch.randn(256, 256, device="cuda")
torch.ops.qlorapp.quantize_4bit(weight)
torch.ops.qlorapp.quantize_4bit(weight)
after = torch.ones(64 << 20, device="cuda")
kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot() if segment["total_size"] > 100 << 20}
print("kind", "expandable" if kinds == {True} else "fixed" if kinds == {False} else kinds)
print("kind", "intact" if bool((before == 1).all()) and bool((after == 1).all()) else "broken")
print("planned", qlorapp.plan("llama-3.2-1b", gpu="H200", batch=2, max_seq_length=2048).peak_reserved)
"""
DONE = "torch's CUDA allocator: expandable_segments:True is set; PYTORCH_ALLOC_CONF overrides"
LEFT = "torch's CUDA allocator: its settings are left as they are"


def run(own: str = "", **variables: str) -> tuple[list[str], int]:
    """What was logged of the allocator and what it did, and the bytes that a plan in that process says are held."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PROGRAM, str(conftest.BUILD / "python"), own]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    said = [line.removeprefix("kind ") for line in lines if line.startswith(("kind ", "torch's CUDA allocator"))]
    return said, next(int(line.split()[1]) for line in lines if line.startswith("planned "))


@pytest.fixture(scope="module")
def planned() -> dict[str, int]:
    """By the kind of segments, as the user's variable asks for them."""
    return {
        kind: run(PYTORCH_ALLOC_CONF=f"expandable_segments:{on}")[1] for kind, on in (("expandable", True), ("fixed", False))
    }


def test_the_first_use_of_a_gpu_sets_expandable_segments_and_logs_it_once(planned):
    said, held = run()
    if said[0].startswith(LEFT):
        pytest.skip(said[0])  # this GPU cannot map memory
    assert said == [DONE, "expandable", "intact"]
    assert held == planned["expandable"] < planned["fixed"]


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(
    ("value", "kind"), [("expandable_segments:False", "fixed"), ("", "fixed"), ("expandable_segments:True", "expandable")]
)
def test_a_users_variable_wins(planned, name, value, kind):
    said, held = run(**{name: value})
    assert said == [f"{LEFT} (PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set)", kind, "intact"]
    assert held == planned[kind]


def test_a_programs_own_settings_stay(planned):
    said, held = run('torch.cuda.memory._set_allocator_settings("max_split_size_mb:256")')
    assert said == [f"{LEFT} (the program has set some)", "fixed", "intact"]
    assert held == planned["fixed"]
