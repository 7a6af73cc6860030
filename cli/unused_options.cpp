// SPDX-License-Identifier: Apache-2.0
#include "unused_options.hpp"

#include <array>

namespace qlorapp::cli {
namespace {

constexpr bool kRefused = true;
constexpr std::string_view kNoUpload = "the command does not upload. Push the adapter folder with hf upload.";
constexpr std::string_view kReports =
    "only train reports to trackers (--report_to). log_history in trainer_state.json has every value.";
constexpr std::string_view kPython = "it concerns Python's Trainer only.";
constexpr std::string_view kInMemory = "rows are tokenized once and stay in memory.";
constexpr std::string_view kNoGraph = "blocks are hand-written C++; there is no graph to compile. Leave it out.";
constexpr std::string_view kSharded =
    "--base_sharding full divides the four-bit base over the processes of torchrun; adapters are whole on each. Use that instead.";
constexpr std::string_view kNoWrapper =
    "the processes exchange gradients without DistributedDataParallel. --ddp_timeout and --ddp_sum_in_bf16 are what can be set.";
constexpr std::string_view kNoAccelerate = "the loop does not use accelerate; batches are never split or dispatched.";
constexpr std::string_view kFused = "fused kernels are always used.";
constexpr std::string_view kDevices = "kernels exist for CPUs and NVIDIA GPUs only. Leave it out.";
constexpr std::string_view kFirstRank = "rank 0 alone logs and writes, for the processes of all machines.";
constexpr std::string_view kDtype = "kernels compute in 16 bits without it.";
constexpr std::string_view kEvalDtype = "evaluation computes in the dtype that the model was loaded in.";

constexpr std::string_view kEightBit = "it concerns eight-bit layers; layers are stored in four bits.";

constexpr std::array kUnused{
    UnusedOption{"optim_args", "AdamW has no other options. Set adam_beta1, adam_beta2, adam_epsilon.", kRefused},
    UnusedOption{"optim_target_modules", "it belongs to GaLore and APOLLO; the optimizer is AdamW. Name modules in target_modules.",
                 kRefused},
    UnusedOption{"adafactor", "AdamW is the optimizer. Set optim=adamw_8bit for small states.", kRefused},
    UnusedOption{"label_smoothing_factor", "it needs all logits, which the fused loss never holds. Leave it 0, or train in Python.",
                 kRefused},
    UnusedOption{"neftune_noise_alpha", "the command adds no noise to embeddings. Leave it unset, or train in Python.", kRefused},
    UnusedOption{"past_index", "no state passes from one batch to the next. Leave it -1.", kRefused, "-1"},
    UnusedOption{"label_names", "labels are read from the column labels. Rename your column.", kRefused, R"(["labels"])"},
    UnusedOption{"average_tokens_across_devices", "the loss is always the mean over all target tokens of a step."},
    UnusedOption{"bf16_full_eval", kEvalDtype},
    UnusedOption{"fp16_full_eval", kEvalDtype},
    UnusedOption{"fp16_opt_level", "it is a level of Apex, which is not used."},
    UnusedOption{"half_precision_backend", kDtype},
    UnusedOption{"fp16_backend", kDtype},
    UnusedOption{"gradient_checkpointing_kwargs",
                 "there is one checkpointing implementation, without arguments. See checkpoint_keep."},
    UnusedOption{"activation_checkpointing_kwargs",
                 "there is one checkpointing implementation, without arguments. See checkpoint_keep."},
    UnusedOption{"use_cache", "a training pass has no cache; generation always uses one."},
    UnusedOption{"use_liger_kernel", kFused},
    UnusedOption{"liger_kernel_config", kFused},
    UnusedOption{"length_column_name", "lengths are computed from the rows."},
    UnusedOption{"do_train", kPython, false, "true"},
    UnusedOption{"do_eval", kPython},
    UnusedOption{"do_predict", kPython},
    UnusedOption{"remove_unused_columns", kPython},
    UnusedOption{"restore_callback_states_from_checkpoint", kPython},
    UnusedOption{"log_level", kPython},
    UnusedOption{"disable_tqdm", "the progress bar is shown on terminals only."},
    UnusedOption{"prediction_loss_only", "an evaluation computes only the loss.", false, "true"},
    UnusedOption{"eval_accumulation_steps", kPython},
    UnusedOption{"eval_do_concat_batches", kPython},
    UnusedOption{"batch_eval_metrics", kPython},
    UnusedOption{"include_for_metrics", kPython},
    UnusedOption{"include_inputs_for_metrics", kPython},
    UnusedOption{"enable_jit_checkpoint", kPython},
    UnusedOption{"skip_memory_metrics", kPython},
    UnusedOption{"jit_mode_eval", kNoGraph, kRefused},
    UnusedOption{"use_legacy_prediction_loop", "there is one evaluation loop."},
    UnusedOption{"save_safetensors", "adapters are written as safetensors.", false, "true"},
    UnusedOption{"save_on_each_node", kFirstRank},
    UnusedOption{"log_level_replica", kFirstRank},
    UnusedOption{"log_on_each_node", kFirstRank},
    UnusedOption{"eval_use_gather_object", "the processes of an evaluation exchange sums of losses, no objects."},
    UnusedOption{"dataloader_num_workers", kInMemory},
    UnusedOption{"dataloader_pin_memory", kInMemory},
    UnusedOption{"dataloader_persistent_workers", kInMemory},
    UnusedOption{"dataloader_prefetch_factor", kInMemory},
    UnusedOption{"dataloader_multiprocessing_context", kInMemory},
    UnusedOption{"dataloader_in_order", kInMemory},
    UnusedOption{"use_mps_device", kDevices, kRefused},
    UnusedOption{"tpu_num_cores", kDevices, kRefused},
    UnusedOption{"tpu_metrics_debug", kDevices, kRefused},
    UnusedOption{"use_ipex", "the CPU kernels are the library's own."},
    UnusedOption{"torch_compile", kNoGraph, kRefused},
    UnusedOption{"torch_compile_backend", kNoGraph, kRefused},
    UnusedOption{"torch_compile_mode", kNoGraph, kRefused},
    UnusedOption{"torchdynamo", kNoGraph, kRefused},
    UnusedOption{"debug", "there are no debug modes. A loss that is not finite is always logged.", kRefused},
    UnusedOption{"local_rank", "torchrun sets LOCAL_RANK, which chooses the GPU.", false, "-1"},
    UnusedOption{"ddp_backend", kNoWrapper},
    UnusedOption{"ddp_find_unused_parameters", kNoWrapper},
    UnusedOption{"ddp_bucket_cap_mb", kNoWrapper},
    UnusedOption{"ddp_broadcast_buffers", kNoWrapper},
    UnusedOption{"ddp_static_graph", kNoWrapper},
    UnusedOption{"fsdp", kSharded, kRefused},
    UnusedOption{"fsdp_config", kSharded, kRefused},
    UnusedOption{"fsdp_min_num_params", kSharded, kRefused},
    UnusedOption{"fsdp_transformer_layer_cls_to_wrap", kSharded, kRefused},
    UnusedOption{"deepspeed",
                 "--base_sharding full divides the four-bit base over the processes of torchrun; --base_on_host and "
                 "--optim paged_adamw_8bit use host memory. Use those instead.",
                 kRefused},
    UnusedOption{"parallelism_config",
                 "the processes of torchrun share each batch, and the base with --base_sharding full; rows and layers are never "
                 "split. Use that instead.",
                 kRefused},
    UnusedOption{"accelerator_config", kNoAccelerate},
    UnusedOption{"dispatch_batches", kNoAccelerate},
    UnusedOption{"split_batches", kNoAccelerate},
    UnusedOption{"mp_parameters", "it belongs to SageMaker. Start the command with torchrun and use --base_sharding full.",
                 kRefused},
    UnusedOption{"ray_scope", "there is no hyper-parameter search."},
    UnusedOption{"report_to", kReports, false, R"("none")"},
    UnusedOption{"logging_dir", kReports},
    UnusedOption{"run_name", kReports},
    UnusedOption{"project", kReports},
    UnusedOption{"trackio_space_id", kReports},
    UnusedOption{"trackio_bucket_id", kReports},
    UnusedOption{"trackio_static_space_id", kReports},
    UnusedOption{"push_to_hub", kNoUpload},
    UnusedOption{"push_to_hub_model_id", kNoUpload},
    UnusedOption{"push_to_hub_organization", kNoUpload},
    UnusedOption{"push_to_hub_token", kNoUpload},
    UnusedOption{"hub_token", kNoUpload},
    UnusedOption{"hub_private_repo", kNoUpload},
    UnusedOption{"hub_model_id", kNoUpload},
    UnusedOption{"hub_strategy", kNoUpload},
    UnusedOption{"hub_always_push", kNoUpload},
    UnusedOption{"hub_revision", kNoUpload},
};

constexpr std::array kUnusedOfAdapters{
    UnusedOption{"fan_in_fan_out", "the supported families store weights as (out, in)."},
    UnusedOption{"megatron_config", "models have Hugging Face's layers, not Megatron's. Leave it unset.", kRefused},
    UnusedOption{"megatron_core", "Megatron is not used."},
    UnusedOption{"trainable_token_indices",
                 "single rows of the table cannot be trained. Name embed_tokens in modules_to_save to train the table.", kRefused},
    UnusedOption{
        "eva_config",
        "EVA decomposes activations of a data set before training. Use init_lora_weights=true, \"orthogonal\" or \"pissa\".",
        kRefused},
    UnusedOption{"corda_config", "CorDA decomposes covariances of a data set before training. Use init_lora_weights=\"pissa\".",
                 kRefused},
    UnusedOption{
        "lora_ga_config",
        "LoRA-GA decomposes gradients of the base weights, which a four-bit base does not have. Use init_lora_weights=\"pissa\".",
        kRefused},
    UnusedOption{"velora_config", "activations are kept whole or recomputed (gradient_checkpointing). Leave it unset.", kRefused},
    UnusedOption{"alora_invocation_tokens", "an adapter applies to all tokens. Leave it unset.", kRefused},
    UnusedOption{"use_qalora", "the base is in bitsandbytes' format. Leave it false.", kRefused},
    UnusedOption{"qalora_group_size", "it belongs to use_qalora; the base is in bitsandbytes' format.", false, "16"},
    UnusedOption{"monteclora_config", "an adapter has one value per weight, no distribution. Leave it unset.", kRefused},
    UnusedOption{"layer_replication", "a model has exactly the layers of its config. Leave it unset.", kRefused},
    UnusedOption{"runtime_config", "adapters are initialized on the device that trains them."},
    UnusedOption{"lora_bias", "the supported families have no biases to merge it into. Leave it false.", kRefused},
    UnusedOption{"target_parameters", "the supported families have linear layers only: name them in target_modules.", kRefused},
    UnusedOption{"use_bdlora", "block-diagonal adapters are for inference on several devices. Leave it unset.", kRefused},
    UnusedOption{"arrow_config", "one adapter is active at a time. Leave it unset.", kRefused},
    UnusedOption{"kasa_config", "it changes the base weights. Use use_dora or plain LoRA.", kRefused},
    UnusedOption{"auto_mapping", "config.json names the model family."},
};

constexpr std::array kUnusedOfLayers{
    UnusedOption{"load_in_8bit", "layers are stored in four bits. Use --load_in_4bit.", kRefused},
    UnusedOption{"_load_in_8bit", "layers are stored in four bits. Use --load_in_4bit.", kRefused},
    UnusedOption{"llm_int8_threshold", kEightBit},
    UnusedOption{"llm_int8_has_fp16_weight", kEightBit},
    UnusedOption{"llm_int8_enable_fp32_cpu_offload",
                 "it concerns eight-bit layers. --base_on_host keeps four-bit layers in host memory."},
    UnusedOption{"bnb_4bit_quant_storage", "packed weights are always stored as uint8; their bytes are the same.", false,
                 R"("uint8")"},
    UnusedOption{"quant_method", "four-bit weights are in bitsandbytes' format.", false, R"("bitsandbytes")"},
};

}  // namespace

std::span<const UnusedOption> unused_training_arguments() { return kUnused; }
std::span<const UnusedOption> unused_lora_options() { return kUnusedOfAdapters; }
std::span<const UnusedOption> unused_quantization_options() { return kUnusedOfLayers; }

}  // namespace qlorapp::cli
