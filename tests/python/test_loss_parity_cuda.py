# SPDX-License-Identifier: Apache-2.0
"""Two hundred optimizer steps on a GPU beside transformers + PEFT + bitsandbytes on it: same codes, adapter and rows, the same curve.

Only the command is run of ours, so a folder that holds `qlorapp` and `libqlorapp.so` is enough, whatever Python the module was built for:

    QLORAPP_BUILD_DIR=build/dev python -m pytest -rP tests/python/test_loss_parity_cuda.py

The peer's model is loaded in the precision of the run (16-bit weights outside the linear layers, float32 adapters) and computes under
torch.autocast of that type, as transformers' Trainer has it with bf16=True or fp16=True; fp16 goes through torch.amp.GradScaler.
"""

import contextlib
import dataclasses

import peer
import pytest
import torch
from conftest import has_cuda
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")
import peft

STEPS, WINDOW, ROWS, BATCH = 200, 4, 44, 3  # 15 batches an epoch: its last window has three, the last batch two rows
LEARNING_RATE, WARMUP, DECAY, CLIP = 2e-3, 5, 0.01, 1.0
SIZES = {"hidden_size": 128, "intermediate_size": 384}  # 0.6 M parameters in three layers


@dataclasses.dataclass(frozen=True)
class Precision:
    dtype: torch.dtype
    options: tuple[str, ...]
    largest: float  # of the differences of the losses of a step
    mean: float


PRECISIONS = {
    "fp32": Precision(torch.float32, (), 1e-4, 1e-5),
    "fp16": Precision(torch.float16, ("--fp16",), 2e-3, 5e-4),
    "bf16": Precision(torch.bfloat16, ("--bf16",), 1e-2, 5e-4),
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Float checkpoint → the codes of bitsandbytes on the GPU, an adapter of PEFT, rows."""
    if not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    root = tmp_path_factory.mktemp("parity")
    peer.write_llama(root / "float", **SIZES)
    model = peer.load_4bit(root / "float", device="cuda")
    assert (
        0.55e6 < sum(p.numel() for p in peer.transformers.LlamaForCausalLM.from_pretrained(root / "float").parameters()) < 0.7e6
    )
    model.save_pretrained(root / "codes")
    peer.add_adapters(model).save_pretrained(root / "adapter")
    return root, peer.write_rows(root / "rows.jsonl", ROWS)


def windows(rows):
    """Batches in the order of the rows, in windows that end with the epoch."""
    batches = [{key: t.cuda() for key, t in peer.collate(rows[i : i + BATCH]).items()} for i in range(0, len(rows), BATCH)]
    while True:
        for i in range(0, len(batches), WINDOW):
            yield batches[i : i + WINDOW]


def peer_losses(setting, precision: Precision) -> torch.Tensor:
    root, rows = setting
    base = peer.load_4bit(root / "codes", precision.dtype, device="cuda")
    model = peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 and p.is_cuda for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=DECAY)
    scaler = torch.amp.GradScaler("cuda", enabled=precision.dtype == torch.float16)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / WARMUP if step < WARMUP else max(0.0, (STEPS - step) / (STEPS - WARMUP))
    )
    mixed = precision.dtype != torch.float32
    losses = torch.zeros(STEPS, dtype=torch.float64)
    for step, window in zip(range(STEPS), windows(rows), strict=False):
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        for batch in window:
            with torch.autocast("cuda", precision.dtype) if mixed else contextlib.nullcontext():
                loss = model(**batch, num_items_in_batch=tokens).loss
            scaler.scale(loss).backward()
            losses[step] += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # a skipped step does not move the schedule
            schedule.step()
        optimizer.zero_grad()
    return losses


def our_run(setting, name: str, precision: Precision):
    root, _ = setting
    out = root / name
    peer.run_cli(
        "train", "--model", root / "codes", "--data", root / "rows.jsonl", "--output", out, "--device", "cuda",
        "--init_adapter", root / "adapter",
        "--max_steps", STEPS, "--per_device_train_batch_size", BATCH, "--gradient_accumulation_steps", WINDOW,
        "--learning_rate", LEARNING_RATE, "--warmup_steps", WARMUP, "--weight_decay", DECAY, "--max_grad_norm", CLIP,
        "--lr_scheduler_type", "linear", "--train_sampling_strategy", "sequential", "--logging_steps", 1,
        "--save_strategy", "no", *precision.options,
    )  # fmt: skip
    entries = peer.history(out)
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    return torch.tensor([entry["loss"] for entry in entries], dtype=torch.float64), load_file(out / "adapter_model.safetensors")


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_curve(setting, name):
    precision = PRECISIONS[name]
    theirs = peer_losses(setting, precision)
    ours, _ = our_run(setting, f"{name}-curve", precision)
    delta = ours - theirs
    largest, mean = delta.abs().max().item(), abs(delta.mean().item())
    print(
        f"{torch.cuda.get_device_name()}, {name}: loss {theirs[0]:.4f} -> {theirs[-1]:.4f}; max {largest:.2e}, |mean| {mean:.2e}"
    )
    assert theirs[0] - theirs[-1] > 1  # something was learnt
    assert largest <= precision.largest and mean <= precision.mean, (largest, mean)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_second_run_has_the_same_bits(setting, name):
    (losses, adapter), (again, adapter_again) = (our_run(setting, f"{name}-{i}", PRECISIONS[name]) for i in (1, 2))
    print(f"{name}: {(losses != again).sum()} of {STEPS} losses differ")
    assert torch.equal(losses, again)
    assert adapter.keys() == adapter_again.keys() and all(torch.equal(adapter[key], adapter_again[key]) for key in adapter)
