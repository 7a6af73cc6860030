# SPDX-License-Identifier: Apache-2.0
"""A training in a folder of its own: locked, resumed, ended by signals, reported."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

from transformers import trainer_utils

from .. import _C
from . import eval_generate, run_inputs, run_report
from .mixed import Mixed
from .processes import by_first
from .stopping import StopSignals, Terminated

_log = logging.getLogger("qlorapp")
_last: Any = trainer_utils.get_last_checkpoint  # it has no types


class RunFolders(Mixed):
    """A mixin before transformers' or TRL's Trainer: one run writes into output_dir, and leaves a report there."""

    #: Of the current train(); None: not locked.
    _folder: Any = None
    #: A thread flushes and commits the checkpoints of the current train().
    _commit: Any = None
    #: A checkpoint that the run continues from, or its own last one.
    _origin: str | None = None
    #: Of the current train(); None: several processes train by torch's passes.
    _stop: StopSignals | None = None
    #: The model holds the adapter of the best checkpoint, and the optimizer is that of the last step.
    _holds_best = False
    #: Steps of the run as C++ counts them.
    _counts: dict[str, int]
    #: Data or decisive options differ from those of the checkpoint that the run resumes from.
    _changed = False
    #: (fingerprint of the training data,); None: the current train() did not need it so far.
    _fingerprint: tuple[str | None] | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """transformers' train(). True resumes from the newest undamaged checkpoint of the run in output_dir.

        SIGTERM and SIGHUP leave a checkpoint, as Ctrl-C does, and exit with 143 and 129.
        """
        with contextlib.ExitStack() as stack:
            self._holds_best = self._changed = False
            self._fingerprint = None
            self._counts = {}
            if self.args.world_size == 1:
                resume_from_checkpoint = self._enter_folder(stack, resume_from_checkpoint)
                stack.enter_context(self._stopped_by_signals())
            elif self._is_written_by_first():
                resume_from_checkpoint = by_first(functools.partial(self._enter_folder, stack, resume_from_checkpoint))
            return super().train(resume_from_checkpoint, *args, **options)

    def _enter_folder(self, stack: contextlib.ExitStack, resume_from: Any) -> Any:
        """Locks output_dir until the stack ends. @returns the checkpoint to resume from."""
        stack.enter_context(self._locked_folder())
        if resume_from is True:
            resume_from = newest(str(self.args.output_dir))
        elif resume_from:
            check(str(resume_from))
        stack.enter_context(self._run_in_folder(resume_from))
        return resume_from

    @contextlib.contextmanager
    def _stopped_by_signals(self, waits: bool = False) -> Iterator[None]:
        """@param waits  until the run looks for a signal."""
        try:
            with StopSignals() as self._stop:
                self._stop.waits = waits
                yield
        finally:
            self._stop = None

    def _is_signalled(self) -> bool:
        return self._stop is not None and self._stop.received is not None

    def _is_written_by_first(self) -> bool:
        """Process 0 writes checkpoints for all. Otherwise each machine has its own, or each process writes a part."""
        return not (self.args.save_on_each_node or self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """No other run writes into output_dir meanwhile."""
        try:
            if str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no":
                self._folder = _C.RunFolder(str(self.args.output_dir))
            yield
        finally:
            if self._folder is not None:
                self._folder.close()
            self._folder = None

    @contextlib.contextmanager
    def _run_in_folder(self, resume_from: Any) -> Iterator[None]:
        self._origin = os.fspath(resume_from) if resume_from else None
        if self._folder is not None and self._origin is None:
            self._folder.begin()
        with self._reported(), self._committed_by_the_end():
            yield

    @contextlib.contextmanager
    def _committed_by_the_end(self) -> Iterator[None]:
        """Commits checkpoints on a thread. Behind this the last one is on the disk."""
        self._commit = commit = _C.BackgroundCommit()
        try:
            yield
            commit.wait()
        finally:
            self._commit = None
            commit.settle()  # the error that ends the run may be another

    def _wait_for_commit(self) -> None:
        if self._commit is not None:
            self._commit.wait()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Leaves run_report.json behind what runs in it."""
        started, resumed_from = time.time(), self._origin
        self._initial_global_step, outcome, error = 0, "failed", None
        try:
            yield
            outcome = "finished"
        except BaseException as raised:
            outcome, error = "stopped" if isinstance(raised, KeyboardInterrupt | Terminated) else "failed", raised
            raise
        finally:
            if self._folder is not None and not self._folder.is_new:
                run_report.write(self._folder, outcome, error, self._of_loop(started, resumed_from), self.state.log_history)

    def _of_loop(self, started: float, resumed_from: str | None) -> dict[str, Any]:
        data: Any = self.train_dataset
        return {
            "resumed_from": resumed_from,
            "resumed_with_changes": self._changed,
            "first_step": self._initial_global_step,
            "global_step": self.state.global_step,
            "max_steps": self.state.max_steps,
            "train_runtime": round(time.time() - started, 4),
            "rows": len(data) if hasattr(data, "__len__") else None,
            **self._counts,
            **eval_generate.comparison_of(self),
        }

    def _join_run(self, folder: Any) -> None:
        """The run of a resumed checkpoint goes on, once it is known to fit."""
        if not folder.is_new:
            return
        if self._origin and os.path.exists(os.path.join(self._origin, "MANIFEST.json")):
            folder.go_on_from(self._origin, changed=self._changed)
        else:
            folder.begin()


def newest(output_dir: str) -> str:
    found, skipped = _C.newest_checkpoint(output_dir)
    if found is None and os.path.isdir(output_dir) and not os.path.exists(os.path.join(output_dir, "run.json")):
        found = _last(output_dir)  # of a run that this library did not write
        if found is not None:
            check(found)
    if found is None:
        raise ValueError(
            f"No valid checkpoint found in output directory ({output_dir}). Skipped: {', '.join(skipped) or 'none'}."
        )
    if skipped:
        _log.warning("[Trainer] resuming from %s; skipped: %s.", found, ", ".join(skipped))
    return str(found)


def check(folder: str, is_ours: bool = False) -> None:
    """Raises FormatError if a checkpoint of this library is damaged. One of transformers has nothing to check it against."""
    if is_ours or any(
        os.path.exists(os.path.join(folder, name)) for name in ("MANIFEST.json", "run_state.json", run_inputs.FILE)
    ):
        _C.check_checkpoint(folder)
    else:
        _log.warning("[Trainer] %s has no MANIFEST.json, so its files cannot be verified: transformers wrote it.", folder)
