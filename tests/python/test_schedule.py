# SPDX-License-Identifier: Apache-2.0
"""Learning rates and step counts, equal doubles with transformers."""

import json
import random
import subprocess
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")


SCHEDULES = [
    ("linear", None),
    ("cosine", None),
    ("cosine", {"num_cycles": 1.25}),
    ("constant", None),
    ("constant_with_warmup", None),
    ("cosine_with_restarts", None),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", None),
    ("polynomial", {"lr_end": 1e-6, "power": 2.5}),
    ("inverse_sqrt", None),
    ("inverse_sqrt", {"timescale": 2000}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", {"min_lr": 1e-5, "num_cycles": 0.75}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.05}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 3, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt", "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
]


def ours(build_dir, lines):
    probe = build_dir / "tests" / "train" / "schedule_probe"
    assert probe.exists(), "build the target schedule_probe first"
    done = subprocess.run([probe], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def test_every_rate_is_transformers_rate(build_dir):
    rng = random.Random(3)
    cases = [
        ("linear", 2, 10, 1.0, None),
        ("cosine", 0, 1, 5e-5, None),
        ("linear", 0, 0, 1.0, None),
        ("cosine", 10, 5, 1.0, None),
    ]
    for kind, kwargs in SCHEDULES:
        for _ in range(25):
            total = rng.choice([2, 7, 60, 333, 1000])
            warmup = rng.randint(0, total - 1)
            cases.append((kind, warmup, total, rng.choice([5e-5, 2e-4, 1e-3, 0.3, rng.random() + 1e-3]), kwargs))
    lines = [
        f"{kind} {warmup} {total} {base!r} {total + 3} {json.dumps(kwargs)}" for kind, warmup, total, base, kwargs in cases
    ]
    for case, printed in zip(cases, ours(build_dir, lines), strict=True):
        kind, warmup, total, base, kwargs = case
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
        scheduler = transformers.get_scheduler(
            kind, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs
        )
        expected = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scheduler.step() without optimizer.step()
            for _ in range(total + 3):
                expected.append(scheduler.get_last_lr()[0])
                scheduler.step()
        assert [float.fromhex(x) for x in printed.split()] == expected, case


def test_the_first_step_has_rate_0_and_the_warm_up_ends_on_the_base(build_dir):
    (line,) = ours(build_dir, ["linear 2 10 1.0 4"])
    assert [float.fromhex(x) for x in line.split()] == [0.0, 0.5, 1.0, 0.875]


def test_warm_up_steps_follow_transformers(build_dir, tmp_path):
    cases = [(0, 10), (0.03, 100), (0.03, 101), (0.5, 7), (1, 10), (1.9, 10), (5, 3), (100.0, 1000), (0.1, 30), (0.999, 1000)]
    printed = ours(build_dir, [f"warmup_steps {steps!r} 0.0 {total}" for steps, total in cases])
    for (steps, total), mine in zip(cases, printed, strict=True):
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=steps, use_cpu=True, report_to="none")
        assert int(mine) == arguments.get_warmup_steps(total), (steps, total)


def test_warm_up_ratio_is_used_only_without_warm_up_steps(build_dir):
    lines = ["warmup_steps 0 0.03 101", "warmup_steps 5 0.5 100", "warmup_steps 0.1 0.5 100", "warmup_steps 0 0 100"]
    assert ours(build_dir, lines) == ["4", "5", "10", "0"]


def test_intervals_below_1_are_shares(build_dir):
    lines = ["interval_steps 500 0 10", "interval_steps 0.1 0 101", "interval_steps 1 0 10"]
    assert ours(build_dir, lines) == ["500", "11", "1"]


def test_training_steps_follow_the_trainer(build_dir, tmp_path):
    """The Trainer's own count, through its method, for windows that end full, partial and within the first."""
    cases = [
        (10, 4, 3.0, -1),
        (12, 4, 3.0, -1),
        (3, 8, 1.0, -1),
        (10, 3, 0.5, -1),
        (10, 4, 2.5, -1),
        (10, 4, 3.0, 7),
        (1, 1, 0.1, -1),
    ]
    printed = ours(build_dir, [f"training_steps {m} {a} {e!r} {s}" for m, a, e, s in cases])
    model = torch.nn.Linear(1, 1)
    for (micro_batches, accumulation, epochs, max_steps), mine in zip(cases, printed, strict=True):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=1, num_train_epochs=epochs,
            gradient_accumulation_steps=accumulation, max_steps=max_steps,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=[{"x": 0}] * micro_batches)
        loader = torch.utils.data.DataLoader([0] * micro_batches, batch_size=1)
        values = trainer.set_initial_training_values(arguments, loader)
        assert int(mine) == values[-1], (micro_batches, accumulation, epochs, max_steps, values)
