// SPDX-License-Identifier: Apache-2.0
#include "unused_options.hpp"

#include <array>

namespace qlorapp::cli {
namespace {

constexpr bool kRefused = true;
constexpr std::string_view kNoUpload = "nothing here uploads. Push the adapter folder with hf upload.";
constexpr std::string_view kReports = "Python's Trainer reports to services. log_history in trainer_state.json has every value.";
constexpr std::string_view kPython = "it is about Python's Trainer.";
constexpr std::string_view kInMemory = "rows are tokenized once and stay in memory.";
constexpr std::string_view kNoGraph = "blocks are hand-written C++, there is no graph to compile. Leave it out.";
constexpr std::string_view kNothingToShard = "a four-bit base and its adapters fit one GPU, nothing is sharded. Leave it out.";
constexpr std::string_view kNoWrapper = "no DistributedDataParallel is put around the model.";
constexpr std::string_view kNoAccelerate = "the loop does not use accelerate; batches are never split or dispatched.";
constexpr std::string_view kFused = "fused kernels are always used.";
constexpr std::string_view kDevices = "there are kernels for CPUs and NVIDIA GPUs. Leave it out.";
constexpr std::string_view kOneProcess = "one process trains.";
constexpr std::string_view kDtype = "kernels compute in 16 bits by themselves.";
constexpr std::string_view kEvalDtype = "evaluation computes in the dtype that the model was loaded in.";

constexpr std::string_view kEightBit = "it is about eight-bit layers, and these have four.";

constexpr std::array kUnused{
    UnusedOption{"optim_args", "AdamW takes no more than its own options. Set adam_beta1, adam_beta2, adam_epsilon.", kRefused},
    UnusedOption{"optim_target_modules", "GaLore and APOLLO are not here. Name modules in target_modules.", kRefused},
    UnusedOption{"adafactor", "AdamW is the optimizer. Set optim=adamw_8bit for small states.", kRefused},
    UnusedOption{"label_smoothing_factor", "the fused loss never holds the logits that it needs. Leave it 0, or train in Python.",
                 kRefused},
    UnusedOption{"neftune_noise_alpha", "embeddings get no noise here. Leave it unset, or train in Python.", kRefused},
    UnusedOption{"past_index", "no state passes from one batch to the next. Leave it -1.", kRefused, "-1"},
    UnusedOption{"label_names", "labels are what each row says of itself. Rename the column.", kRefused, R"(["labels"])"},
    UnusedOption{"average_tokens_across_devices", "the loss is always the mean over all target tokens of a step."},
    UnusedOption{"bf16_full_eval", kEvalDtype},
    UnusedOption{"fp16_full_eval", kEvalDtype},
    UnusedOption{"fp16_opt_level", "it is a level of Apex, which is not used."},
    UnusedOption{"half_precision_backend", kDtype},
    UnusedOption{"fp16_backend", kDtype},
    UnusedOption{"gradient_checkpointing_kwargs",
                 "blocks have one kind of checkpoint, whose inputs need no gradient. See checkpoint_keep."},
    UnusedOption{"activation_checkpointing_kwargs",
                 "blocks have one kind of checkpoint, whose inputs need no gradient. See checkpoint_keep."},
    UnusedOption{"use_cache", "a training pass has no cache; generation always uses one."},
    UnusedOption{"use_liger_kernel", kFused},
    UnusedOption{"liger_kernel_config", kFused},
    UnusedOption{"length_column_name", "lengths are counted."},
    UnusedOption{"do_train", kPython, false, "true"},
    UnusedOption{"do_eval", kPython},
    UnusedOption{"do_predict", kPython},
    UnusedOption{"remove_unused_columns", kPython},
    UnusedOption{"restore_callback_states_from_checkpoint", kPython},
    UnusedOption{"log_level", kPython},
    UnusedOption{"disable_tqdm", "the bar is shown on a terminal alone."},
    UnusedOption{"prediction_loss_only", "an evaluation computes the loss alone.", false, "true"},
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
    UnusedOption{"save_on_each_node", kOneProcess},
    UnusedOption{"log_level_replica", kOneProcess},
    UnusedOption{"log_on_each_node", kOneProcess},
    UnusedOption{"eval_use_gather_object", kOneProcess},
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
    UnusedOption{"debug", "there is no such instrument. A loss that is not finite is reported by itself.", kRefused},
    UnusedOption{"local_rank", "training runs in one process; where WORLD_SIZE says that there are more, it is refused.", false,
                 "-1"},
    UnusedOption{"ddp_backend", kNoWrapper},
    UnusedOption{"ddp_find_unused_parameters", kNoWrapper},
    UnusedOption{"ddp_bucket_cap_mb", kNoWrapper},
    UnusedOption{"ddp_broadcast_buffers", kNoWrapper},
    UnusedOption{"ddp_static_graph", kNoWrapper},
    UnusedOption{"ddp_timeout", kNoWrapper},
    UnusedOption{"fsdp", kNothingToShard, kRefused},
    UnusedOption{"fsdp_config", kNothingToShard, kRefused},
    UnusedOption{"fsdp_min_num_params", kNothingToShard, kRefused},
    UnusedOption{"fsdp_transformer_layer_cls_to_wrap", kNothingToShard, kRefused},
    UnusedOption{"deepspeed", kNothingToShard, kRefused},
    UnusedOption{"parallelism_config", kNothingToShard, kRefused},
    UnusedOption{"accelerator_config", kNoAccelerate},
    UnusedOption{"dispatch_batches", kNoAccelerate},
    UnusedOption{"split_batches", kNoAccelerate},
    UnusedOption{"mp_parameters", "SageMaker's model parallelism is not here. Leave it out.", kRefused},
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
    UnusedOption{"fan_in_fan_out", "the supported families store (out, in)."},
    UnusedOption{"megatron_config", "models are of Hugging Face's layers. Leave it unset.", kRefused},
    UnusedOption{"megatron_core", "Megatron is not used."},
    UnusedOption{"trainable_token_indices",
                 "single rows are not trained by themselves. Name embed_tokens in modules_to_save to train the table.", kRefused},
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
    UnusedOption{"velora_config", "activations are kept whole or formed again (gradient_checkpointing). Leave it unset.", kRefused},
    UnusedOption{"alora_invocation_tokens", "an adapter here counts for all tokens. Leave it unset.", kRefused},
    UnusedOption{"use_qalora", "the base is in bitsandbytes' form. Leave it false.", kRefused},
    UnusedOption{"qalora_group_size", "there is no QA-LoRA here.", false, "16"},
    UnusedOption{"monteclora_config", "adapters have one value each. Leave it unset.", kRefused},
    UnusedOption{"layer_replication", "a model has the layers of its config. Leave it unset.", kRefused},
    UnusedOption{"runtime_config", "everything is on one device."},
    UnusedOption{"lora_bias", "the supported families have no bias for it to be merged into. Leave it false.", kRefused},
    UnusedOption{"target_parameters", "the supported families have linear layers only: name them in target_modules.", kRefused},
    UnusedOption{"use_bdlora", "they serve several devices in inference. Leave it unset.", kRefused},
    UnusedOption{"arrow_config", "one adapter is active at a time. Leave it unset.", kRefused},
    UnusedOption{"kasa_config", "it changes the base weights. Use use_dora or plain LoRA.", kRefused},
    UnusedOption{"auto_mapping", "families are known by config.json."},
};

constexpr std::array kUnusedOfLayers{
    UnusedOption{"load_in_8bit", "layers are stored in four bits. Use --load_in_4bit.", kRefused},
    UnusedOption{"_load_in_8bit", "layers are stored in four bits. Use --load_in_4bit.", kRefused},
    UnusedOption{"llm_int8_threshold", kEightBit},
    UnusedOption{"llm_int8_has_fp16_weight", kEightBit},
    UnusedOption{"llm_int8_enable_fp32_cpu_offload", "the model is on one device; nothing is offloaded."},
    UnusedOption{"bnb_4bit_quant_storage", "packed bytes are held as uint8, whatever they are called; they are the same.", false,
                 R"("uint8")"},
    UnusedOption{"quant_method", "weights in four bits are in bitsandbytes' form.", false, R"("bitsandbytes")"},
};

}  // namespace

std::span<const UnusedOption> unused_training_arguments() { return kUnused; }
std::span<const UnusedOption> unused_lora_options() { return kUnusedOfAdapters; }
std::span<const UnusedOption> unused_quantization_options() { return kUnusedOfLayers; }

}  // namespace qlorapp::cli
