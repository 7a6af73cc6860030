# SPDX-License-Identifier: Apache-2.0
# Made by scripts/make_stubs.py from the field tables. Do not edit.
import dataclasses
import os
import typing

import torch

from .field_table import Table
from .peft_config import PeftConfig
from .quantization import QuantizationTable
from .sft_config import SFTTable
from .training_arguments import TrainingTable

@dataclasses.dataclass
class TrainingArguments(TrainingTable):
    """What a run is told: transformers' names, meanings and defaults, those of version 4 and of version 5.

    Every option is used, or said to have no effect, or refused with a reason; docs/configuration.md lists them all."""
    output_dir: str
    overwrite_output_dir: bool
    do_train: bool
    do_eval: bool
    do_predict: bool
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    num_train_epochs: float
    max_steps: int
    learning_rate: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, typing.Any] | None
    warmup_steps: float
    warmup_ratio: float
    optim: str
    optim_args: str | None
    optim_target_modules: dict[str, typing.Any] | str | None
    adafactor: bool
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    label_smoothing_factor: float
    neftune_noise_alpha: float | None
    average_tokens_across_devices: bool
    bf16: bool
    fp16: bool
    bf16_full_eval: bool
    fp16_full_eval: bool
    fp16_opt_level: str
    half_precision_backend: str
    fp16_backend: str
    tf32: bool | None
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, typing.Any] | None
    checkpoint_keep: list[str]
    loss_chunk_rows: int
    mlp_tile_rows: int
    weight_workspace: str
    embedding_on_host: bool
    memory_budget: str
    fp8: bool
    cuda_graphs: bool
    torch_empty_cache_steps: int | None
    auto_find_batch_size: bool
    worst_case_first: bool | None
    use_cache: bool
    use_liger_kernel: bool
    liger_kernel_config: dict[str, typing.Any] | str | None
    count_position_zero: bool
    max_length: int
    completion_only_loss: bool | None
    packing: bool
    packing_strategy: str
    eval_packing: bool | None
    log_num_tokens: bool
    train_sampling_strategy: str
    group_by_length: bool
    length_column_name: str
    dataloader_drop_last: bool
    remove_unused_columns: bool
    label_names: list[str] | None
    past_index: int
    seed: int
    data_seed: int | None
    full_determinism: bool
    resume_from_checkpoint: str | None
    ignore_data_skip: bool
    restore_callback_states_from_checkpoint: bool
    logging_strategy: str
    logging_steps: float
    logging_first_step: bool
    logging_nan_inf_filter: bool
    include_num_input_tokens_seen: bool | str
    include_tokens_per_second: bool
    log_level: str
    log_level_replica: str
    log_on_each_node: bool
    disable_tqdm: bool | None
    eval_strategy: str
    eval_steps: float | None
    eval_delay: float
    eval_on_start: bool
    prediction_loss_only: bool
    eval_accumulation_steps: int | None
    eval_do_concat_batches: bool
    eval_use_gather_object: bool
    batch_eval_metrics: bool
    include_for_metrics: list[str]
    include_inputs_for_metrics: bool
    jit_mode_eval: bool
    use_legacy_prediction_loop: bool
    save_strategy: str
    save_steps: float
    save_total_limit: int | None
    save_only_model: bool
    save_safetensors: bool
    save_on_each_node: bool
    enable_jit_checkpoint: bool
    load_best_model_at_end: bool
    metric_for_best_model: str | None
    greater_is_better: bool | None
    skip_memory_metrics: bool
    dataloader_num_workers: int
    dataloader_pin_memory: bool
    dataloader_persistent_workers: bool
    dataloader_prefetch_factor: int | None
    dataloader_multiprocessing_context: str | None
    dataloader_in_order: bool
    use_cpu: bool
    use_mps_device: bool
    use_ipex: bool
    tpu_num_cores: int | None
    tpu_metrics_debug: bool
    torch_compile: bool
    torch_compile_backend: str | None
    torch_compile_mode: str | None
    torchdynamo: str | None
    debug: dict[str, typing.Any] | str | None
    local_rank: int
    ddp_backend: str | None
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    ddp_timeout: int
    fsdp: dict[str, typing.Any] | str | None
    fsdp_config: dict[str, typing.Any] | str | None
    fsdp_min_num_params: int
    fsdp_transformer_layer_cls_to_wrap: str | None
    deepspeed: dict[str, typing.Any] | str | None
    parallelism_config: dict[str, typing.Any] | str | None
    accelerator_config: dict[str, typing.Any] | str | None
    dispatch_batches: bool | None
    split_batches: bool | None
    mp_parameters: str
    ray_scope: str | None
    report_to: list[str]
    logging_dir: str | None
    run_name: str | None
    project: str
    trackio_space_id: str | None
    trackio_bucket_id: str | None
    trackio_static_space_id: dict[str, typing.Any] | str | None
    push_to_hub: bool
    hub_token: str | None
    hub_private_repo: bool | None
    hub_model_id: str | None
    hub_strategy: str
    hub_always_push: bool
    hub_revision: str | None
    push_to_hub_organization: str | None
    @property
    def activation_checkpointing(self) -> bool: ...
    @property
    def activation_checkpointing_kwargs(self) -> dict[str, typing.Any] | None: ...
    @property
    def evaluation_strategy(self) -> str: ...
    @property
    def max_seq_length(self) -> int: ...
    @property
    def no_cuda(self) -> bool: ...
    @property
    def per_gpu_eval_batch_size(self) -> int: ...
    @property
    def per_gpu_train_batch_size(self) -> int: ...
    @property
    def push_to_hub_model_id(self) -> str | None: ...
    @property
    def push_to_hub_token(self) -> str | None: ...
    def __init__(
        self,
        output_dir: str | os.PathLike[str] = ...,
        overwrite_output_dir: bool = ...,
        do_train: bool = ...,
        do_eval: bool = ...,
        do_predict: bool = ...,
        per_device_train_batch_size: int = ...,
        per_device_eval_batch_size: int = ...,
        gradient_accumulation_steps: int = ...,
        num_train_epochs: float = ...,
        max_steps: int = ...,
        learning_rate: float = ...,
        lr_scheduler_type: str = ...,
        lr_scheduler_kwargs: dict[str, typing.Any] | None | str = ...,
        warmup_steps: float = ...,
        warmup_ratio: float = ...,
        optim: str = ...,
        optim_args: str | None = ...,
        optim_target_modules: dict[str, typing.Any] | str | None = ...,
        adafactor: bool = ...,
        weight_decay: float = ...,
        adam_beta1: float = ...,
        adam_beta2: float = ...,
        adam_epsilon: float = ...,
        max_grad_norm: float = ...,
        label_smoothing_factor: float = ...,
        neftune_noise_alpha: float | None = ...,
        average_tokens_across_devices: bool = ...,
        bf16: bool = ...,
        fp16: bool = ...,
        bf16_full_eval: bool = ...,
        fp16_full_eval: bool = ...,
        fp16_opt_level: str = ...,
        half_precision_backend: str = ...,
        fp16_backend: str = ...,
        tf32: bool | None = ...,
        gradient_checkpointing: bool = ...,
        gradient_checkpointing_kwargs: dict[str, typing.Any] | None | str = ...,
        checkpoint_keep: list[str] | str | None = ...,
        loss_chunk_rows: int = ...,
        mlp_tile_rows: int = ...,
        weight_workspace: str = ...,
        embedding_on_host: bool = ...,
        memory_budget: str = ...,
        fp8: bool = ...,
        cuda_graphs: bool = ...,
        torch_empty_cache_steps: int | None = ...,
        auto_find_batch_size: bool = ...,
        worst_case_first: bool | None = ...,
        use_cache: bool = ...,
        use_liger_kernel: bool = ...,
        liger_kernel_config: dict[str, typing.Any] | str | None = ...,
        count_position_zero: bool = ...,
        max_length: int = ...,
        completion_only_loss: bool | None = ...,
        packing: bool = ...,
        packing_strategy: str = ...,
        eval_packing: bool | None = ...,
        log_num_tokens: bool = ...,
        train_sampling_strategy: str = ...,
        group_by_length: bool = ...,
        length_column_name: str = ...,
        dataloader_drop_last: bool = ...,
        remove_unused_columns: bool = ...,
        label_names: list[str] | None | str | None = ...,
        past_index: int = ...,
        seed: int = ...,
        data_seed: int | None = ...,
        full_determinism: bool = ...,
        resume_from_checkpoint: str | None = ...,
        ignore_data_skip: bool = ...,
        restore_callback_states_from_checkpoint: bool = ...,
        logging_strategy: str = ...,
        logging_steps: float = ...,
        logging_first_step: bool = ...,
        logging_nan_inf_filter: bool = ...,
        include_num_input_tokens_seen: bool | str = ...,
        include_tokens_per_second: bool = ...,
        log_level: str = ...,
        log_level_replica: str = ...,
        log_on_each_node: bool = ...,
        disable_tqdm: bool | None = ...,
        eval_strategy: str = ...,
        eval_steps: float | None = ...,
        eval_delay: float = ...,
        eval_on_start: bool = ...,
        prediction_loss_only: bool = ...,
        eval_accumulation_steps: int | None = ...,
        eval_do_concat_batches: bool = ...,
        eval_use_gather_object: bool = ...,
        batch_eval_metrics: bool = ...,
        include_for_metrics: list[str] | str | None = ...,
        include_inputs_for_metrics: bool = ...,
        jit_mode_eval: bool = ...,
        use_legacy_prediction_loop: bool = ...,
        save_strategy: str = ...,
        save_steps: float = ...,
        save_total_limit: int | None = ...,
        save_only_model: bool = ...,
        save_safetensors: bool = ...,
        save_on_each_node: bool = ...,
        enable_jit_checkpoint: bool = ...,
        load_best_model_at_end: bool = ...,
        metric_for_best_model: str | None = ...,
        greater_is_better: bool | None = ...,
        skip_memory_metrics: bool = ...,
        dataloader_num_workers: int = ...,
        dataloader_pin_memory: bool = ...,
        dataloader_persistent_workers: bool = ...,
        dataloader_prefetch_factor: int | None = ...,
        dataloader_multiprocessing_context: str | None = ...,
        dataloader_in_order: bool = ...,
        use_cpu: bool = ...,
        use_mps_device: bool = ...,
        use_ipex: bool = ...,
        tpu_num_cores: int | None = ...,
        tpu_metrics_debug: bool = ...,
        torch_compile: bool = ...,
        torch_compile_backend: str | None = ...,
        torch_compile_mode: str | None = ...,
        torchdynamo: str | None = ...,
        debug: dict[str, typing.Any] | str | None = ...,
        local_rank: int = ...,
        ddp_backend: str | None = ...,
        ddp_find_unused_parameters: bool | None = ...,
        ddp_bucket_cap_mb: int | None = ...,
        ddp_broadcast_buffers: bool | None = ...,
        ddp_static_graph: bool | None = ...,
        ddp_timeout: int = ...,
        fsdp: dict[str, typing.Any] | str | None = ...,
        fsdp_config: dict[str, typing.Any] | str | None = ...,
        fsdp_min_num_params: int = ...,
        fsdp_transformer_layer_cls_to_wrap: str | None = ...,
        deepspeed: dict[str, typing.Any] | str | None = ...,
        parallelism_config: dict[str, typing.Any] | str | None = ...,
        accelerator_config: dict[str, typing.Any] | str | None = ...,
        dispatch_batches: bool | None = ...,
        split_batches: bool | None = ...,
        mp_parameters: str = ...,
        ray_scope: str | None = ...,
        report_to: list[str] | str | None = ...,
        logging_dir: str | None = ...,
        run_name: str | None = ...,
        project: str = ...,
        trackio_space_id: str | None = ...,
        trackio_bucket_id: str | None = ...,
        trackio_static_space_id: dict[str, typing.Any] | str | None = ...,
        push_to_hub: bool = ...,
        hub_token: str | None = ...,
        hub_private_repo: bool | None = ...,
        hub_model_id: str | None = ...,
        hub_strategy: str = ...,
        hub_always_push: bool = ...,
        hub_revision: str | None = ...,
        push_to_hub_organization: str | None = ...,
        *,
        activation_checkpointing: bool | None = ...,
        activation_checkpointing_kwargs: dict[str, typing.Any] | None | str | None = ...,
        evaluation_strategy: str | None = ...,
        max_seq_length: int | None = ...,
        no_cuda: bool | None = ...,
        per_gpu_eval_batch_size: int | None = ...,
        per_gpu_train_batch_size: int | None = ...,
        push_to_hub_model_id: str | None | None = ...,
        push_to_hub_token: str | None | None = ...,
    ) -> None: ...

@dataclasses.dataclass
class SFTConfig(SFTTable, TrainingArguments):
    """What a supervised fine-tuning run is told: TRL's names, defaults and meanings. TrainingArguments' options are all here too.

    Every option is used, or said to have no effect, or refused with a reason; docs/configuration.md lists them all."""
    bf16: bool | None  # type: ignore[assignment]
    max_length: int | None  # type: ignore[assignment]
    model_init_kwargs: dict[str, typing.Any] | None
    chat_template_path: str | None
    trust_remote_code: bool
    router_aux_loss_coef: float | None
    dataset_text_field: str
    dataset_kwargs: dict[str, typing.Any] | None
    dataset_num_proc: int | None
    dataset_batch_size: int | None
    num_of_sequences: int | None
    chars_per_token: float | None
    eos_token: str | None
    pad_token: str | None
    truncation_mode: str
    shuffle_dataset: bool
    padding_free: bool
    pad_to_multiple_of: int | str | None
    assistant_only_loss: bool
    loss_type: str
    activation_offloading: bool
    @property
    def use_liger(self) -> bool: ...
    def __init__(
        self,
        output_dir: str | os.PathLike[str] = ...,
        overwrite_output_dir: bool = ...,
        do_train: bool = ...,
        do_eval: bool = ...,
        do_predict: bool = ...,
        per_device_train_batch_size: int = ...,
        per_device_eval_batch_size: int = ...,
        gradient_accumulation_steps: int = ...,
        num_train_epochs: float = ...,
        max_steps: int = ...,
        learning_rate: float = ...,
        lr_scheduler_type: str = ...,
        lr_scheduler_kwargs: dict[str, typing.Any] | None | str = ...,
        warmup_steps: float = ...,
        warmup_ratio: float = ...,
        optim: str = ...,
        optim_args: str | None = ...,
        optim_target_modules: dict[str, typing.Any] | str | None = ...,
        adafactor: bool = ...,
        weight_decay: float = ...,
        adam_beta1: float = ...,
        adam_beta2: float = ...,
        adam_epsilon: float = ...,
        max_grad_norm: float = ...,
        label_smoothing_factor: float = ...,
        neftune_noise_alpha: float | None = ...,
        average_tokens_across_devices: bool = ...,
        bf16: bool | None = ...,
        fp16: bool = ...,
        bf16_full_eval: bool = ...,
        fp16_full_eval: bool = ...,
        fp16_opt_level: str = ...,
        half_precision_backend: str = ...,
        fp16_backend: str = ...,
        tf32: bool | None = ...,
        gradient_checkpointing: bool = ...,
        gradient_checkpointing_kwargs: dict[str, typing.Any] | None | str = ...,
        checkpoint_keep: list[str] | str | None = ...,
        loss_chunk_rows: int = ...,
        mlp_tile_rows: int = ...,
        weight_workspace: str = ...,
        embedding_on_host: bool = ...,
        memory_budget: str = ...,
        fp8: bool = ...,
        cuda_graphs: bool = ...,
        torch_empty_cache_steps: int | None = ...,
        auto_find_batch_size: bool = ...,
        worst_case_first: bool | None = ...,
        use_cache: bool = ...,
        use_liger_kernel: bool = ...,
        liger_kernel_config: dict[str, typing.Any] | str | None = ...,
        count_position_zero: bool = ...,
        max_length: int | None = ...,
        completion_only_loss: bool | None = ...,
        packing: bool = ...,
        packing_strategy: str = ...,
        eval_packing: bool | None = ...,
        log_num_tokens: bool = ...,
        train_sampling_strategy: str = ...,
        group_by_length: bool = ...,
        length_column_name: str = ...,
        dataloader_drop_last: bool = ...,
        remove_unused_columns: bool = ...,
        label_names: list[str] | None | str | None = ...,
        past_index: int = ...,
        seed: int = ...,
        data_seed: int | None = ...,
        full_determinism: bool = ...,
        resume_from_checkpoint: str | None = ...,
        ignore_data_skip: bool = ...,
        restore_callback_states_from_checkpoint: bool = ...,
        logging_strategy: str = ...,
        logging_steps: float = ...,
        logging_first_step: bool = ...,
        logging_nan_inf_filter: bool = ...,
        include_num_input_tokens_seen: bool | str = ...,
        include_tokens_per_second: bool = ...,
        log_level: str = ...,
        log_level_replica: str = ...,
        log_on_each_node: bool = ...,
        disable_tqdm: bool | None = ...,
        eval_strategy: str = ...,
        eval_steps: float | None = ...,
        eval_delay: float = ...,
        eval_on_start: bool = ...,
        prediction_loss_only: bool = ...,
        eval_accumulation_steps: int | None = ...,
        eval_do_concat_batches: bool = ...,
        eval_use_gather_object: bool = ...,
        batch_eval_metrics: bool = ...,
        include_for_metrics: list[str] | str | None = ...,
        include_inputs_for_metrics: bool = ...,
        jit_mode_eval: bool = ...,
        use_legacy_prediction_loop: bool = ...,
        save_strategy: str = ...,
        save_steps: float = ...,
        save_total_limit: int | None = ...,
        save_only_model: bool = ...,
        save_safetensors: bool = ...,
        save_on_each_node: bool = ...,
        enable_jit_checkpoint: bool = ...,
        load_best_model_at_end: bool = ...,
        metric_for_best_model: str | None = ...,
        greater_is_better: bool | None = ...,
        skip_memory_metrics: bool = ...,
        dataloader_num_workers: int = ...,
        dataloader_pin_memory: bool = ...,
        dataloader_persistent_workers: bool = ...,
        dataloader_prefetch_factor: int | None = ...,
        dataloader_multiprocessing_context: str | None = ...,
        dataloader_in_order: bool = ...,
        use_cpu: bool = ...,
        use_mps_device: bool = ...,
        use_ipex: bool = ...,
        tpu_num_cores: int | None = ...,
        tpu_metrics_debug: bool = ...,
        torch_compile: bool = ...,
        torch_compile_backend: str | None = ...,
        torch_compile_mode: str | None = ...,
        torchdynamo: str | None = ...,
        debug: dict[str, typing.Any] | str | None = ...,
        local_rank: int = ...,
        ddp_backend: str | None = ...,
        ddp_find_unused_parameters: bool | None = ...,
        ddp_bucket_cap_mb: int | None = ...,
        ddp_broadcast_buffers: bool | None = ...,
        ddp_static_graph: bool | None = ...,
        ddp_timeout: int = ...,
        fsdp: dict[str, typing.Any] | str | None = ...,
        fsdp_config: dict[str, typing.Any] | str | None = ...,
        fsdp_min_num_params: int = ...,
        fsdp_transformer_layer_cls_to_wrap: str | None = ...,
        deepspeed: dict[str, typing.Any] | str | None = ...,
        parallelism_config: dict[str, typing.Any] | str | None = ...,
        accelerator_config: dict[str, typing.Any] | str | None = ...,
        dispatch_batches: bool | None = ...,
        split_batches: bool | None = ...,
        mp_parameters: str = ...,
        ray_scope: str | None = ...,
        report_to: list[str] | str | None = ...,
        logging_dir: str | None = ...,
        run_name: str | None = ...,
        project: str = ...,
        trackio_space_id: str | None = ...,
        trackio_bucket_id: str | None = ...,
        trackio_static_space_id: dict[str, typing.Any] | str | None = ...,
        push_to_hub: bool = ...,
        hub_token: str | None = ...,
        hub_private_repo: bool | None = ...,
        hub_model_id: str | None = ...,
        hub_strategy: str = ...,
        hub_always_push: bool = ...,
        hub_revision: str | None = ...,
        push_to_hub_organization: str | None = ...,
        model_init_kwargs: dict[str, typing.Any] | None | str = ...,
        chat_template_path: str | None = ...,
        trust_remote_code: bool = ...,
        router_aux_loss_coef: float | None = ...,
        dataset_text_field: str = ...,
        dataset_kwargs: dict[str, typing.Any] | None | str = ...,
        dataset_num_proc: int | None = ...,
        dataset_batch_size: int | None = ...,
        num_of_sequences: int | None = ...,
        chars_per_token: float | None = ...,
        eos_token: str | None = ...,
        pad_token: str | None = ...,
        truncation_mode: str = ...,
        shuffle_dataset: bool = ...,
        padding_free: bool = ...,
        pad_to_multiple_of: int | str | None = ...,
        assistant_only_loss: bool = ...,
        loss_type: str = ...,
        activation_offloading: bool = ...,
        *,
        activation_checkpointing: bool | None = ...,
        activation_checkpointing_kwargs: dict[str, typing.Any] | None | str | None = ...,
        evaluation_strategy: str | None = ...,
        max_seq_length: int | None | None = ...,
        no_cuda: bool | None = ...,
        per_gpu_eval_batch_size: int | None = ...,
        per_gpu_train_batch_size: int | None = ...,
        push_to_hub_model_id: str | None | None = ...,
        push_to_hub_token: str | None | None = ...,
        use_liger: bool | None = ...,
    ) -> None: ...

@dataclasses.dataclass
class LoraConfig(PeftConfig, Table):
    """Which linear layers get a low-rank adapter, and of what rank and weight: PEFT's names and rules."""
    r: int
    target_modules: list[str] | str | None
    exclude_modules: list[str] | str | None
    lora_alpha: float
    lora_dropout: float
    fan_in_fan_out: bool
    bias: str
    use_rslora: bool
    modules_to_save: list[str] | None
    init_lora_weights: bool | str
    layers_to_transform: list[int] | None
    layers_pattern: list[str] | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    megatron_config: dict[str, typing.Any] | str | None
    megatron_core: str
    trainable_token_indices: dict[str, typing.Any] | str | None
    loftq_config: dict[str, typing.Any] | str | None
    eva_config: dict[str, typing.Any] | str | None
    corda_config: dict[str, typing.Any] | str | None
    lora_ga_config: dict[str, typing.Any] | str | None
    use_dora: bool
    velora_config: dict[str, typing.Any] | str | None
    alora_invocation_tokens: list[int] | None
    use_qalora: bool
    qalora_group_size: int
    monteclora_config: dict[str, typing.Any] | str | None
    layer_replication: dict[str, typing.Any] | str | None
    runtime_config: dict[str, typing.Any] | str | None
    lora_bias: bool
    target_parameters: list[str] | None
    use_bdlora: dict[str, typing.Any] | str | None
    arrow_config: dict[str, typing.Any] | str | None
    kasa_config: dict[str, typing.Any] | str | None
    ensure_weight_tying: bool
    task_type: str | None
    peft_type: str
    auto_mapping: dict[str, typing.Any] | str | None
    peft_version: str | None
    base_model_name_or_path: str | None
    revision: str | None
    inference_mode: bool
    @property
    def alpha(self) -> float: ...
    @property
    def lora_r(self) -> int: ...
    @property
    def lora_target_modules(self) -> list[str] | str | None: ...
    def __init__(
        self,
        r: int = ...,
        target_modules: list[str] | str | None = ...,
        exclude_modules: list[str] | str | None = ...,
        lora_alpha: float = ...,
        lora_dropout: float = ...,
        fan_in_fan_out: bool = ...,
        bias: str = ...,
        use_rslora: bool = ...,
        modules_to_save: list[str] | None | str | None = ...,
        init_lora_weights: bool | str = ...,
        layers_to_transform: list[int] | None | str | None = ...,
        layers_pattern: list[str] | None | str | None = ...,
        rank_pattern: dict[str, int] = ...,
        alpha_pattern: dict[str, float] = ...,
        megatron_config: dict[str, typing.Any] | str | None = ...,
        megatron_core: str = ...,
        trainable_token_indices: dict[str, typing.Any] | str | None = ...,
        loftq_config: dict[str, typing.Any] | str | None = ...,
        eva_config: dict[str, typing.Any] | str | None = ...,
        corda_config: dict[str, typing.Any] | str | None = ...,
        lora_ga_config: dict[str, typing.Any] | str | None = ...,
        use_dora: bool = ...,
        velora_config: dict[str, typing.Any] | str | None = ...,
        alora_invocation_tokens: list[int] | None | str | None = ...,
        use_qalora: bool = ...,
        qalora_group_size: int = ...,
        monteclora_config: dict[str, typing.Any] | str | None = ...,
        layer_replication: dict[str, typing.Any] | str | None = ...,
        runtime_config: dict[str, typing.Any] | str | None = ...,
        lora_bias: bool = ...,
        target_parameters: list[str] | None | str | None = ...,
        use_bdlora: dict[str, typing.Any] | str | None = ...,
        arrow_config: dict[str, typing.Any] | str | None = ...,
        kasa_config: dict[str, typing.Any] | str | None = ...,
        ensure_weight_tying: bool = ...,
        task_type: str | None = ...,
        peft_type: str = ...,
        auto_mapping: dict[str, typing.Any] | str | None = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        *,
        alpha: float | None = ...,
        lora_r: int | None = ...,
        lora_target_modules: list[str] | str | None | None = ...,
    ) -> None: ...

@dataclasses.dataclass
class BitsAndBytesConfig(QuantizationTable):
    """How the linear layers are stored.

    The defaults are transformers' own, fp4 without double quantization among them; QLoRA trains on
    `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`."""
    load_in_8bit: bool
    load_in_4bit: bool
    llm_int8_threshold: float
    llm_int8_skip_modules: list[str] | None
    llm_int8_enable_fp32_cpu_offload: bool
    llm_int8_has_fp16_weight: bool
    bnb_4bit_compute_dtype: torch.dtype | None
    bnb_4bit_quant_type: str
    bnb_4bit_use_double_quant: bool
    bnb_4bit_quant_storage: torch.dtype | None
    quant_method: str
    @property
    def _load_in_4bit(self) -> bool: ...
    @property
    def _load_in_8bit(self) -> bool: ...
    def __init__(
        self,
        load_in_8bit: bool = ...,
        load_in_4bit: bool = ...,
        llm_int8_threshold: float = ...,
        llm_int8_skip_modules: list[str] | None | str | None = ...,
        llm_int8_enable_fp32_cpu_offload: bool = ...,
        llm_int8_has_fp16_weight: bool = ...,
        bnb_4bit_compute_dtype: torch.dtype | None | str = ...,
        bnb_4bit_quant_type: str = ...,
        bnb_4bit_use_double_quant: bool = ...,
        bnb_4bit_quant_storage: torch.dtype | None | str = ...,
        quant_method: str = ...,
        *,
        _load_in_4bit: bool | None = ...,
        _load_in_8bit: bool | None = ...,
    ) -> None: ...
