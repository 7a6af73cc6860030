# SPDX-License-Identifier: Apache-2.0
"""transformers' loop over steps that C++ computes: a window of micro-batches goes to C++ as a whole at its first one."""

import logging
from typing import Any

import torch
import torch.distributed

from .. import _C
from ..precision import own_dtypes
from . import longest_rows, loop_predicate, passes, pristine, rows, run_inputs
from .forward import engine_of
from .training_arguments import for_cpp, has_budget, take_choice

_log = logging.getLogger("qlorapp")


class Windows:
    """The windows of one train()."""

    def __init__(self, trainer: Any) -> None:
        base = loop_predicate.levels_of(trainer.model)[-1]
        engine = engine_of(base)
        assert engine is not None
        self.base, self.engine = base, engine
        engine.keep(passes.kept_by(base, engine.core.body, training=True))
        self.ranks = trainer.args.world_size
        world = torch.distributed.group.WORLD if self.ranks > 1 else None
        self.runner = _C.StepRunner(
            engine.core,
            for_cpp(trainer.args, trainer._train_batch_size),
            trainer._counts_tokens,
            group=world.group_name if world is not None else "",
            longest_row=self._longest_row(trainer) if has_budget(trainer.args) else 0,
        )
        if self.ranks > 1:
            self.runner.check_same("training data (fingerprint)", str(run_inputs.fingerprint_of(trainer)))
        if has_budget(trainer.args):
            take_choice(trainer, self.runner.arguments())
        engine.follow()  # the options may have moved weights
        self._adapter = engine.shown
        self._input_tokens = 0
        #: The micro-batches under way, and whether none of them was given to training_step() yet.
        self.batches: list[Any] = []
        self.is_new = False
        #: The loss of a window's other micro-batches: (), float64.
        self.nothing = torch.zeros((), dtype=torch.float64)
        self._elements = base.num_parameters(exclude_embeddings=True)
        self._is_first = True

    @staticmethod
    def _longest_row(trainer: Any) -> int:
        found = longest_rows.of_plan(trainer)
        if found is None:
            raise ValueError(
                "[Trainer] memory_budget plans for the longest row, and the rows are not known before they come. Train on a data set that has "
                "a length and input_ids, or by SFTTrainer with max_length; or leave it out."
            )
        return found

    def close(self) -> None:
        self.runner.clear_graphs()
        self.engine.forget_keep()
        self.engine.bring_embedding_back()

    def counts(self, rollbacks: int) -> dict[str, int]:
        """For run_report.json."""
        return {
            "optimizer_steps": self.runner.steps,
            "skipped_steps": self.runner.skipped_steps,
            "rollbacks": rollbacks,
            "input_tokens": self._input_tokens,
        }

    def take_scale(self, trainer: Any) -> None:
        """Of a checkpoint, which accelerate has read."""
        if self._has_scale(trainer):
            self.runner.scaler.load_state_dict(trainer.accelerator.scaler.state_dict())

    def begin(self, batches: list[Any]) -> None:
        self.batches, self.is_new = batches, True

    def compute(self, trainer: Any, model: Any) -> torch.Tensor:
        """Gradients of the window. @returns its mean loss: (), on the device. @raises StopRequested."""
        self.is_new = False
        engine, device, step = self.engine, self.engine.core.device, trainer.state.global_step
        if self._is_first:
            self._is_first, self.runner.global_step = False, step
            self._run_worst_case(trainer)
            self.take_scale(trainer)
        if not model.training:
            model.train()
        reason = ""
        if engine.shown != self._adapter or any(
            map(_is_foreign, trainer.callback_handler.callbacks)
        ):  # they may change the model
            reason = pristine.why_not(engine, self.base, needs_gradients=True)
        if engine.shown != self._adapter:
            raise ValueError(
                "[Trainer] a run trains one adapter, in the memory that it had at its start; a callback or an evaluation has changed it. Change "
                "adapters (set_adapter, scaling, dropout, .data of their parameters) before train()."
            )
        if reason:
            engine.say_why(reason)
        if trainer.args.torch_empty_cache_steps and step % trainer.args.torch_empty_cache_steps == 0 and device.type == "cuda":
            torch.cuda.empty_cache()
        with own_dtypes(device):
            unpadded = None if reason else self._unpadded(self.batches)
            if self.ranks > 1 and self.runner.sum([unpadded is None]) != [0]:  # one process needs autograd, and so do all
                unpadded = None
            if unpadded is not None:
                if not self.runner.gradients(unpadded, trainer._is_signalled):
                    raise StopRequested
                self._input_tokens += self.runner.input_tokens
                trainer._note_window(self.runner)
        if unpadded is None:
            self._by_autograd(trainer, model)
        return self.runner.mean_loss

    def _run_worst_case(self, trainer: Any) -> None:
        """Memory runs out at the start if it ever does, where the longest rows are known."""
        wanted, device = getattr(trainer.args, "worst_case_first", None), self.engine.core.device
        if not (device.type != "cpu" if wanted is None else wanted):
            return
        largest = longest_rows.largest_batch(trainer)
        if largest is None and wanted:
            _log.warning(
                "[Trainer] worst_case_first has no effect: the lengths of the rows are not known before they are read."
            )
        with own_dtypes(device):
            unpadded = None if largest is None else self._unpadded([largest])
            if unpadded:
                self.runner.run_worst_case(*unpadded)

    def _unpadded(self, batches: list[Any]) -> list[Any] | None:
        """For C++; None if transformers computes one of them, which is logged."""
        found = []
        for batch in batches:
            repeated = rows.REPEATED if batch.get("position_ids") is not None else set()
            given = {name: value for name, value in batch.items() if name not in repeated}
            reason = passes.beyond(self.engine, self.base, given) or passes.why_padding_counts(given)
            if not reason and given.get("labels") is None:
                reason = "a batch has no labels"
            try:
                if not reason:
                    found.append(passes.unpadded(self.engine.core, given, on_host=True))
            except ValueError as other:
                reason = str(other)
            if reason:
                self.engine.say_why(reason)
                return None
        return found

    def _by_autograd(self, trainer: Any, model: Any) -> None:
        """The same by the trainer's own compute_loss and a backward pass, into the same gradients."""
        runner, core, device = self.runner, self.engine.core, trainer.args.device
        if (
            runner.is_open and trainer.args.process_index == 0
        ):  # a stream's last window, which had no update: transformers adds the next to it
            core.bind_gradients()  # of several processes one keeps the sum
        else:
            core.zero_grad()
        count = trainer._get_num_items_in_batch(self.batches, device)
        is_mean = trainer.model_accepts_loss_kwargs and count is not None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in self.batches:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=count)
            if not is_mean:
                loss = loss / len(self.batches)
            loss = loss / self.ranks  # transformers multiplies by their number, or expects DistributedDataParallel to average
            (loss * runner.scale().to(loss.device)).backward()
            total += loss.detach()
        runner.take_gradients(total, len(self.batches))

    def flos(self, inputs: Any) -> int:
        return 6 * int(inputs["input_ids"].numel()) * int(self._elements) if "input_ids" in inputs else 0

    def _has_scale(self, trainer: Any) -> bool:
        return trainer.accelerator.scaler is not None and self.runner.scaler.is_enabled()

    def show_scale(self, trainer: Any) -> None:
        """Before a checkpoint: accelerate writes the loss scale."""
        if self._has_scale(trainer):
            trainer.accelerator.scaler.load_state_dict(self.runner.scaler.state_dict())


def _is_foreign(callback: Any) -> bool:
    return not type(callback).__module__.startswith(("transformers.", "trl.", "qlorapp."))


class StopRequested(BaseException):
    """One of the processes got a signal. The run ends here."""
