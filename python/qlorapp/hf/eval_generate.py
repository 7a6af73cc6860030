# SPDX-License-Identifier: Apache-2.0
"""Answers to evaluation rows while a run trains, and the base against the adapter at its end."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from .. import _C
from . import generating, rows, sample
from .forward import engine_of

_log = logging.getLogger("qlorapp")
Score = dict[str, float | None]


class EvalGenerate(transformers.TrainerCallback):
    """Generates greedy answers to held-out rows beside each evaluation, and compares base and adapter when the training has ended.

    An evaluation row is asked by its labels: its prompt is what stands before the first label that is not -100, the expected answer the
    labels that follow. The metrics get `eval_exact_match` and `eval_stopped`, and the answers are appended to `eval_answers.jsonl` in
    output_dir. The comparison is printed, drawn as `comparison.svg`, and put into run_report.json (docs/formats/run_report.md). The training
    itself does not change. What fails here is left out with a warning.
    """

    #: Of the last run, as in run_report.json; None: not compared.
    comparison: dict[str, Any] | None = None

    def __init__(self, answers: int = 8, max_new_tokens: int = 128) -> None:
        """
        Args:
            answers: rows that are asked, evenly spaced; 0: none, and the comparison has losses alone.
            max_new_tokens: tokens of an answer, at most.

        Raises:
            ValueError: for a number out of range.
        """
        if answers < 0 or max_new_tokens < 1:
            raise ValueError(
                f"[EvalGenerate] answers must be >= 0 and max_new_tokens >= 1; got {answers} and {max_new_tokens}."
            )
        self.answers, self.max_new_tokens = answers, max_new_tokens
        self._file: Any = None
        #: (data set, its rows as tokens and labels)
        self._read: tuple[Any, list[Any]] | None = None
        self._said: set[str] = set()
        #: Of the last evaluation: step, prefix of its metrics, judged answers and their number.
        self._last: tuple[int, str, Any, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.comparison = self._file = self._last = None
        if state.is_world_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(args.output_dir, "comparison.svg"))  # of another run
            self._file = _C.AnswerFile(str(args.output_dir), state.global_step or None)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        """For trainers of transformers and TRL. This library's call measure() before they log."""
        prefix = next((name.removesuffix("_loss") for name in metrics or {} if name.endswith("_loss")), "eval")
        if metrics is None or f"{prefix}_exact_match" in metrics:
            return
        found = self.measure(args, state, prefix, **given)
        metrics.update(found)
        if state.log_history and f"{prefix}_loss" in state.log_history[-1]:
            state.log_history[-1].update(found)

    def measure(
        self, args: Any, state: Any, prefix: str, model: Any, processing_class: Any, eval_dataloader: Any, **_: Any
    ) -> dict[str, float]:
        """Asks the rows of an evaluation. @returns its metrics; empty: nothing was asked; NaN: it failed."""
        with self._left_out(f"the answers of step {state.global_step} are left out", model):
            judged, count = self._answers(args, model, processing_class, eval_dataloader)
            if judged is None:
                return {}
            self._last = state.global_step, prefix, judged, count
            if self._file is not None:
                data = prefix.removeprefix("eval").removeprefix("_")
                self._file.add(state.global_step, judged.lines(state.global_step, data), data)
            return {f"{prefix}_exact_match": judged.exact_matches / count, f"{prefix}_stopped": judged.stopped / count}
        return dict.fromkeys((f"{prefix}_exact_match", f"{prefix}_stopped"), math.nan)  # metric_for_best_model: not the best

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        processing_class: Any = None,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Compares. Each of several processes does, as they may hold parts of one model; process 0 shows the result."""
        with self._left_out("base against adapter: not compared", model):
            if not hasattr(model, "disable_adapter"):
                self._say("base against adapter: not compared, as the model has no adapter of PEFT")
                return
            if _is_sharded(model):
                self._say("base against adapter: not compared, as the base is divided over several processes")
                return
            if eval_dataloader is None:
                self._say("base against adapter: no held-out rows are compared, as the run had no evaluation (eval_strategy)")
            measured: dict[str, int] = {}
            last, self._last = self._last, None
            asked = last[2:] if last and last[:2] == (state.global_step, "eval") and not args.load_best_model_at_end else None
            adapter = self._score(args, model, processing_class, eval_dataloader, measured, asked)
            base = None
            if not _base_was_changed(model):
                with model.disable_adapter():
                    base = self._score(args, model, processing_class, eval_dataloader, measured)
            found = _C.Comparison(**measured, base=base, adapter=adapter)
            if found.is_empty:
                self._say("base against adapter: nothing to compare on, as there are neither evaluation rows nor a tokenizer")
                return
            self.comparison = json.loads(found.json())
            if state.is_world_process_zero:
                found.write_svg(str(args.output_dir))
                print("\n".join(found.table()), flush=True)

    def _score(
        self,
        args: Any,
        model: Any,
        tokenizer: Any,
        dataloader: Any,
        measured: dict[str, int],
        asked: tuple[Any, int] | None = None,
    ) -> Score:
        """measured: gets what was measured on. asked: the judged answers, if they are known."""
        score: Score = {}
        held_out = self._rows(dataloader)
        measured.update(eval_rows=len(held_out or ()), answers=0, neutral_tokens=0)
        with _evaluating(model):
            if held_out:
                data, size, total = dataloader.dataset, args.per_device_eval_batch_size, 0.0
                for begin in range(0, len(data), size):
                    batch = [data[i] for i in range(begin, min(begin + size, len(data)))]
                    total += _loss(model, dataloader.collate_fn(batch)) * len(batch)
                score["eval_loss"] = total / len(data)
            tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
            if tokenizer is not None:
                ids = torch.tensor([tokenizer(_C.neutral_text())["input_ids"][: model.config.max_position_embeddings]])
                score["neutral_loss"] = _loss(model, {"input_ids": ids, "labels": ids})
                measured["neutral_tokens"] = ids.numel()
        judged, count = asked or self._answers(args, model, tokenizer, dataloader)
        if judged is not None:
            measured["answers"] = count
            score |= {"exact_matches": judged.exact_matches, "stopped": judged.stopped}
        return score

    def _answers(self, args: Any, model: Any, tokenizer: Any, dataloader: Any) -> tuple[Any, int]:
        """The judged answers and their number; None: no row was asked."""
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        if self.answers == 0 or dataloader is None:
            return None, 0
        held_out, reason = self._rows(dataloader), ""
        if tokenizer is None:
            reason = "the trainer has no processing_class"
        elif _is_sharded(model):
            reason = "the base is divided over several processes"
        if held_out is None or reason:
            self._say(
                f"EvalGenerate: no answers, as {reason or 'the evaluation rows are streamed, or have no labels for their tokens'}"
            )
            return None, 0
        ends = generating.ends_of(model, tokenizer)
        core = _core_of(model)
        positions = model.config.max_position_embeddings if core is None else core.position_limit
        questions = _C.choose_questions(held_out, self.answers, ends, positions)
        if not questions:
            self._say("EvalGenerate: no answers, as the evaluation rows have no prompt: they are trained as a whole")
            return None, 0
        with _evaluating(model):
            found = generating.generate(
                model, [question.prompt for question in questions], tokenizer,
                max_new_tokens=self.max_new_tokens, fits_positions=True, max_rows=args.per_device_eval_batch_size,
            )  # fmt: skip
        texts = [answer.token_ids for answer in found]
        judged = _C.judge_answers(
            questions, texts, ends, lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))
        )
        return judged, len(questions)

    def _rows(self, dataloader: Any) -> list[Any] | None:
        """[(tokens, labels)] of a data set, of a pack the first row. None: they cannot be read by number, or have no labels."""
        data: Any = getattr(dataloader, "dataset", None)
        if not rows.is_indexed(data):
            return None
        if self._read is None or self._read[0] is not data:
            self._read = data, [sample.first_row(dataloader.collate_fn([data[i]])) for i in range(len(data))]
        return None if any(row is None for row in self._read[1]) else self._read[1]

    @contextlib.contextmanager
    def _left_out(self, what: str, model: Any) -> Iterator[None]:
        """Logs an error: none of this ends a run."""
        try:
            yield
        except Exception as error:
            _log.warning("[EvalGenerate] %s: %s", what, (str(error).splitlines() or [type(error).__name__])[0])
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.info("%s", line)


def measure(trainer: Any, dataloader: Any, metrics: dict[str, float], prefix: str) -> None:
    """For a trainer whose evaluation has ended and is not logged yet: adds to its metrics."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EvalGenerate):
            given = {"model": trainer.model, "processing_class": trainer.processing_class, "eval_dataloader": dataloader}
            metrics.update(callback.measure(trainer.args, trainer.state, prefix, **given))


def comparison_of(trainer: Any) -> dict[str, Any]:
    """{"comparison": …} for run_report.json; empty if there is none."""
    found = [one.comparison for one in trainer.callback_handler.callbacks if isinstance(one, EvalGenerate) and one.comparison]
    return {"comparison": found[0]} if found else {}


def _loss(model: Any, batch: dict[str, Any]) -> float:
    """The mean of a batch's targets."""
    given = {name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.no_grad():
        return float(model(**given).loss)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """In eval mode, with the random numbers of the run put back behind it."""
    was_training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        model.train(was_training)


def _core_of(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    engine = engine_of(base)
    return None if engine is None else engine.core


def _is_sharded(model: Any) -> bool:
    core = _core_of(model)
    return core is not None and bool(core.is_sharded)


def _base_was_changed(model: Any) -> bool:
    """Whether an initialization took a part out of the base, so that the model without its adapter is another one."""
    core = _core_of(model)
    if core is not None and core.base_was_changed:
        return True
    inits = [
        str(config.init_lora_weights).lower() for config in model.peft_config.values() if hasattr(config, "init_lora_weights")
    ]
    return any(init.startswith(("pissa", "olora", "loftq", "corda", "orthogonal")) for init in inits)
