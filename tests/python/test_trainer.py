# SPDX-License-Identifier: Apache-2.0
"""The Trainer from Python: logs, resume, callbacks, Ctrl-C, free GIL; and the examples."""

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
from tiny_llama import SHAPES, SIZES, folder, load, ragged_batch, write_checkpoint  # noqa: F401  (folder is a fixture)

# --- the trainer


def rows(count=24):
    generator = torch.Generator().manual_seed(9)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 14, (), generator=generator))
        start = int(torch.randint(3, 40, (), generator=generator))
        ids = [start + i for i in range(length)]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "attention_mask": [1] * length})
    return made


def test_the_trainer_trains_logs_saves_resumes_and_stops(folder, tmp_path):
    seen = []

    class Watcher(qlorapp.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

        def on_save(self, args, state, control, **kwargs):
            seen.append("save")

    def arguments(name, **extra):
        return qlorapp.TrainingArguments(
            output_dir=str(tmp_path / name), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=4,
            learning_rate=2e-2, logging_steps=1, eval_strategy="epoch", save_strategy="steps",
            save_steps=6, gradient_checkpointing=True, **extra,
        )  # fmt: skip

    trainer = qlorapp.Trainer(load(folder), arguments("a"), train_dataset=rows(), eval_dataset=rows(6), callbacks=[Watcher])
    output = trainer.train()
    assert trainer.model.is_gradient_checkpointing
    assert output.global_step == 12 == trainer.state.max_steps and output.training_loss > 0
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]
    assert {"grad_norm", "learning_rate", "epoch", "step"} <= set(history[0])
    assert sum("eval_loss" in entry for entry in history) == 4
    assert seen == [1, 2, 3, 4, 5, 6, "save", 7, 8, 9, 10, 11, 12, "save"]
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()

    resumed = qlorapp.Trainer(load(folder), arguments("a"), train_dataset=rows(), eval_dataset=rows(6))
    resumed.train(resume_from_checkpoint=tmp_path / "a" / "checkpoint-6")
    ours = {n: p for n, p in resumed.model.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, ours[n]) for n, p in trainer.model.named_parameters() if p.requires_grad)

    class Stopper(qlorapp.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    stopped = qlorapp.Trainer(load(folder), arguments("b"), train_dataset=rows(), callbacks=[Stopper()])
    assert stopped.train().global_step == 3


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"input_ids": [1, 100_000]}, "token ids must be from 0 to .* row 1 has 100000"),
        ({"input_ids": [1, -2]}, "token ids must be from 0 to .* row 1 has -2"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels must be -100 .* row 1 has -1"),
    ],
)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_token_outside_the_vocabulary_is_named_before_training(folder, tmp_path, row, rule, name):
    data = {"train_dataset": rows(4), "eval_dataset": rows(4)}
    data[name] = [*rows(1), row]
    with pytest.raises(ValueError, match=f"{name}: {rule}"):
        qlorapp.Trainer(load(folder), qlorapp.TrainingArguments(output_dir=str(tmp_path), max_steps=1), **data).train()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_gradients_that_are_not_finite_end_the_run_with_the_step_and_before_it_is_saved(folder, tmp_path, optim):
    arguments = qlorapp.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=6, learning_rate=1e30, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="steps", save_steps=1, optim=optim,
    )  # fmt: skip
    trainer = qlorapp.Trainer(load(folder), arguments, train_dataset=rows())
    with pytest.raises(RuntimeError, match=r"norm of the gradients must be finite and below 9\.2e18; got (nan|inf) in step 2,"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"checkpoint-1"}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1]


def test_an_error_in_a_callback_reaches_the_caller(folder, tmp_path):
    class Broken(qlorapp.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            raise LookupError("mine")

    arguments = qlorapp.TrainingArguments(output_dir=str(tmp_path), logging_steps=1, max_steps=2)
    with pytest.raises(LookupError, match="mine"):
        qlorapp.Trainer(load(folder), arguments, train_dataset=rows(), callbacks=[Broken]).train()


def test_ctrl_c_ends_training_with_keyboard_interrupt(folder, tmp_path, build_dir):
    code = f"""
import signal, qlorapp
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background has it ignored
model = qlorapp.AutoModelForCausalLM.from_pretrained({str(folder)!r})
model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4))
args = qlorapp.TrainingArguments(output_dir={str(tmp_path)!r}, max_steps=10_000_000, save_strategy="no", logging_strategy="no")
data = [{{"input_ids": list(range(3, 90))}}] * 64
class Announce(qlorapp.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            print("training", flush=True)
trainer = qlorapp.Trainer(model, args, train_dataset=data, callbacks=[Announce])
try:
    trainer.train()
except KeyboardInterrupt:
    print("interrupted after", trainer.state.global_step > 0, flush=True)
"""
    env = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert rest == "interrupted after True\n" and process.returncode == 0


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
