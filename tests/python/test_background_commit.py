# SPDX-License-Identifier: Apache-2.0
"""Python's trainers go on while a thread commits a checkpoint: its errors are raised, and callbacks find the checkpoint whole."""

import json
import os
import signal

import pytest
import qlorapp
import transformers
from lost_runs import root  # noqa: F401  (a fixture)
from qlorapp import _C
from test_nothing_lost_python import KINDS, Signals, best_run, outcome

OPTIONS = {"eval_strategy": "no", "load_best_model_at_end": False, "max_steps": 40, "save_steps": 2}


def spoiling(kind):
    class Spoils(kind):
        """Puts a pipe into its first checkpoint, which cannot be committed then."""

        spoils = True

        def _save_rng_state(self, output_dir):
            super()._save_rng_state(output_dir)
            if self.spoils:
                self.spoils = False
                os.mkfifo(os.path.join(output_dir, "pipe"))

    return Spoils


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_commit_fails_of_ends_the_run_within_two_steps(root, tmp_path, kind):
    with pytest.raises(qlorapp.FormatError, match="pipe.* a checkpoint holds regular files only"):
        best_run(root, tmp_path, spoiling(kind), **OPTIONS)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert outcome(tmp_path)[0] == "failed" and "regular files" in outcome(tmp_path)[1]
    assert not list(tmp_path.glob(".tmp-*"))
    best_run(root, tmp_path, kind, **{**OPTIONS, "max_steps": 6})
    assert outcome(tmp_path) == ("finished", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_behind_a_commit_that_failed_saves_its_steps(root, tmp_path, kind):
    with pytest.raises(KeyboardInterrupt):
        best_run(root, tmp_path, spoiling(kind), callbacks=[Signals("on_step_begin", 2, signal.SIGINT)], **OPTIONS)
    (saved,) = tmp_path.glob("checkpoint-*")
    _C.check_checkpoint(str(saved))
    best_run(root, tmp_path, kind, True, **{**OPTIONS, "max_steps": 6})


class Looks(transformers.TrainerCallback):
    """Notes the checkpoints that are whole when an event comes."""

    def __init__(self, folder, *events):
        self.folder, self.seen = folder, []
        for event in events:
            setattr(self, event, self.look)

    def look(self, args, state, control, **_):
        checkpoint = self.folder / f"checkpoint-{state.global_step}"
        _C.check_checkpoint(str(checkpoint))
        self.seen.append(checkpoint.name)


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_find_the_checkpoint_whole(root, tmp_path, kind):
    at_save, at_end = Looks(tmp_path, "on_save"), Looks(tmp_path / "2", "on_train_end")
    best_run(root, tmp_path, kind, callbacks=[at_save], **{**OPTIONS, "max_steps": 6})
    assert at_save.seen == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    best_run(root, tmp_path / "2", kind, callbacks=[at_end], **{**OPTIONS, "max_steps": 6})
    assert at_end.seen == ["checkpoint-6"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_that_a_program_replaced_finds_the_checkpoint_whole(root, tmp_path, kind):
    seen = []

    class Uploads(kind):
        def _save_checkpoint(self, *args, **options):
            super()._save_checkpoint(*args, **options)
            seen.append(json.loads((tmp_path / f"checkpoint-{self.state.global_step}" / "MANIFEST.json").read_text())["step"])

    best_run(root, tmp_path, Uploads, **{**OPTIONS, "max_steps": 6})
    assert seen == [2, 4, 6]
