# SPDX-License-Identifier: Apache-2.0
"""The part of Trainer that tells: logs, metrics, files, and what it is asked for."""

import datetime
import json
import logging
import os
import pathlib
import time
from typing import Any

from . import prediction
from .trainer_parts import TrainerParts

_log = logging.getLogger("qlorapp")


def _formatted(key: str, value: Any) -> Any:
    if "_mem_" in key:
        return f"{int(value) >> 20}MB"
    if "_runtime" in key:
        return f"{datetime.timedelta(seconds=int(value))}.{int(abs(value - int(value)) * 100):02d}"
    if key == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


class ReportMethods(TrainerParts):
    """Mixed into Trainer."""

    # --- logs

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds epoch and, if they are counted, tokens; puts the entry into state.log_history and tells the callbacks."""
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen not in ("no", False):
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                seconds = time.time() - start_time
                logs["train_runtime"] = round(seconds, 4)
                seen = self.state.num_input_tokens_seen - self._session[0]
                logs["train_tokens_per_second"] = round(seen / seconds, 3)
        entry = prediction.as_numbers({**logs, "step": self.state.global_step})
        self._core.append_log(entry)
        self.state.log_history.append(entry)
        self.callback_handler.call("log", self.control, logs=logs)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Prints them, sorted, one a line."""
        print(f"***** {split} metrics *****")
        width = max(len(key) for key in metrics)
        for key, value in sorted(self.metrics_format(metrics).items()):
            print(f"  {key:<{width}} = {value:.4f}" if isinstance(value, float) else f"  {key:<{width}} = {value}")

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics for people, as transformers writes them: memory in MB, seconds as a clock, operations in GF, numbers to four places."""
        return {key: _formatted(key, value) for key, value in metrics.items()}

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """<split>_results.json in output_dir; combined: into all_results.json as well."""
        folder = pathlib.Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}_results.json").write_text(json.dumps(metrics, indent=4, sort_keys=True) + "\n")
        if combined:
            path = folder / "all_results.json"
            together = {**(json.loads(path.read_text()) if path.exists() else {}), **metrics}
            path.write_text(json.dumps(together, indent=4, sort_keys=True) + "\n")

    # --- what people ask for

    def get_learning_rates(self) -> list[float]:
        """Of each group of the optimizer. @raises ValueError before train() has made one."""
        if self.optimizer is None:
            raise ValueError("[Trainer] there is no optimizer yet: train() makes it.")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The groups of the optimizer, or the one that holds `param`. @raises ValueError before train() has made an optimizer."""
        if self.optimizer is None:
            raise ValueError("[Trainer] there is no optimizer yet: train() makes it.")
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(held is param for held in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    # --- files

    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """The adapter, with trainer_state.json and the tokenizer's files beside it."""
        self._save(os.fspath(output_dir if output_dir is not None else self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What save_model writes. @raises ValueError for values of one's own."""
        if state_dict is not None:
            raise ValueError(
                "[Trainer] _save writes the adapter that C++ holds; state_dict= is not supported. Load the values first: "
                "set_peft_model_state_dict(model, values)."
            )
        folder = output_dir if output_dir is not None else self.args.output_dir
        if self.model is self._made_of.model:
            self._core.save_model(folder)
        else:  # one that a script has put there, and that was not trained here
            self.model.save_pretrained(folder)
        self._save_processing_class(folder)

    def _save_processing_class(self, folder: str) -> None:
        """The tokenizer's files; without a processing_class those of the collator's, as transformers saves them."""
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        save = getattr(tokenizer, "save_pretrained", None)
        if save is not None:
            save(folder)

    def save_state(self) -> None:
        """trainer_state.json into output_dir."""
        os.makedirs(self.args.output_dir, exist_ok=True)
        self._core.write_trainer_state(self.args.output_dir)

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    def end(self) -> None:
        """Nothing is left to finish: there is one process, and what reports to a service closes at the end of train()."""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        """Saves the adapter into output_dir, and says how the folder gets to the hub: nothing here uploads."""
        self.save_model()
        _log.warning(
            "[Trainer] push_to_hub: nothing here uploads. The adapter is saved in %s; push that folder with: hf upload <name> %s",
            self.args.output_dir, self.args.output_dir,
        )  # fmt: skip

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("[Trainer] there is no hyper-parameter search. Make a Trainer for each setting.")
