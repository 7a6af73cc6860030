# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and adapters that are written as one, for transformers' and TRL's trainers."""

import contextlib
import logging
import os
import pathlib
import tempfile
import types
from typing import Any

import transformers

from .. import _C
from . import run_inputs
from .adapter_files import replaced_adapter, saves_together
from .processes import gathered, of_first
from .run_folder import RunFolders, check

_log = logging.getLogger("qlorapp")


class SafeCheckpoints(RunFolders):
    """A mixin before transformers' or TRL's Trainer: checkpoints appear whole, with a manifest, in a folder that one run writes into."""

    #: The checkpoint under construction.
    _writer: Any = None
    #: Folders to push once they are complete.
    _to_push: list[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        saves_together(self.model)

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
            gathered(files, failed)
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
            others = gathered({}, failed) if self.args.world_size > 1 else {}  # they wait for it
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
                check(str(best), is_ours=(self.state.best_global_step or 0) > self._initial_global_step)
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


def _is_ours(trainer: Any, method: str) -> bool:
    """Neither a subclass nor the program has replaced a method of this package."""
    owner = next(each for each in type(trainer).__mro__ if method in vars(each))
    return method not in vars(trainer) and owner.__module__.startswith("qlorapp.")


def _reason(error: ValueError) -> str:
    """What check_checkpoint found, without its advice for a resume."""
    return str(error).removeprefix("[resume] ").partition(". Resume from")[0]
