# SPDX-License-Identifier: Apache-2.0
"""torch.amp.GradScaler and ours, driven by the same scripts: same scales, growth trackers, skips, errors and state."""

import copy
import pickle
import random
import subprocess
import tempfile

import pytest
import qlorapp
import torch

INF = float("inf")
KINDS = {
    "f": lambda: [torch.tensor([1.5, -3.0])],
    "i": lambda: [torch.tensor([1.5, INF])],
    "n": lambda: [torch.tensor([float("nan"), 1.0])],
    "b": lambda: [torch.tensor([1.0]), torch.tensor([-INF], dtype=torch.bfloat16)],
    "u": lambda: [None, torch.tensor([0.1])],
    "h": lambda: [torch.tensor([1.0], dtype=torch.float16)],
    "e": lambda: [],
}


class Parameter(torch.Tensor):
    """A tensor whose .grad may have any dtype, which is all that GradScaler asks of a parameter."""

    grad = None


class Optimizer:
    """The least that GradScaler asks of an optimizer."""

    def __init__(self):
        self.parameters = [torch.zeros(1).as_subclass(Parameter) for _ in range(2)]
        self.param_groups = [{"params": self.parameters}]
        self.stepped = False

    def fill(self, kind):
        gradients = KINDS[kind]()
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            parameter.grad = gradient
        return gradients

    def step(self):
        self.stepped = True


class TorchPlayer:
    def __init__(self):
        self.scaler, self.optimizers, self.saved = None, [Optimizer(), Optimizer()], {}
        self.half = torch.tensor(0.5)

    def play(self, line):
        verb, *words = line.split()
        try:
            outcome = self.act(verb, words)
        except (AssertionError, RuntimeError, ValueError) as error:
            outcome = f"{type(error).__name__} {error}"
        if self.scaler is None:
            return f"{outcome} - -"
        return f"{outcome} {self.scaler.get_scale():.17g} {self.scaler._get_growth_tracker()}"

    def act(self, verb, words):
        if verb == "new":
            self.scaler, self.saved = None, {}
            init, growth, backoff, interval, enabled = words
            self.scaler = torch.amp.GradScaler("cpu", float(init), float(growth), float(backoff), int(interval), enabled == "1")
            return "ok"
        scaler = self.scaler
        if scaler is None:
            return "no scaler"
        if verb == "scale":
            return f"{scaler.scale(self.half).item():.17g}"
        if verb in ("unscale", "step"):
            optimizer = self.optimizers[int(words[0])]
            gradients = optimizer.fill(words[1])
            if verb == "unscale":
                scaler.unscale_(optimizer)
                return f"{gradients[-1][0].item():.17g}" if gradients else "none"
            optimizer.stepped = False
            scaler.step(optimizer)
            return "stepped" if optimizer.stepped else "skipped"
        value = float(words[0]) if words else 0.0
        calls = {
            "update": lambda: scaler.update(),
            "set": lambda: scaler.update(value),
            "set_tensor": lambda: scaler.update(torch.tensor(value)),
            "growth": lambda: scaler.set_growth_factor(value),
            "backoff": lambda: scaler.set_backoff_factor(value),
            "interval": lambda: scaler.set_growth_interval(int(value)),
            "save": lambda: setattr(self, "saved", scaler.state_dict()),
            "load": lambda: scaler.load_state_dict(self.saved),
            "load_empty": lambda: scaler.load_state_dict({}),
        }
        calls[verb]()
        return "ok"


def compare(build_dir, lines):
    probe = build_dir / "tests" / "train" / "grad_scaler_probe"
    assert probe.exists(), "build the target grad_scaler_probe first"
    with tempfile.TemporaryFile("w+") as script, tempfile.TemporaryFile("w+") as printed:
        script.write("\n".join(lines) + "\n")
        script.seek(0)
        with subprocess.Popen([probe], stdin=script, stdout=printed, text=True) as process:  # while torch plays here
            player = TorchPlayer()
            theirs = [player.play(line) for line in lines]
        assert process.returncode == 0
        printed.seek(0)
        mine = printed.read().splitlines()
    assert len(mine) == len(theirs)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            start = max(i for i in range(index + 1) if lines[i].startswith("new"))
            script = "\n".join(lines[start : index + 1])
            pytest.fail(f"after\n{script}\nours   {a}\ntorch  {b}")


def sequence(rng):
    """One scaler's life: optimizer steps with random overflows, now and then a call out of order."""
    new = (
        f"new {rng.choice([65536.0, 4.0, 1.0, 1e38, 3e-39])!r} {rng.choice([2.0, 16.0, 1.5])!r} "
        f"{rng.choice([0.5, 0.25, 0.1])!r} {rng.choice([1, 2, 3, 2000])} {int(rng.random() < 0.95)}"
    )
    if rng.random() < 0.02:
        new = f"new 8.0 {rng.choice([1.0, 0.5, 2.0])!r} {rng.choice([1.0, 2.0])!r} 2 1"
    lines = [new]
    for _ in range(rng.randint(1, 4)):
        kind = rng.choices("finbueh", weights=[60, 15, 6, 6, 6, 2, 2])[0]
        cycle = ["scale", f"step 0 {kind}", "update"]
        if rng.random() < 0.25:
            cycle.insert(1, f"unscale 0 {kind}")
        if rng.random() < 0.15:
            cycle.insert(-1, f"step 1 {rng.choice('fin')}")
        if rng.random() < 0.2:
            odd = rng.choice(
                ["scale", "unscale 0 f", "unscale 1 i", "step 0 f", "step 1 f", "update", "set 32.0", "set_tensor 0.125",
                 "growth 4.0", "backoff 0.75", "interval 1", "save", "load", "load_empty"]
            )  # fmt: skip
            cycle.insert(rng.randint(0, len(cycle)), odd)
        if rng.random() < 0.05:
            cycle.pop(rng.randrange(len(cycle)))
        lines += cycle
    return lines


def test_the_trace_is_torchs_over_random_sequences(build_dir, thorough):
    rng = random.Random(20240607)
    torch.set_num_threads(1)
    compare(build_dir, [line for _ in range(100_000 if thorough else 10_000) for line in sequence(rng)])


def test_long_runs_reach_zero_infinity_and_the_default_interval(build_dir):
    cycle = ["scale", "step 0 {}", "update"]
    down = ["new 65536.0 2.0 0.5 2000 1"] + [c.format("i") for _ in range(200) for c in cycle] + ["scale", "step 0 f"]
    up = ["new 65536.0 2.0 0.5 1 1"] + [c.format("f") for _ in range(140) for c in cycle]
    steady = ["new 65536.0 2.0 0.5 2000 1"] + [c.format("f") for _ in range(4001) for c in cycle]
    compare(build_dir, down + up + steady)


def test_a_state_of_ours_continues_in_torch_and_back(build_dir):
    lines = ["new 8.0 2.0 0.5 3 1", "scale", "step 0 f", "update", "save", "scale", "step 0 i", "update", "load", "scale",
             "step 0 f", "update", "step 0 f", "scale", "update", "scale", "new 2.0 2.0 0.5 3 1", "load", "load_empty"]  # fmt: skip
    compare(build_dir, lines)


def enabled(**options):
    return qlorapp.GradScaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, **options)


def one_step(scaler, kind="f"):
    """An optimizer step whose gradients are finite or not."""
    optimizer = Optimizer()
    scaler.scale(torch.tensor(1.0))
    optimizer.fill(kind)
    scaler.step(optimizer)
    scaler.update()


COPIES = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_goes_on_where_the_original_stands_and_shares_nothing(how, used):
    """As torch's own test of pickling has it (test_torch.py, test_pickle_gradscaler), and beyond it."""
    ours, theirs = enabled(), torch.amp.GradScaler("cpu", 3.0, 4.0, 0.5, 2)
    for scaler in (ours, theirs) if used else ():
        one_step(scaler)
    mine, other = COPIES[how](ours), copy.deepcopy(theirs)
    assert (
        type(mine) is qlorapp.GradScaler and mine.is_enabled() and mine.state_dict() == other.state_dict() == ours.state_dict()
    )
    assert (mine.get_growth_factor(), mine.get_backoff_factor(), mine.get_growth_interval()) == (4.0, 0.5, 2)
    assert mine.scale(torch.tensor([4.0])).item() == other.scale(torch.tensor([4.0])).item() == 12.0
    before = ours.state_dict()
    for kind in "fif":
        one_step(mine, kind)
        one_step(other, kind)
        assert mine.state_dict() == other.state_dict()
    mine.update(7.0)
    assert ours.state_dict() == before and mine.get_scale() == 7.0
    one_step(ours, "i")
    assert mine.get_scale() == 7.0


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_our_own_options_a_changed_factor_and_what_a_subclass_added(how):
    scaler = enabled(min_scale=2.0, max_consecutive_skips=3)
    scaler.set_growth_factor(0.9)  # torch lets it be set, and so do we
    scaler.of_my_own = [1]
    for _ in range(2):
        one_step(scaler, "i")
    mine = COPIES[how](scaler)
    assert mine.get_growth_factor() == 0.9 and mine.get_scale() == 2.0 and mine.of_my_own == [1]
    with pytest.raises(RuntimeError, match="3 optimizer steps in a row found infinite or NaN gradients"):
        one_step(mine, "i")  # the third: those before the copy count


@pytest.mark.parametrize("how", COPIES)
def test_a_disabled_scaler_is_copied_without_a_word(how, recwarn, caplog):
    scaler = qlorapp.GradScaler("cuda", enabled=False, growth_interval=5)
    mine = COPIES[how](scaler)
    assert not mine.is_enabled() and mine.get_scale() == 1.0 and mine.state_dict() == {} and mine.get_growth_interval() == 5
    assert not caplog.records and not recwarn.list


@pytest.mark.parametrize("how", COPIES)
def test_a_scaler_within_a_step_is_not_copied_and_the_words_are_torchs(how):
    ours, theirs = enabled(), torch.amp.GradScaler("cpu")
    for scaler in (ours, theirs):
        optimizer = Optimizer()
        scaler.scale(torch.tensor(1.0))
        optimizer.fill("f")
        scaler.unscale_(optimizer)
    said = []
    for scaler in (ours, theirs):
        with pytest.raises(AssertionError) as error:
            COPIES["deepcopy" if scaler is theirs else how](scaler)
        said.append(str(error.value))
    assert said[0] == said[1]
