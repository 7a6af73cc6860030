# SPDX-License-Identifier: Apache-2.0
"""A small model of any family in the engine alone, and trained by qlorapp.Trainer; two ranks as a program."""

import gc
import json
import pathlib
import sys

import engine_checks
import peer
import qlorapp
import torch
from qlorapp import _C

RANK_STEPS = {"max_steps": 2, "learning_rate": 1e-2}


def engine(folder, *, device="cpu", dtype=torch.float32, seed=1, dropout=0.0, **loading):
    """The four-bit model with adapters on all linear layers, whose B is random."""
    model = _C.load_model(str(folder), compute_dtype=dtype, device=torch.device(device), **loading)
    model.add_adapters(
        json.dumps(
            {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": dropout, "init_lora_weights": "gaussian"}
        ),
        seed,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in zip(model.adapter_names(), model.parameters(), strict=True):
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def rows(folder: pathlib.Path, count: int = 24, seed: int = 3):
    return peer.write_rows(folder / "rows.jsonl", count, seed)


def options_json(out, **options) -> str:
    """For C++ alone."""
    off = {"logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no"}
    return json.dumps(
        {"output_dir": str(out), "per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, **off, **options}
    )


def train(
    folder, data, out, *, device="cpu", dtype=torch.float32, seed=1, dropout=0.0, sharding="no", resume_from=None, **options
):
    """(trainer, mean loss of the steps, adapters)"""
    base = engine_checks.load(folder, dtype=dtype, device_map=device, base_sharding=sharding)
    args = qlorapp.TrainingArguments(
        str(out), use_cpu=device == "cpu", report_to="none", disable_tqdm=True,
        **{"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "save_strategy": "no", **options},
    )  # fmt: skip
    trainer = qlorapp.Trainer(engine_checks.with_lora(base, seed, lora_dropout=dropout), args, train_dataset=data)
    try:
        loss = trainer.train(resume_from).training_loss
    finally:
        torch.use_deterministic_algorithms(False)  # which full_determinism sets for the process
    assert trainer._told == ""
    return trainer, loss, {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def same_bits(one, other) -> bool:
    """Of two results of train()."""
    return (
        one[1] == other[1]
        and one[2].keys() == other[2].keys()
        and all(torch.equal(one[2][name], other[2][name]) for name in one[2])
    )


def as_rank(root: pathlib.Path) -> None:
    """One of several processes: for each folder of root, a run over a whole base and one over a base that is divided."""
    from safetensors.torch import save_file

    losses = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        data = json.loads((folder / "rows.json").read_text())
        for name, sharding in (("whole", "no"), ("divided", "full")):
            trainer, loss, found = train(folder, data, folder / "out", sharding=sharding, ddp_backend="gloo", **RANK_STEPS)
            assert trainer.model.get_base_model().forward.engine.core.is_sharded == (name == "divided")
            if torch.distributed.get_rank() == 0:
                losses[f"{folder.name} {name}"] = loss
                save_file(found, folder / f"{name}.safetensors")
            del trainer  # which holds the process group
            gc.collect()
    if torch.distributed.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    as_rank(pathlib.Path(sys.argv[1]))
