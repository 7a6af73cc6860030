# SPDX-License-Identifier: Apache-2.0
"""find_max_batch_size: its answer fits, nothing stays behind, and on a CPU it ends soon."""

import re
import sys

import pytest
import qlorapp as package
import torch
from test_plan import here, loaded  # noqa: F401  (a fixture)


def test_the_largest_batch_fits_its_budget_and_leaves_nothing_behind(here, capsys):
    model = loaded(here)
    before = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    state = torch.get_rng_state()
    budget = package.plan(model, batch=11, max_seq_length=48).peak_reserved + 2000
    best = package.find_max_batch_size(model, None, max_seq_length=48, budget=budget)
    assert best == 11
    assert capsys.readouterr().out == "Batch size 11: OK\n\nMaximum batch size: 11\n"
    after = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in after if parameter.grad is not None)
    assert torch.equal(state, torch.get_rng_state())
    assert package.find_max_batch_size(model, max_seq_length=48, budget=budget, largest=4) == 4


def test_the_largest_batch_on_a_cpu_is_bounded_in_rows_and_in_time(here, capsys, monkeypatch):
    model = loaded(here)
    assert package.find_max_batch_size(model, max_seq_length=1024) <= 16
    capsys.readouterr()
    memory = sys.modules[package.find_max_batch_size.__module__]
    monkeypatch.setattr(memory, "_NOTICED", 0.0)
    monkeypatch.setattr(memory, "_LONGEST_STEP", 0.0)
    monkeypatch.setattr(memory, "_fits", lambda *_: pytest.fail("a step was taken"))
    assert package.find_max_batch_size(model, max_seq_length=64, budget="1GiB", largest=8) == 8
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Batch size 8 fits by plan; a step takes about \d+ s: not checked", said[0])
    assert said[1:] == ["Batch size 8: OK by plan", "", "Maximum batch size: 8"]


def test_a_budget_that_nothing_fits_says_what_is_missing(here):
    model = loaded(here)
    with pytest.raises(
        MemoryError,
        match=r"One row of 64 tokens needs [\d.]+ .iB; 64.0 KiB are available: [\d.]+ .iB are missing. Ways out: rows of 32.*rank 4",
    ):
        package.find_max_batch_size(model, max_seq_length=64, budget="64KiB")
    with pytest.raises(ValueError, match="budget"):
        package.find_max_batch_size(model, budget="plenty")
    with pytest.raises(ValueError, match="length"):
        package.find_max_batch_size(model, max_seq_length=1, budget="1GiB")
