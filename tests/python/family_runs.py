# SPDX-License-Identifier: Apache-2.0
"""Runs of a small model of any family in the engine alone, as the command makes them; two ranks as a program."""

import json
import pathlib
import sys

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
    import peer  # and with it transformers and PEFT, which a rank does not need

    found = peer.write_rows(folder / "rows.jsonl", count, seed)
    return [(row["input_ids"], row["labels"]) for row in found]


def options_json(out, **options) -> str:
    off = {"logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no"}
    return json.dumps(
        {"output_dir": str(out), "per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, **off, **options}
    )


def train(model, data, out, *, resume_from=None, group="", **options):
    """(trainer, mean loss of the steps, adapters)"""
    trainer = _C.Trainer(model, options_json(out, **options), data, [], "base", {}, group=group)
    loss = trainer.train(resume_from)[1]
    return trainer, loss, adapters(model)


def adapters(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in zip(model.adapter_names(), model.parameters(), strict=True)}


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

    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD.group_name
    losses = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        data = [tuple(row) for row in json.loads((folder / "rows.json").read_text())]
        for name, loading in (("whole", {}), ("divided", {"shard_over": group})):
            model = engine(folder, **loading)
            assert model.is_sharded == (name == "divided")
            _, loss, found = train(model, data, folder / "out", group=group, **RANK_STEPS)
            if torch.distributed.get_rank() == 0:
                losses[f"{folder.name} {name}"] = loss
                save_file(found, folder / f"{name}.safetensors")
            model.leave_ranks()
    if torch.distributed.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    as_rank(pathlib.Path(sys.argv[1]))
