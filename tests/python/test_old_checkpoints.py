# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in which C++ wrote the state (of version 0.1.0, and of the command) go on in Python."""

import json
import shutil

import peer
import pytest
import qlorapp
from engine_checks import load
from lost_runs import BASE, root, whole  # noqa: F401  (fixtures)
from safetensors.torch import load_file
from tiny_trainer import ByAutograd


def goes_on(kind, root, output, checkpoint, **options):
    model = qlorapp.PeftModel.from_pretrained(load(root / "model"), checkpoint, is_trainable=True)
    given = {name.removeprefix("--"): value for name, value in BASE.items() if name not in ("--r", "--defaults")}
    args = qlorapp.TrainingArguments(
        str(output), use_cpu=True, report_to="none", disable_tqdm=True, **{"save_strategy": "no", **given, **options}
    )
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    trainer = kind(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.save_model(str(output))
    return trainer


@pytest.mark.parametrize("step", [2, 4])
def test_the_resumed_run_ends_with_the_adapter_of_the_command(root, whole, tmp_path, step):
    """Optimizer, schedule, order of rows and adapter continue; logged losses, too."""
    trainer = goes_on(qlorapp.Trainer, root, tmp_path / "out", whole / f"checkpoint-{step}")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name
    assert trainer.state.global_step == BASE["--max_steps"]
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}


def test_torch_cannot_read_its_state_and_says_so(root, whole, tmp_path):
    with pytest.raises(ValueError, match=r"is of version 0\.1\.0 or of qlorapp train, .*compute_loss is overridden.*PeftModel"):
        goes_on(ByAutograd, root, tmp_path / "out", whole / "checkpoint-2")


def test_other_options_are_refused_unless_they_are_wanted(root, whole, tmp_path):
    with pytest.raises(ValueError, match="learning_rate"):
        goes_on(qlorapp.Trainer, root, tmp_path / "out", whole / "checkpoint-2", learning_rate=1e-3)
    trainer = goes_on(
        qlorapp.Trainer, root, tmp_path / "out", whole / "checkpoint-2", learning_rate=1e-3, resume_with_changes=True
    )
    assert trainer._changed


def test_a_checkpoint_on_another_base_is_refused(root, whole, tmp_path):
    peer.write_llama(tmp_path / "model", num_hidden_layers=1, rms_norm_eps=0.02)
    shutil.copy(root / "rows.jsonl", tmp_path)
    with pytest.raises(ValueError, match="another base|computes something else"):
        goes_on(qlorapp.Trainer, tmp_path, tmp_path / "out", whole / "checkpoint-2")
