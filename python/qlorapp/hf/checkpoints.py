# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and adapters that are written as one, for transformers' and TRL's trainers."""

import contextlib
import functools
import logging
import os
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed
import transformers
from transformers import trainer_utils

from .. import _C
from . import run_inputs, run_report
from .adapter_files import replaced_adapter, saves_together
from .stopping import StopSignals, Terminated

_log = logging.getLogger("qlorapp")
_last: Any = trainer_utils.get_last_checkpoint  # it has no types


#: The base of mixins before transformers' Trainer, so that a type checker sees the methods that they call and replace.
if TYPE_CHECKING:
    Mixed = transformers.Trainer
else:
    Mixed = object


class SafeCheckpoints(Mixed):
    """A mixin before transformers' or TRL's Trainer: checkpoints appear whole, with a manifest, in a folder that one run writes into."""

    #: Of the current train(); None: not locked.
    _folder: Any = None
    #: The checkpoint under construction.
    _writer: Any = None
    #: The one of the current train() that a thread flushes and commits.
    _commit: Any = None
    #: A checkpoint that the run continues from, or its own last one.
    _origin: str | None = None
    #: Folders to push once they are complete.
    _to_push: list[str]
    #: Of the current train(); None: several processes train by torch's passes.
    _stop: StopSignals | None = None
    #: The model holds the adapter of the best checkpoint, and the optimizer is that of the last step.
    _holds_best = False
    #: Steps of the run as C++ counts them.
    _counts: dict[str, int]
    #: Data or decisive options differ from those of the checkpoint that the run resumes from.
    _changed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        saves_together(self.model)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """transformers' train(). True resumes from the newest undamaged checkpoint of the run in output_dir.

        SIGTERM and SIGHUP leave a checkpoint, as Ctrl-C does, and exit with 143 and 129.
        """
        with contextlib.ExitStack() as stack:
            self._holds_best = self._changed = False
            self._counts = {}
            if self.args.world_size == 1:
                resume_from_checkpoint = self._enter_folder(stack, resume_from_checkpoint)
                stack.enter_context(self._stopped_by_signals())
            elif self._is_written_by_first():
                resume_from_checkpoint = _by_first(functools.partial(self._enter_folder, stack, resume_from_checkpoint))
            return super().train(resume_from_checkpoint, *args, **options)

    def _enter_folder(self, stack: contextlib.ExitStack, resume_from: Any) -> Any:
        """Locks output_dir until the stack ends. @returns the checkpoint to resume from."""
        stack.enter_context(self._locked_folder())
        if resume_from is True:
            resume_from = _newest(str(self.args.output_dir))
        elif resume_from:
            _check(str(resume_from))
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

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """transformers' method, at the end of a step. Raises the error of a failed background commit."""
        if self._commit is not None:
            self._commit.poll()
        super()._maybe_log_save_evaluate(*args, **options)

    def _may_go_on(self) -> bool:
        """Whether a save may return before its commit: no callback, override or push to the hub reads the folder."""
        if self._commit is None or self._to_push or getattr(self.args, "on_non_finite", "raise") == "rollback":
            return False
        if not all(_is_ours(self, name) for name in ("_save_checkpoint", "_maybe_log_save_evaluate")):
            return False
        nothing = transformers.TrainerCallback.on_save
        return all(getattr(each.on_save, "__func__", None) is nothing for each in self.callback_handler.callbacks)

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
        }

    def _join_run(self, folder: Any) -> None:
        """The run of a resumed checkpoint goes on, once it is known to fit."""
        if not folder.is_new:
            return
        if self._origin and os.path.exists(os.path.join(self._origin, "MANIFEST.json")):
            folder.go_on_from(self._origin, changed=self._changed)
        else:
            folder.begin()

    def _get_output_dir(self, *args: Any, **options: Any) -> str:
        if self._writer is not None:
            return str(self._writer.folder)
        return super()._get_output_dir(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        """transformers' method writes into a folder beside; the checkpoint in it gets a manifest and its place."""
        run_dir = self._get_output_dir(trial=options.get("trial", args[1] if len(args) > 1 else None))
        if self._writer is not None or (self.args.world_size > 1 and not self._is_written_by_first()):
            with self._as_given():
                super()._save_checkpoint(*args, **options)
            return
        if not self.args.should_save:
            self._save_aside(*args, **options)
            self._share_best()
            return
        try:
            self._save_for_all(run_dir, *args, **options)
        except Exception as error:
            self._share_best(failed=error)
            raise
        self._share_best()
        for pushed in self._to_push:
            super()._push_from_checkpoint(pushed)

    def _save_for_all(self, run_dir: str, *args: Any, **options: Any) -> None:
        self._wait_for_commit()
        own_folder = self._folder if self._folder is not None and self._folder.path == run_dir else None
        folder = own_folder or _C.RunFolder(run_dir)
        self._join_run(folder)
        name = f"checkpoint-{self.state.global_step}"
        self._to_push = []
        self._writer = writer = _C.CheckpointWriter(folder, self.state.global_step)
        try:
            self._write_checkpoint(writer, name, run_dir, folder, *args, **options)
            commit = self._commit or _C.BackgroundCommit()
            try:
                commit.start(folder, writer, self.args.save_total_limit, [self.state.best_model_checkpoint or ""])
            except Exception:
                writer.discard()
                raise
            self._origin = os.path.join(run_dir, name)
            if own_folder is None or not self._may_go_on():
                commit.wait()
        finally:
            self._writer = None
            if own_folder is None:
                folder.close()

    def _as_given(self) -> Any:
        """Around transformers' save."""
        return contextlib.nullcontext()

    def _share_best(self, failed: Exception | None = None) -> None:
        """Process 0 knows which checkpoints belong to the run. The others end with what it failed of."""
        if self.args.world_size == 1 or not self._is_written_by_first():
            return
        self.state.best_model_checkpoint, why = of_first((self.state.best_model_checkpoint, str(failed) if failed else None))
        if why is not None and failed is None:
            raise RuntimeError(f"[Trainer] process 0 could not save a checkpoint: {why}")

    def _save_aside(self, *args: Any, **options: Any) -> None:
        """The part of the other processes. Process 0 gets the files that each process writes: the state of random numbers."""
        self._to_push = []
        with tempfile.TemporaryDirectory() as aside:
            self._writer = types.SimpleNamespace(folder=aside)
            files, failed = {}, None
            try:
                super()._save_checkpoint(*args, **options)
                files = {path.name: path.read_bytes() for path in pathlib.Path(aside).rglob("*") if path.is_file()}
            except Exception as error:
                failed = error
            finally:
                self._writer = None
            _gathered(files, failed)
            if failed is not None:
                raise failed

    def _write_checkpoint(self, writer: Any, name: str, run_dir: str, folder: Any, *args: Any, **options: Any) -> None:
        failed = None
        try:
            try:
                with self._as_given():
                    super()._save_checkpoint(*args, **options)
            except Exception as error:
                failed = error
            others = _gathered({}, failed) if self.args.world_size > 1 else {}  # they wait for it
            if failed is not None:
                raise failed
            inner = os.path.join(writer.folder, name)
            for other, content in others.items():
                pathlib.Path(inner, other).write_bytes(content)
            run_inputs.write(self, inner)
            self._name_best(run_dir, folder)
            self.state.save_to_json(os.path.join(inner, "trainer_state.json"))
            for entry in os.listdir(inner):
                os.rename(os.path.join(inner, entry), os.path.join(writer.folder, entry))
            os.rmdir(inner)
        except BaseException:
            writer.discard()
            raise

    def _leave_checkpoint(self, trial: Any) -> None:
        """Saves the completed steps of a run that was stopped. It is to be resumed, whatever else the arguments let checkpoints hold."""
        if self.state.global_step == 0 or self._holds_best:
            return
        if self._commit is not None:
            self._commit.settle()
        only_model, self.args.save_only_model = self.args.save_only_model, False
        try:
            self._save_checkpoint(self.model, trial)
            self._wait_for_commit()
        finally:
            self.args.save_only_model = only_model
        if self.args.should_save:
            _log.warning(
                "[Trainer] stopped after step %d of %d and saved a checkpoint. Continue with train(resume_from_checkpoint=True).",
                self.state.global_step, self.state.max_steps,
            )  # fmt: skip

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> Any:
        """transformers' method. The best checkpoint is one beside the checkpoint that the run resumes from."""
        result = super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint and os.path.isfile(os.path.join(resume_from_checkpoint, "trainer_state.json")):
            self._confine_best(resume_from_checkpoint)
        self._share_best()
        return result

    def _confine_best(self, folder: str) -> None:
        """Reads the best checkpoint of a checkpoint by its name. The run may have been moved, and a file must not lead elsewhere."""
        saved = transformers.TrainerState.load_from_json(os.path.join(folder, "trainer_state.json")).best_model_checkpoint
        name = os.path.basename(os.path.normpath(saved)) if isinstance(saved, str) and saved else ""
        best = os.path.join(os.path.dirname(os.path.abspath(folder)), name)
        is_there = name.startswith("checkpoint-") and os.path.isdir(best) and not os.path.islink(best)
        self.state.best_model_checkpoint = best if is_there else None
        if saved and not is_there:
            _log.warning("[resume] the best checkpoint, %.200r, is not beside %s.", name, folder)

    def _load_best_model(self) -> None:
        """transformers' method, for a checkpoint that is whole."""
        best = self.state.best_model_checkpoint
        if self.args.world_size == 1 or self._is_written_by_first():
            self._wait_for_commit()
            self.accelerator.wait_for_everyone()
            try:
                _check(str(best), is_ours=(self.state.best_global_step or 0) > self._initial_global_step)
            except ValueError as error:
                last = f"checkpoint-{self.state.global_step}"
                raise _C.FormatError(
                    f"[Trainer] load_best_model_at_end cannot load the best adapter: {_reason(error)}. The training is complete: "
                    f"load {last} or an earlier checkpoint with PeftModel.from_pretrained."
                ) from None
        super()._load_best_model()
        self._holds_best = True

    def _name_best(self, run_dir: str, folder: Any) -> None:
        """transformers looked for the best checkpoint in the folder of the one under construction."""
        step = getattr(self.state, "best_global_step", None)
        if not step:
            return
        best = os.path.join(run_dir, f"checkpoint-{step}")
        if step == self.state.global_step or folder.owns(best):
            self.state.best_model_checkpoint = best

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """transformers' method would remove all checkpoints of the folder but the best, those of earlier runs too."""
        self._wait_for_commit()  # callbacks may look at it
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **options)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit
            best = self.state.best_model_checkpoint
            if self._folder is not None and not self._folder.is_new and limit == 1 and best:
                self._folder.prune(1, [best])

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writer is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._to_push.append(os.path.join(os.path.dirname(self._writer.folder), os.path.basename(checkpoint_folder)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers' method; the files take their places together."""
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        pushes = self.args.push_to_hub and not _internal_call
        is_adapter = hasattr(
            self.model, "peft_config"
        )  # of a whole model transformers removes shards that the new one does not have
        if not is_adapter or pushes or self._writer is not None or self.args.world_size > 1 or not self.args.should_save:
            super().save_model(output_dir, _internal_call)
            return
        with replaced_adapter(folder) as staging:
            super().save_model(staging, _internal_call)


def of_first(value: Any) -> Any:
    """Process 0's."""
    told = [value]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]


def _by_first(work: Callable[[], Any]) -> Any:
    """What process 0's work returns. Its error ends the other processes, too."""
    value, error = None, None
    if torch.distributed.get_rank() == 0:
        try:
            value = work()
        except Exception as raised:
            error = raised
    value, why = of_first((value, None if error is None else str(error)))
    if error is not None:
        raise error
    if why is not None:
        raise RuntimeError(f"[Trainer] process 0 has failed: {why}")
    return value


def _gathered(files: dict[str, bytes], failed: Exception | None) -> dict[str, bytes]:
    """Those of all processes, in process 0. @raises RuntimeError there if another process has failed."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    is_first = torch.distributed.get_rank() == 0
    torch.distributed.gather_object((files, failed and str(failed)), told if is_first else None, dst=0)
    everything: dict[str, bytes] = {}
    for process, (own, why) in enumerate(told if is_first else []):
        if why is not None and process > 0:
            raise RuntimeError(f"[Trainer] process {process} could not save its part of a checkpoint: {why}")
        everything |= own
    return everything


def _is_ours(trainer: Any, method: str) -> bool:
    """Neither a subclass nor the program has replaced a method of this package."""
    owner = next(each for each in type(trainer).__mro__ if method in vars(each))
    return method not in vars(trainer) and owner.__module__.startswith("qlorapp.")


def _newest(output_dir: str) -> str:
    found, skipped = _C.newest_checkpoint(output_dir)
    if found is None and os.path.isdir(output_dir) and not os.path.exists(os.path.join(output_dir, "run.json")):
        found = _last(output_dir)  # of a run that this library did not write
        if found is not None:
            _check(found)
    if found is None:
        raise ValueError(
            f"No valid checkpoint found in output directory ({output_dir}). Skipped: {', '.join(skipped) or 'none'}."
        )
    if skipped:
        _log.warning("[Trainer] resuming from %s; skipped: %s.", found, ", ".join(skipped))
    return str(found)


def _check(folder: str, is_ours: bool = False) -> None:
    """Raises FormatError if a checkpoint of this library is damaged. One of transformers has nothing to check it against."""
    if is_ours or any(
        os.path.exists(os.path.join(folder, name)) for name in ("MANIFEST.json", "run_state.json", run_inputs.FILE)
    ):
        _C.check_checkpoint(folder)
    else:
        _log.warning("[Trainer] %s has no MANIFEST.json, so its files cannot be verified: transformers wrote it.", folder)


def _reason(error: ValueError) -> str:
    """What check_checkpoint found, without its advice for a resume."""
    return str(error).removeprefix("[resume] ").partition(". Resume from")[0]
