# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on a GPU beside transformers + PEFT + bitsandbytes on it: same codes, adapter and rows, the same curve.

Two hundred steps of a tiny Llama and a tiny Qwen3 in three precisions, and fifty in bf16 at the shape of Llama 3.2 1B (random weights; 6 GB of disk).

Only the command is run of ours, so a folder that holds `qlorapp` and `libqlorapp.so` is enough, whatever Python the module was built for:

    QLORAPP_BUILD_DIR=build/dev python -m pytest -rP tests/python/test_loss_parity_cuda.py

The peer's model is loaded in the precision of the run (16-bit weights outside the linear layers, float32 adapters) and computes under
torch.autocast of that type, as transformers' Trainer has it with bf16=True or fp16=True; fp16 goes through torch.amp.GradScaler.
"""

import contextlib
import dataclasses
import json

import peer
import pytest
import torch
from conftest import has_cuda
from safetensors.torch import load_file
from test_loss_parity import FAMILIES

pytest.importorskip("bitsandbytes")
import peft

WARMUP, DECAY, CLIP = 5, 0.01, 1.0


@dataclasses.dataclass(frozen=True)
class Plan:
    steps: int
    window: int
    batch: int
    learning_rate: float


TINY = Plan(steps=200, window=4, batch=3, learning_rate=2e-3)
ROWS = 44  # 15 batches an epoch: its last window has three, the last batch two rows
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


@pytest.fixture(scope="module", params=FAMILIES)
def setting(request, tmp_path_factory):
    """Float checkpoint → the codes of bitsandbytes on the GPU, an adapter of PEFT, rows."""
    if not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    root = tmp_path_factory.mktemp("parity")
    peer.write_llama(root / "float", **SIZES, **FAMILIES[request.param])
    model = peer.load_4bit(root / "float", device="cuda")
    model.save_pretrained(root / "codes")
    peer.add_adapters(model).save_pretrained(root / "adapter")
    return root, peer.write_rows(root / "rows.jsonl", ROWS)


# Llama 3.2 1B, whose rope scaling and end-of-text ids do not matter here.
REAL = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
REAL_PLAN = Plan(steps=50, window=2, batch=2, learning_rate=2e-4)
REAL_PRECISION = Precision(torch.bfloat16, ("--bf16", "--max_length", "512"), 2e-2, 2e-3)


@pytest.fixture(scope="module")
def real_setting(tmp_path_factory):
    """The same with 1.2 billion parameters, made on the GPU, and 16 rows of 300 to 512 tokens that count up in steps of their own."""
    if not has_cuda() or torch.cuda.get_device_properties(0).total_memory < 30e9:
        pytest.skip("no GPU of 32 GB or more, or a build without CUDA")
    root = tmp_path_factory.mktemp("real")
    torch.manual_seed(1)
    with torch.device("cuda"):
        config = peer.transformers.LlamaConfig(**REAL)
        model = peer.transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(root / "float")
    del model
    torch.cuda.empty_cache()
    model = peer.load_4bit(root / "float", torch.bfloat16, device="cuda")
    model.save_pretrained(root / "codes")
    peer.add_adapters(model, r=16, lora_alpha=32).save_pretrained(root / "adapter")
    del model
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(16):
        length, start, pace = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((300, 513), (3, 100_000), (1, 50))
        )
        ids = list(range(start, start + length * pace, pace))
        rows.append({"input_ids": ids, "labels": ids})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root, rows


def windows(rows, plan: Plan):
    """Batches in the order of the rows, in windows that end with the epoch."""
    begins = range(0, len(rows), plan.batch)
    batches = [{key: t.cuda() for key, t in peer.collate(rows[i : i + plan.batch]).items()} for i in begins]
    while True:
        for i in range(0, len(batches), plan.window):
            yield batches[i : i + plan.window]


def peer_losses(setting, precision: Precision, plan: Plan = TINY) -> torch.Tensor:
    root, rows = setting
    base = peer.load_4bit(root / "codes", precision.dtype, device="cuda")
    model = peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 and p.is_cuda for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=plan.learning_rate, weight_decay=DECAY)
    scaler = torch.amp.GradScaler("cuda", enabled=precision.dtype == torch.float16)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / WARMUP if step < WARMUP else max(0.0, (plan.steps - step) / (plan.steps - WARMUP))
    )
    mixed = precision.dtype != torch.float32
    losses = torch.zeros(plan.steps, dtype=torch.float64)
    for step, window in zip(range(plan.steps), windows(rows, plan), strict=False):
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


def our_run(setting, name: str, precision: Precision, plan: Plan = TINY, *options):
    root, _ = setting
    out = root / name
    peer.run_cli(
        "train", "--defaults", "trainer", "--model", root / "codes", "--data", root / "rows.jsonl", "--output", out, "--device", "cuda",
        "--init_adapter", root / "adapter",
        "--max_steps", plan.steps, "--per_device_train_batch_size", plan.batch, "--gradient_accumulation_steps", plan.window,
        "--learning_rate", plan.learning_rate, "--warmup_steps", WARMUP, "--weight_decay", DECAY, "--max_grad_norm", CLIP,
        "--lr_scheduler_type", "linear", "--train_sampling_strategy", "sequential", "--logging_steps", 1,
        "--save_strategy", "no", *precision.options, *options,
    )  # fmt: skip
    entries = peer.history(out)
    assert [entry["step"] for entry in entries] == list(range(1, plan.steps + 1))
    return torch.tensor([entry["loss"] for entry in entries], dtype=torch.float64), load_file(out / "adapter_model.safetensors")


def compare(name: str, precision: Precision, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    delta = ours - theirs
    largest, mean = delta.abs().max().item(), abs(delta.mean().item())
    print(
        f"{torch.cuda.get_device_name()}, {name}: loss {theirs[0]:.4f} -> {theirs[-1]:.4f}; max {largest:.2e}, |mean| {mean:.2e}"
    )
    assert theirs[0] - theirs[-1] > 1  # something was learned
    assert largest <= precision.largest and mean <= precision.mean, (largest, mean)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_curve(setting, name):
    precision = PRECISIONS[name]
    compare(name, precision, our_run(setting, f"{name}-curve", precision)[0], peer_losses(setting, precision))


def test_the_curve_at_the_shape_of_1b(real_setting):
    ours, _ = our_run(real_setting, "curve", REAL_PRECISION, REAL_PLAN)
    compare("1B bf16", REAL_PRECISION, ours, peer_losses(real_setting, REAL_PRECISION, REAL_PLAN))


def test_deterministic_runs_at_the_shape_of_1b_have_the_same_bits(real_setting):
    plan = dataclasses.replace(REAL_PLAN, steps=8)
    options = ("--full_determinism",)
    (losses, adapter), (again, adapter_again) = (
        our_run(real_setting, f"bits-{i}", REAL_PRECISION, plan, *options) for i in (1, 2)
    )
    assert torch.equal(losses, again)
    assert all(torch.equal(adapter[key], adapter_again[key]) for key in adapter)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_second_run_has_the_same_bits(setting, name):
    (losses, adapter), (again, adapter_again) = (our_run(setting, f"{name}-{i}", PRECISIONS[name]) for i in (1, 2))
    print(f"{name}: {(losses != again).sum()} of {TINY.steps} losses differ")
    assert torch.equal(losses, again)
    assert adapter.keys() == adapter_again.keys() and all(torch.equal(adapter[key], adapter_again[key]) for key in adapter)
