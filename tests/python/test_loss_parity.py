# SPDX-License-Identifier: Apache-2.0
"""Sixty optimizer steps beside transformers + PEFT + bitsandbytes: same codes, same adapters, same rows, the same curve."""

import contextlib
import dataclasses

import peer
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
from qlorapp.hf.forward import engine_of

STEPS, WINDOW, ROWS, BATCH = 60, 4, 44, 3  # 15 batches an epoch: its last window has three, the last batch two rows
LEARNING_RATE, WARMUP, DECAY, CLIP = 2e-3, 5, 0.01, 1.0
FP32_MAX, FP32_MEAN = 1e-5, 1e-6


@dataclasses.dataclass
class Mistakes:
    """What a parity test must notice."""

    eps: float = 1e-8
    weight_decay: float = DECAY
    shift: int = 0


@dataclasses.dataclass
class Curve:
    losses: torch.Tensor
    learning_rates: list[float]
    norms: torch.Tensor
    first_gradients: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")

#: Of each native family, and what is special in it: windows shorter than the rows, biases.
FAMILIES = {
    "Llama": {},
    "Qwen3": {"family": "Qwen3", "head_dim": 32, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
}


@pytest.fixture(scope="module", params=FAMILIES)
def setting(request, tmp_path_factory):
    """Float checkpoint → the peer's codes as a folder, the peer's first adapter as a folder, rows."""
    root = tmp_path_factory.mktemp("parity")
    peer.write_llama(root / "float", **FAMILIES[request.param])
    model = peer.load_4bit(root / "float")
    model.save_pretrained(root / "codes")
    peer.add_adapters(model).save_pretrained(root / "adapter")
    rows = peer.write_rows(root / "rows.jsonl", ROWS)
    return root, rows


def windows(rows):
    """Batches in the order of the rows, in windows that end with the epoch."""
    batches = [peer.collate(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
    while True:
        for i in range(0, len(batches), WINDOW):
            yield batches[i : i + WINDOW]


def peer_model(root, dtype=torch.float32):
    model = peft.PeftModel.from_pretrained(peer.load_4bit(root / "codes", dtype), root / "adapter", is_trainable=True).train()
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    return model


def peer_curve(setting, dtype=torch.float32, mistakes=Mistakes(), leaves=None) -> Curve:  # noqa: B008
    """leaves: a curve. This one ends where it has left it."""
    root, rows = setting
    model = peer_model(root, dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, eps=mistakes.eps, weight_decay=mistakes.weight_decay)

    def share(step: int) -> float:
        step += mistakes.shift
        return step / WARMUP if step < WARMUP else max(0.0, (STEPS - step) / (STEPS - WARMUP))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    curve = Curve(torch.zeros(STEPS, dtype=torch.float64), [], torch.zeros(STEPS, dtype=torch.float64), {}, {})
    cast = torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext()
    for step, window in zip(range(STEPS), windows(rows), strict=False):
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        for batch in window:
            with cast:
                loss = model(**batch, num_items_in_batch=tokens).loss
            loss.backward()
            curve.losses[step] += loss.item()
        if step == 0:
            curve.first_gradients = {name.replace(".default", ""): p.grad.clone() for name, p in trained.items()}
        if leaves is not None and abs(curve.losses[step] - leaves.losses[step]) > FP32_MAX:
            curve.losses[step + 1 :] = leaves.losses[step + 1 :]
            return curve
        curve.norms[step] = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item()
        curve.learning_rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    curve.adapter = {name.replace(".default", ""): p.detach().clone() for name, p in trained.items()}
    return curve


def our_curve(setting, name, *options) -> Curve:
    root, _ = setting
    out = root / name
    peer.run_cli(
        "train", "--defaults", "trainer", "--model", root / "codes", "--data", root / "rows.jsonl", "--output", out,
        "--init_adapter", root / "adapter",
        "--max_steps", STEPS, "--per_device_train_batch_size", BATCH, "--gradient_accumulation_steps", WINDOW,
        "--learning_rate", LEARNING_RATE, "--warmup_steps", WARMUP, "--weight_decay", DECAY, "--max_grad_norm", CLIP,
        "--lr_scheduler_type", "linear", "--train_sampling_strategy", "sequential", "--logging_steps", 1,
        "--save_strategy", "no", *options,
    )  # fmt: skip
    entries = peer.history(out)
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))

    def column(key):
        return torch.tensor([entry[key] for entry in entries], dtype=torch.float64)

    rates = [entry["learning_rate"] for entry in entries]
    return Curve(column("loss"), rates, column("grad_norm"), {}, load_file(out / "adapter_model.safetensors"))


def differences(ours: Curve, theirs: Curve) -> tuple[float, float]:
    delta = ours.losses - theirs.losses
    return delta.abs().max().item(), delta.mean().abs().item()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())).item()


@pytest.fixture(scope="module")
def theirs(setting):
    return peer_curve(setting)


@pytest.fixture(scope="module")
def ours(setting):
    return our_curve(setting, "ours")


def test_the_curve_in_fp32(ours, theirs):
    assert theirs.losses[0] - theirs.losses[-1] > 1  # something was learned
    assert theirs.norms.max() > CLIP > theirs.norms.min()  # clipping was at work, and not always
    largest, mean = differences(ours, theirs)
    assert largest <= FP32_MAX and mean <= FP32_MEAN, (largest, mean)
    assert ours.learning_rates == pytest.approx(theirs.learning_rates, rel=1e-15)
    assert torch.allclose(ours.norms, theirs.norms, rtol=1e-4)


def test_the_adapter_that_comes_out_in_fp32(ours, theirs):
    assert set(ours.adapter) == set(theirs.adapter)
    worst = max(relative(tensor, theirs.adapter[name]) for name, tensor in ours.adapter.items())
    assert worst <= 1e-4, worst


@pytest.mark.parametrize("face", ["forward_backward", "autograd"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_the_first_step(setting, theirs, face, checkpointing):
    root, rows = setting
    model = qlorapp.AutoModelForCausalLM.from_pretrained(root / "codes", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, root / "adapter", is_trainable=True).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine, window = engine_of(model.get_base_model()), next(windows(rows))
    core = engine.core
    if face == "forward_backward":
        core.load_adapter(str(root / "adapter"), "alone")
        core.active_adapter = "alone"
    batches = [core.unpad(batch["input_ids"], batch["attention_mask"], batch["labels"]) for batch in window]
    tokens = sum(batch.target_count for batch in batches)
    if face == "forward_backward":
        core.bind_gradients()
        core.zero_grad()
    for plain, batch in zip(window, batches, strict=True):
        if face == "autograd":
            model(**plain, num_items_in_batch=tokens).loss.backward()
        else:
            core.forward_backward(batch, torch.tensor(1.0 / tokens))
    if face == "autograd":
        got = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert not engine._told
    else:
        got = dict(zip(core.adapter_names(), [p.grad for p in core.parameters()], strict=True))
    assert set(got) == set(theirs.first_gradients)
    worst = max(relative(got[name], gradient) for name, gradient in theirs.first_gradients.items())
    assert worst <= 3e-5, worst


@pytest.mark.parametrize(
    "mistakes",
    [Mistakes(eps=1e-6), Mistakes(shift=1), Mistakes(weight_decay=0.0)],
    ids=["eps of 1e-6", "learning rate one step early", "no weight decay"],
)
def test_a_mistake_does_not_pass_for_parity(setting, ours, mistakes):
    largest, _ = differences(ours, peer_curve(setting, mistakes=mistakes, leaves=ours))
    assert largest > FP32_MAX, largest


def test_the_curve_in_bf16(setting):
    ours, theirs = our_curve(setting, "bf16", "--bf16"), peer_curve(setting, torch.bfloat16)
    largest, mean = differences(ours, theirs)
    assert largest <= 1e-2 and mean <= 1e-3, (largest, mean)
