# SPDX-License-Identifier: Apache-2.0
"""Memory runs out in a step or an evaluation that Python computes: it is taken again in parts, and nothing of the run changes."""

import logging
import weakref

import numpy as np
import pytest
import qlorapp
import test_foreign_trainer
import torch
from qlorapp.out_of_memory import InParts, Work, is_out_of_memory, parts_of, rows_in
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import adapters, losses, rows, trained
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding

WORDS = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Failing(TorchDispatchMode):
    """Torch's operations, one of which finds no memory."""

    def __init__(self, at=0):
        super().__init__()
        self.at, self.count, self.failures = at, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            self.failures += 1
            raise torch.OutOfMemoryError(WORDS)
        return func(*args, **(kwargs or {}))


class Small:
    """A device that holds no more than so many rows."""

    most, tried = 0, ()

    def check(self, inputs):
        if not torch.is_grad_enabled() and self.model.training:
            return  # a question, and of one row
        self.tried = (*self.tried, len(inputs["input_ids"]))
        if self.most and len(inputs["input_ids"]) > self.most:
            raise torch.OutOfMemoryError(WORDS)


class InPython(qlorapp.Trainer):
    """Forward and backward run through a mode that fails at some operation."""

    mode = Failing()

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self.mode:
            return super().training_step(model, inputs, num_items_in_batch)


class Tight(qlorapp.Trainer, Small):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.check(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def same(run, other, bound=1e-6):
    assert losses(run) == pytest.approx(losses(other), rel=bound)
    norm = sum(value.square().sum() for value in adapters(other).values()).sqrt()
    apart = sum((value - adapters(run)[name]).square().sum() for name, value in adapters(other).items()).sqrt()
    assert apart <= 30 * bound * norm  # the first steps of AdamW go by signs, those of gradients next to zero included
    for a, b in zip(run.state.log_history, other.state.log_history, strict=True):
        assert a.get("learning_rate") == b.get("learning_rate") and a["step"] == b["step"]


#: One step of three micro-batches; the masks stay what they were.
SHORT = {"lora": {"lora_dropout": 0.25}, "max_steps": 1}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "fp16": True}], ids=str)
def test_a_failure_at_any_operation_of_a_step_changes_nothing(folder, tmp_path, monkeypatch, caplog, options):
    counted = Failing()
    monkeypatch.setattr(InPython, "mode", counted)
    plain = trained(folder, tmp_path, InPython, **SHORT, **options)
    assert counted.count > 300
    caplog.set_level(logging.INFO, "qlorapp")
    for at in range(1, counted.count, counted.count // 6):
        failing = Failing(at)
        monkeypatch.setattr(InPython, "mode", failing)
        caplog.clear()
        run = trained(folder, tmp_path, InPython, **SHORT, **options)
        assert failing.failures == 1, at
        same(run, plain)
        said = [record.getMessage() for record in caplog.records]
        assert [line for line in said if "out of memory" in line] == [
            f"[trainer] out of memory with 4 rows at once ({WORDS}). From here on batches are taken in parts of at most 2; the effective batch "
            "and the weights of targets stay what they were."
        ]
        plans = [line.rpartition(" for ")[2] for line in said if line.startswith("plan: ")]
        assert len(plans) == 2 and plans[1].startswith("2 x ")  # the first is the start's


@pytest.mark.parametrize(("most", "tried"), [(3, (4, 2, 2)), (1, (4, 2, 1, 1))])
def test_parts_become_small_enough_and_stay_so(folder, tmp_path, monkeypatch, most, tried):
    plain = trained(folder, tmp_path, Tight, lora={"lora_dropout": 0.25}, max_steps=2)
    monkeypatch.setattr(Tight, "most", most)
    run = trained(folder, tmp_path, Tight, lora={"lora_dropout": 0.25}, max_steps=2)
    same(run, plain)
    assert run.tried[: len(tried)] == tried
    assert set(run.tried[-6:]) == {tried[-1]}


def test_a_foreign_model_takes_its_batches_in_parts(tmp_path, monkeypatch):
    phi = test_foreign_trainer.write(tmp_path / "phi")
    plain = test_foreign_trainer.ours(phi, tmp_path, Tight)
    monkeypatch.setattr(Tight, "most", 2)
    run = test_foreign_trainer.ours(phi, tmp_path, Tight)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    evaluated = [[e["eval_loss"] for e in r.state.log_history if "eval_loss" in e] for r in (run, plain)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5) and len(evaluated[0]) == 2


def test_logits_and_metrics_are_those_of_whole_batches(folder, tmp_path, monkeypatch):
    def metrics(prediction):
        return {
            "sum": np.abs(np.where(prediction.predictions == -100, 0, prediction.predictions)).sum(),
            "rows": len(prediction.label_ids),
        }

    def evaluated(most, **options):
        monkeypatch.setattr(Tight, "most", most)
        more = {"eval_dataset": rows(11, seed=4), "compute_metrics": metrics}
        run = trained(
            folder,
            tmp_path,
            Tight,
            more=more,
            max_steps=1,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=8,
            **options,
        )
        return run.evaluate(), run.predict(rows(11, seed=4))

    (whole, predicted), (parts, in_parts) = evaluated(0), evaluated(3)
    for key in ("eval_loss", "eval_loss_token_weighted", "eval_sum", "eval_rows"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-6), key
    assert in_parts.predictions.shape == predicted.predictions.shape
    assert np.allclose(in_parts.predictions, predicted.predictions, rtol=1e-5, atol=1e-5)
    assert (in_parts.label_ids == predicted.label_ids).all()


def mean_of_its_own(self, model, inputs, return_outputs=False):
    self.check(inputs)
    return qlorapp.Trainer.compute_loss(self, model, inputs, return_outputs)


def mean_in_spite_of_the_count(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return mean_of_its_own(self, model, inputs, return_outputs)


@pytest.mark.parametrize("loss", [mean_of_its_own, mean_in_spite_of_the_count])
def test_a_loss_that_is_no_sum_is_not_taken_apart(folder, tmp_path, monkeypatch, loss):
    kind = type("Mean", (Tight,), {"compute_loss": loss, "most": 2})
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(folder, tmp_path, kind, max_steps=1)
    assert str(error.value) == (
        "[trainer] out of memory with 4 rows at once. They cannot be taken in parts: compute_loss does not divide by num_items_in_batch. "
        f"Take per_device_train_batch_size=2 and gradient_accumulation_steps=6: the effective batch stays what it is. {WORDS}"
    )


def test_a_row_that_does_not_fit_says_what_would_help(folder, tmp_path, monkeypatch):
    class None_(Tight):
        def check(self, inputs):
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(qlorapp._C, "memory_for", lambda device: 1 << 18)
    pattern = (
        r"^\[trainer\] out of memory with one row at once\. One row of \d+ tokens takes .*B, and there are 256 KiB: .*B are missing\. "
        r"Ways out: rows of .*; rank .*; or memory_budget=auto"
    )
    with pytest.raises(torch.OutOfMemoryError, match=pattern) as error:
        trained(folder, tmp_path, type("Row", (qlorapp.Trainer,), {"training_step": lambda self, *a: None_.check(self, a)}),
                max_steps=1, per_device_train_batch_size=1)  # fmt: skip
    assert str(error.value).endswith(WORDS)


def test_a_row_of_an_own_loss_that_does_not_fit_says_so_too(folder, tmp_path):
    class Full(qlorapp.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            raise torch.OutOfMemoryError(WORDS)

    with pytest.raises(
        torch.OutOfMemoryError, match=r"with one row at once\. One row of \d+ tokens takes .*; rank .*; or memory_budget"
    ):
        trained(folder, tmp_path, Full, max_steps=1)


class Popping(Tight):
    """Its training_step takes entries out, and its optimizer has a parameter of its own."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.temperature = torch.nn.Parameter(torch.ones(()))
            self.optimizer = torch.optim.AdamW([*self._trainable(), self.temperature], lr=1e-2)
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs.pop("attention_mask")
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(
            model, {**inputs, "attention_mask": (inputs["input_ids"] != 0).long()}, return_outputs, num_items_in_batch
        )
        return loss * self.temperature


def test_what_overrides_change_is_taken_back(folder, tmp_path, monkeypatch):
    plain = trained(folder, tmp_path, Popping, max_steps=1)
    failing = type("Failing", (Popping,), {"seen": 0})

    def check(self, inputs):
        failing.seen += torch.is_grad_enabled()
        if failing.seen == 2 and len(inputs["input_ids"]) == 4:  # in the middle of a window
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(failing, "check", check)
    run = trained(folder, tmp_path, failing, max_steps=1)
    assert failing.seen > 3
    same(run, plain)
    assert run.temperature.item() == pytest.approx(plain.temperature.item(), rel=1e-6) and run.temperature.item() != 1


def test_clipping_that_finds_no_memory_is_part_of_the_window(folder, tmp_path, monkeypatch):
    options = {"max_steps": 1, "fp16": True, "max_grad_norm": 0.1}
    plain = trained(folder, tmp_path, InPython, **options)
    clip, calls = qlorapp.autograd_step._Window._clip, []

    def failing(self, optimizer):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError(WORDS)
        return clip(self, optimizer)

    monkeypatch.setattr(qlorapp.autograd_step._Window, "_clip", failing)
    same(trained(folder, tmp_path, InPython, **options), plain)
    assert len(calls) == 2


def evaluated(folder, tmp_path, most, preprocess, kind=Tight):
    seen = []
    more = {
        "eval_dataset": rows(11, seed=4),
        "compute_metrics": lambda p: seen.append(p) or {},
        "preprocess_logits_for_metrics": preprocess,
    }
    run = trained(folder, tmp_path, type("Some", (kind,), {"most": 0}), more=more, max_steps=1, per_device_train_batch_size=1,
                  per_device_eval_batch_size=8)  # fmt: skip
    type(run).most = most
    run.evaluate()
    run.evaluate()
    return seen[-1].predictions


@pytest.mark.parametrize(
    "preprocess",
    [lambda logits, labels: logits.argmax(-1), lambda logits, labels: logits.argmax(-1).numpy(),
     lambda logits, labels: {"best": logits.argmax(-1), "pair": (logits.amax(-1), labels)}],
    ids=["tensor", "array", "mapping"],
)  # fmt: skip
def test_preprocessed_logits_of_parts_are_joined(folder, tmp_path, caplog, preprocess):
    whole, parts = (evaluated(folder, tmp_path, most, preprocess) for most in (0, 3))

    def leaves(value):
        if isinstance(value, dict):
            value = list(value.values())
        return [leaf for entry in value for leaf in leaves(entry)] if isinstance(value, (list, tuple)) else [value]

    assert len(leaves(whole)) == len(leaves(parts))
    assert all(a.shape == b.shape and np.allclose(a, b, atol=1e-4) for a, b in zip(leaves(whole), leaves(parts), strict=True))
    said = [record.getMessage() for record in caplog.records if "[evaluate] out of memory" in record.getMessage()]
    assert len(said) == 2  # 8 → 4 → 2, and the second evaluation knows


def test_one_number_a_batch_cannot_be_joined(folder, tmp_path, caplog):
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"Tensor of shape \(\) has no entry for each of \d rows\. Lower per_device_eval_batch_size",
    ):
        evaluated(folder, tmp_path, 4, lambda logits, labels: logits.mean())
    said = [record.getMessage() for record in caplog.records if "[evaluate] out of memory" in record.getMessage()]
    assert len(said) == 1  # and not once more for each half


def test_what_a_callback_fails_with_is_its_own(folder, tmp_path):
    class Callback(qlorapp.TrainerCallback):
        calls = 0

        def on_substep_end(self, args, state, control, **kwargs):
            Callback.calls += 1
            raise torch.OutOfMemoryError("mine")

    with pytest.raises(torch.OutOfMemoryError, match="^mine$"):
        trained(folder, tmp_path, InPython, more={"callbacks": [Callback()]}, max_steps=1)
    assert Callback.calls == 1


def test_an_update_is_taken_once_more(folder, tmp_path, monkeypatch):
    plain = trained(folder, tmp_path, InPython, max_steps=2)
    calls = []
    step = qlorapp.autograd_step.ArenaAdamW.step

    def failing(self, closure=None):
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return step(self, closure)

    monkeypatch.setattr(qlorapp.autograd_step.ArenaAdamW, "step", failing)
    same(trained(folder, tmp_path, InPython, max_steps=2), plain, 0)
    assert len(calls) == 3


def test_which_batches_can_be_taken_apart():
    batch = BatchEncoding(
        {
            "input_ids": torch.arange(10).view(5, 2),
            "labels": torch.arange(5),
            "names": list("abcde"),
            "scale": torch.tensor(2.0),
        }
    )
    assert rows_in(batch) == 5
    parts = parts_of(batch, 2)
    assert [part.input_ids.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert parts[2]["names"] == ["e"] and parts[1]["scale"] is batch["scale"] and isinstance(parts[0], BatchEncoding)
    assert parts_of(batch, 0) == [batch] and parts_of(batch, 5) == [batch]
    for whole in ({"input_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(7, 3)}, [torch.zeros(2)], {"scale": 1.0}):
        assert rows_in(whole) is None and parts_of(whole, 1) == [whole]


class Counted(Work):
    def __init__(self, do):
        self.batches, self.calls, self._do = [{"a": torch.zeros(4)}], 0, do

    def attempt(self):
        self.calls += 1
        return self._do()

    def way_out(self, rows):
        return "none"


def test_only_a_failed_allocation_is_repeated():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("device-side assert")) and not is_out_of_memory(ValueError("out of memory"))

    def fail():
        raise RuntimeError("shape")

    work = Counted(fail)
    with pytest.raises(RuntimeError, match="shape"):
        InParts("trainer", torch.device("cpu")).run(work)
    assert work.calls == 1


def test_nothing_of_a_failed_attempt_is_held():
    alive, parts = [], InParts("trainer", torch.device("cpu"))

    def attempt():
        taken = torch.zeros(1000)
        if parts.most == 0:
            alive.append(weakref.ref(taken))
            raise torch.OutOfMemoryError(WORDS)
        return alive[0]() is None

    assert parts.run(Counted(attempt))
