# SPDX-License-Identifier: Apache-2.0
"""The set_… methods of TrainingArguments: groups of options under transformers' shorter names, checked as when they are made."""

import copy
from typing import Any

from .field_table import plain


def _check_steps(where: str, strategy: Any, steps: float) -> None:
    if plain(strategy) == "steps" and steps == 0:
        raise ValueError(
            f"[{where}] steps must be positive with strategy='steps'; got 0. Give a number of steps, or strategy='no'."
        )


class ArgumentGroups:
    """Mixed into TrainingArguments. Each method gives all options of its group, those that are left out their defaults."""

    def _set(self: Any, **values: Any) -> Any:
        """Sets all of them or, where one is refused, none. @returns the arguments."""
        changed = copy.copy(self)
        vars(changed).update(values)
        changed.__post_init__()
        vars(self).update(vars(changed))
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Any:
        """The basics of a run. gradient_checkpointing: the older name of activation_checkpointing."""
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            gradient_checkpointing=activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing,
        )

    def set_evaluate(
        self,
        strategy: str = "no",
        steps: float = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Any:
        """When and how evaluations run."""
        _check_steps("set_evaluate", strategy, steps)
        return self._set(
            eval_strategy=strategy,
            do_eval=plain(strategy) != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=0 if delay is None else delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Any:
        """For predict()."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self, strategy: str = "steps", steps: float = 500, total_limit: int | None = None, on_each_node: bool = False
    ) -> Any:
        """When checkpoints are written, and how many stay."""
        _check_steps("set_save", strategy, steps)
        return self._set(save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node)

    def set_logging(
        self,
        strategy: str = "steps",
        steps: float = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Any:
        """What is logged, when, and to whom. on_each_node and replica_level, where given, are said to have no effect."""
        _check_steps("set_logging", strategy, steps)
        given = {"log_on_each_node": on_each_node, "log_level_replica": replica_level}
        others = {"log_on_each_node": False, "log_level_replica": "passive"}  # left out: nothing to say about them
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            **{field: value for field, value in given.items() if value != others[field]},
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Any:
        """Sets the options, which are said to have no effect: nothing here uploads."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Any:
        """The optimizer and its numbers."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Any:
        """The schedule and its length."""
        return self._set(lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps)

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Any:
        """Batches, and what workers would do, which is said to have no effect."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
