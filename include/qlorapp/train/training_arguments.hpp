// SPDX-License-Identifier: Apache-2.0
/// What a run is told: transformers' TrainingArguments, by name and meaning, in one field table.
///
/// Every field here is used, or accepted and said to have no effect, or refused with a reason. A name that is not here is an
/// unknown option. Older spellings (aliases) mean the same. Defaults are transformers' own; max_length and
/// completion_only_loss are TRL's SFTConfig's. checkpoint_keep and the four options behind it are ours (nn/keep.hpp, nn/memory_settings.hpp).
///
/// Source: transformers 5.23 TrainingArguments; TRL SFTConfig.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/train/precision.hpp"

namespace qlorapp {

struct TrainingArguments {
  std::string output_dir = "trainer_output";
  bool overwrite_output_dir = false;
  int64_t per_device_train_batch_size = 8;
  int64_t per_device_eval_batch_size = 8;
  int64_t gradient_accumulation_steps = 1;
  double num_train_epochs = 3.0;
  int64_t max_steps = -1;
  double learning_rate = 5e-5;
  std::string lr_scheduler_type = "linear";
  double warmup_steps = 0;
  double warmup_ratio = 0;
  std::string optim = "adamw_torch_fused";
  double weight_decay = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double max_grad_norm = 1.0;
  bool bf16 = false;
  bool fp16 = false;
  bool gradient_checkpointing = false;
  std::vector<std::string> checkpoint_keep = {"input_only"};
  int64_t loss_chunk_rows = 0;
  int64_t mlp_tile_rows = 0;
  std::string weight_workspace = "layer";
  bool embedding_on_host = false;
  bool count_position_zero = false;
  int64_t max_length = 1024;
  std::optional<bool> completion_only_loss;
  std::string train_sampling_strategy = "random";
  bool dataloader_drop_last = false;
  std::string logging_strategy = "steps";
  double logging_steps = 500;
  bool logging_first_step = false;
  std::string eval_strategy = "no";
  std::optional<double> eval_steps;
  std::string save_strategy = "steps";
  double save_steps = 500;
  std::optional<int64_t> save_total_limit;
  std::optional<std::string> resume_from_checkpoint;
  int64_t seed = 42;
  std::optional<int64_t> data_seed;
  bool full_determinism = false;
  bool use_cpu = false;
  std::optional<bool> disable_tqdm;
  std::vector<std::string> report_to = {"none"};
  int64_t dataloader_num_workers = 0;
  bool dataloader_pin_memory = true;
  bool remove_unused_columns = true;
  bool use_liger_kernel = false;
  bool torch_compile = false;
  bool push_to_hub = false;

  static constexpr auto fields() {
    using T = TrainingArguments;
    constexpr auto kSaid = FieldStatus::kAcceptedAndSaid;
    constexpr auto kRefused = FieldStatus::kRefused;
    return std::tuple{
        Field{"output_dir", &T::output_dir, "where adapter, checkpoints and trainer_state.json go"},
        Field{"overwrite_output_dir", &T::overwrite_output_dir, "write into a folder that holds another run"},
        Field{"per_device_train_batch_size", &T::per_device_train_batch_size, "rows of a micro-batch"},
        Field{"per_device_eval_batch_size", &T::per_device_eval_batch_size, "rows of a batch in evaluation"},
        Field{"gradient_accumulation_steps", &T::gradient_accumulation_steps, "micro-batches of an optimizer step"},
        Field{"num_train_epochs", &T::num_train_epochs, "passes over the data, whole or not"},
        Field{"max_steps", &T::max_steps, "optimizer steps; -1: as num_train_epochs says"},
        Field{"learning_rate", &T::learning_rate, "after warm-up"},
        Field{"lr_scheduler_type", &T::lr_scheduler_type, "linear, cosine, constant or constant_with_warmup"},
        Field{"warmup_steps", &T::warmup_steps, "steps of warm-up; below 1: a share of all steps"},
        Field{"warmup_ratio", &T::warmup_ratio, "share of all steps, used where warmup_steps is 0"},
        Field{"optim", &T::optim,
              "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit or paged_adamw_32bit"},
        Field{"weight_decay", &T::weight_decay, "of AdamW, on all adapters"},
        Field{"adam_beta1", &T::adam_beta1, "decay of the first moment"},
        Field{"adam_beta2", &T::adam_beta2, "decay of the second moment"},
        Field{"adam_epsilon", &T::adam_epsilon, "beside the root of the second moment"},
        Field{"max_grad_norm", &T::max_grad_norm, "global norm that gradients are clipped to; 0: none"},
        Field{"bf16", &T::bf16, "compute in bfloat16"},
        Field{"fp16", &T::fp16, "compute in float16 with loss scaling"},
        Field{"gradient_checkpointing", &T::gradient_checkpointing, "recompute blocks in the backward pass to save memory"},
        Field{"checkpoint_keep", &T::checkpoint_keep,
              "what gradient_checkpointing keeps of a block: everything, attention_only, input_only or input_on_host; or a "
              "mixture, from the "
              "first block on: input_only:20,everything:12, where one number may be left out"},
        Field{"loss_chunk_rows", &T::loss_chunk_rows, "rows of logits that exist at a time; 0: 2048 on a GPU, 512 on a CPU"},
        Field{"mlp_tile_rows", &T::mlp_tile_rows, "rows that go through an MLP at a time, where it is not kept; 0: all"},
        Field{"weight_workspace", &T::weight_workspace,
              "dequantized weights that a GPU holds at a time: layer (fastest), stack or projection (smallest)"},
        Field{"embedding_on_host", &T::embedding_on_host,
              "keep the embedding table in pinned host memory, where the head is not tied to it; a GPU reads its rows from there"},
        Field{"count_position_zero", &T::count_position_zero,
              "divide the loss by transformers' older count, which has the first token of each row in it"},
        Field{"max_length", &T::max_length, "rows are cut to this many tokens"},
        Field{"completion_only_loss", &T::completion_only_loss, "train on completions only; unset: where the data have prompts"},
        Field{"train_sampling_strategy", &T::train_sampling_strategy, "random, sequential or group_by_length"},
        Field{"dataloader_drop_last", &T::dataloader_drop_last, "leave out the last batch of an epoch if it is short"},
        Field{"logging_strategy", &T::logging_strategy, "no, steps or epoch"},
        Field{"logging_steps", &T::logging_steps, "steps between log entries; below 1: a share of all steps"},
        Field{"logging_first_step", &T::logging_first_step, "log step 1 too"},
        Field{"eval_strategy", &T::eval_strategy, "no, steps or epoch"},
        Field{"eval_steps", &T::eval_steps, "steps between evaluations; below 1: a share; unset: logging_steps"},
        Field{"save_strategy", &T::save_strategy, "no, steps or epoch"},
        Field{"save_steps", &T::save_steps, "steps between checkpoints; below 1: a share of all steps"},
        Field{"save_total_limit", &T::save_total_limit, "checkpoints to keep, the oldest go; unset or 0: all"},
        Field{"resume_from_checkpoint", &T::resume_from_checkpoint, "a checkpoint folder, or \"true\": the last one in output_dir"},
        Field{"seed", &T::seed, "of adapters, dropout and, without data_seed, the order of rows"},
        Field{"data_seed", &T::data_seed, "of the order of rows"},
        Field{"full_determinism", &T::full_determinism, "the same bits in every run on a GPU too, by a slower attention"},
        Field{"use_cpu", &T::use_cpu, "train on the CPU even where there is a GPU"},
        Field{"disable_tqdm", &T::disable_tqdm, "no progress bar; unset: none where output is piped"},
        Field{"report_to", &T::report_to, "none"},
        Field{"dataloader_num_workers", &T::dataloader_num_workers, "", kSaid, "rows are tokenized once and stay in memory."},
        Field{"dataloader_pin_memory", &T::dataloader_pin_memory, "", kSaid, "rows are tokenized once and stay in memory."},
        Field{"remove_unused_columns", &T::remove_unused_columns, "", kSaid, "columns that are not needed are never read."},
        Field{"use_liger_kernel", &T::use_liger_kernel, "", kSaid, "fused kernels are always used."},
        Field{"torch_compile", &T::torch_compile, "", kRefused,
              "blocks are hand-written C++, there is no graph to compile. Leave it out."},
        Field{"push_to_hub", &T::push_to_hub, "", kRefused, "nothing here uploads. Push the adapter folder with huggingface-cli."}};
  }
  static constexpr std::array<Alias, 6> aliases() {
    return {Alias{"evaluation_strategy", "eval_strategy"},
            Alias{"no_cuda", "use_cpu"},
            Alias{"max_seq_length", "max_length"},
            Alias{"per_gpu_train_batch_size", "per_device_train_batch_size"},
            Alias{"per_gpu_eval_batch_size", "per_device_eval_batch_size"},
            Alias{"activation_checkpointing", "gradient_checkpointing"}};
  }

  /// Looks at each value and at those that must fit together; says once what has no effect.
  /// @throws ValueError naming the first option that is wrong, what it may be and what it is.
  void validate() const;

  /// @pre validate() has passed.
  [[nodiscard]] Precision precision() const { return bf16 ? Precision::kBf16 : fp16 ? Precision::kFp16 : Precision::kFp32; }
  [[nodiscard]] bool optimizer_is_8bit() const { return optim.ends_with("_8bit"); }
  [[nodiscard]] bool optimizer_is_paged() const { return optim.starts_with("paged_"); }
  /// What parse_segments takes. "everything" without gradient_checkpointing.
  [[nodiscard]] std::string keep_text() const;
  [[nodiscard]] MemorySettings memory() const;
  [[nodiscard]] double eval_interval() const { return eval_steps.value_or(0) > 0 ? *eval_steps : logging_steps; }
};

}  // namespace qlorapp
