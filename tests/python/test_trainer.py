# SPDX-License-Identifier: Apache-2.0
"""A training as a process sees it: bad rows, numbers that are not finite, Ctrl-C, a free GIL; and the examples."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import qlorapp
import torch
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import made, rows


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"input_ids": [1, 100_000], "labels": [1, 2]}, "token ids must be from 0 to .* got 100000"),
        ({"input_ids": [1, -2], "labels": [1, 2]}, "token ids must be from 0 to .* got -2"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels must be -100 .* got -1"),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(folder, tmp_path, row, rule):
    data = [*rows(1), {**row, "attention_mask": [1, 1]}]
    trainer = made(qlorapp.Trainer, folder, tmp_path, data=data, max_steps=1)
    for _ in range(2):  # and again
        with pytest.raises(IndexError, match=rule):
            trainer.train()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_gradients_that_are_not_finite_end_the_run_with_the_step_and_before_it_is_saved(folder, tmp_path, optim):
    trainer = made(
        qlorapp.Trainer, folder, tmp_path, max_steps=6, learning_rate=1e30, lr_scheduler_type="constant", save_strategy="steps",
        save_steps=1, optim=optim,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"norm of the gradients must be finite and below 9\.2e18; got (nan|inf) in step 2,"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"checkpoint-1"}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1]


def test_ctrl_c_ends_training_with_keyboard_interrupt(folder, tmp_path, build_dir):
    code = f"""
import signal, qlorapp
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background has it ignored
model = qlorapp.AutoModelForCausalLM.from_pretrained({str(folder)!r})
model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, task_type="CAUSAL_LM"))
args = qlorapp.TrainingArguments(
    output_dir={str(tmp_path)!r}, max_steps=10_000_000, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True
)
data = [{{"input_ids": list(range(3, 90)), "labels": list(range(3, 90))}}] * 64
class Announce(qlorapp.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            print("training", flush=True)
trainer = qlorapp.Trainer(model, args, train_dataset=data, callbacks=[Announce])
try:
    trainer.train()
except KeyboardInterrupt:
    print("interrupted after", trainer.state.global_step > 0, trainer._told == "", flush=True)
"""
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert rest == "interrupted after True True\n" and process.returncode == 0


def test_other_threads_run_while_cpp_computes():
    """A counting thread must advance inside one long call; with the GIL held it would stand still until the call ends."""
    weight = torch.randn(3000, 3000)
    quantizer = qlorapp.Quantizer()
    ticks, running = [], True

    def count():
        while running:
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        while not ticks:
            time.sleep(0.001)
        begin = time.perf_counter()
        for _ in range(3):
            quantizer.dequantize(quantizer.quantize(weight), torch.float64)
            inside = sum(begin < tick for tick in ticks)
            if inside >= 3:
                break
        end = time.perf_counter()
    finally:
        running = False
        thread.join()
    assert sum(begin < tick < end for tick in ticks) >= 3


@pytest.mark.parametrize(
    "example, arguments",
    [("parts.py", []), ("loop_by_hand.py", ["{folder}"]), ("finetune.py", ["{folder}", "{data}", "{out}"])],
)
def test_examples_run_and_their_loss_falls(folder, tmp_path, build_dir, example, arguments):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    words = [word.format(folder=folder, data=data, out=tmp_path / "out") for word in arguments]
    script = pathlib.Path(__file__).parents[2] / "examples" / "python" / example
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    printed = subprocess.run([sys.executable, script, *words], env=env, check=True, capture_output=True, text=True).stdout
    losses = [float(found) for found in re.findall(r"(?<![_a-z])(?:loss|'loss':) ?([0-9.]+)", printed)]
    assert len(losses) >= 4 and losses[-1] < losses[0], printed
