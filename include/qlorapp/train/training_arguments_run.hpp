// SPDX-License-Identifier: Apache-2.0
/// The part of TrainingArguments that decides what a step computes: batches, optimizer, schedule, precision, memory, data,
/// seeds. See training_arguments.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"

namespace qlorapp {

struct RunArguments {
  std::string output_dir = "trainer_output";
  bool overwrite_output_dir = false;
  int64_t per_device_train_batch_size = 8;
  int64_t per_device_eval_batch_size = 8;
  int64_t gradient_accumulation_steps = 1;
  double num_train_epochs = 3.0;
  int64_t max_steps = -1;
  double learning_rate = 5e-5;
  std::string lr_scheduler_type = "linear";
  FreeForm lr_scheduler_kwargs;
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
  std::optional<bool> tf32;
  bool gradient_checkpointing = false;
  std::vector<std::string> checkpoint_keep = {"input_only"};
  int64_t loss_chunk_rows = 0;
  int64_t mlp_tile_rows = 0;
  std::string weight_workspace = "layer";
  bool embedding_on_host = false;
  std::string memory_budget;
  bool fp8 = false;
  bool cuda_graphs = false;
  std::optional<int64_t> torch_empty_cache_steps;
  bool auto_find_batch_size = false;
  std::optional<bool> worst_case_first;
  bool count_position_zero = false;
  int64_t max_length = 1024;
  std::optional<bool> completion_only_loss;
  bool packing = false;
  std::string packing_strategy = "bfd";
  std::optional<bool> eval_packing;
  bool log_num_tokens = false;
  std::string train_sampling_strategy = "random";
  bool group_by_length = false;
  bool dataloader_drop_last = false;
  int64_t seed = 42;
  std::optional<int64_t> data_seed;
  bool full_determinism = false;
  bool use_cpu = false;
  std::optional<std::string> resume_from_checkpoint;
  bool ignore_data_skip = false;

  static constexpr auto fields() {
    using T = RunArguments;
    return FieldTable{
        Field{"output_dir", &T::output_dir, "where adapter, checkpoints and trainer_state.json go"},
        Field{"overwrite_output_dir", &T::overwrite_output_dir, "the command: write into a folder that holds another run"},
        Field{"per_device_train_batch_size", &T::per_device_train_batch_size, "rows per micro-batch"},
        Field{"per_device_eval_batch_size", &T::per_device_eval_batch_size, "rows per batch in evaluation"},
        Field{"gradient_accumulation_steps", &T::gradient_accumulation_steps, "micro-batches per optimizer step"},
        Field{"num_train_epochs", &T::num_train_epochs, "passes over the data; may be a fraction"},
        Field{"max_steps", &T::max_steps, "optimizer steps; -1: num_train_epochs decides"},
        Field{"learning_rate", &T::learning_rate, "the highest learning rate, after warm-up"},
        Field{"lr_scheduler_type", &T::lr_scheduler_type,
              "linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup, inverse_sqrt, "
              "cosine_with_min_lr, "
              "cosine_warmup_with_min_lr or warmup_stable_decay"},
        Field{"lr_scheduler_kwargs", &T::lr_scheduler_kwargs, "the schedule's own settings by name, such as {\"num_cycles\": 2}"},
        Field{"warmup_steps", &T::warmup_steps, "steps of warm-up; below 1: a share of all steps"},
        Field{"warmup_ratio", &T::warmup_ratio, "share of all steps, used where warmup_steps is 0"},
        Field{"optim", &T::optim,
              "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit or paged_adamw_32bit"},
        Field{"weight_decay", &T::weight_decay, "weight decay of AdamW, on all adapters"},
        Field{"adam_beta1", &T::adam_beta1, "decay of the first moment"},
        Field{"adam_beta2", &T::adam_beta2, "decay of the second moment"},
        Field{"adam_epsilon", &T::adam_epsilon, "added to the root of the second moment"},
        Field{"max_grad_norm", &T::max_grad_norm, "gradients are clipped to this global norm; 0: they are not"},
        Field{"bf16", &T::bf16, "compute in bfloat16"},
        Field{"fp16", &T::fp16, "compute in float16 with loss scaling"},
        Field{"tf32", &T::tf32, "on a GPU: matrix products of float32 in TF32; unset: as torch is set"},
        Field{"gradient_checkpointing", &T::gradient_checkpointing, "recompute blocks in the backward pass to save memory"},
        Field{
            "checkpoint_keep", &T::checkpoint_keep,
            "what gradient_checkpointing keeps of a block: everything, attention_only, input_only or input_on_host; or a mixture, "
            "from the first block on: input_only:20,everything:12, where one number may be left out; or every:K or sqrt: the input "
            "of "
            "every K-th block alone, or of about every √N-th"},
        Field{"loss_chunk_rows", &T::loss_chunk_rows, "rows of logits that exist at a time; 0: 2048 on a GPU, 512 on a CPU"},
        Field{"mlp_tile_rows", &T::mlp_tile_rows, "rows that go through an MLP at a time, where it is not kept; 0: all"},
        Field{"weight_workspace", &T::weight_workspace,
              "dequantized weights that a GPU holds at a time: layer (fastest), stack or projection (smallest)"},
        Field{"embedding_on_host", &T::embedding_on_host,
              "keep the embedding table in pinned host memory, where the head is not tied to it; a GPU reads its rows from there"},
        Field{"memory_budget", &T::memory_budget,
              "an amount such as 14GiB, or auto for what is free: chooses what blocks keep, the four options above and the "
              "micro-batch "
              "for the fastest step that fits; the effective batch stays"},
        Field{
            "fp8", &T::fp8,
            "multiply the frozen weights in eight bits (e4m3, a scale a row), the rest as before: faster on sm_89 and newer, less "
            "exact; needs lora_dropout=0 and bf16"},
        Field{"cuda_graphs", &T::cuda_graphs,
              "on a GPU: micro-steps of at most 2,048 tokens whose row lengths come again are one launch, the same bits; for small "
              "models "
              "and short rows of few different lengths, without lora_dropout"},
        Field{"torch_empty_cache_steps", &T::torch_empty_cache_steps,
              "on a GPU: steps between returns of unused memory; unset: never"},
        Field{"auto_find_batch_size", &T::auto_find_batch_size,
              "shrink the micro-batch until the plan fits; accumulation grows to keep the effective batch"},
        Field{"worst_case_first", &T::worst_case_first,
              "before the first step, run the longest rows as one micro-batch and forget it, so that memory runs out at once or "
              "not at "
              "all; unset: on a GPU"},
        Field{"count_position_zero", &T::count_position_zero,
              "divide the loss by transformers' older count, which has the first token of each row in it"},
        Field{"max_length", &T::max_length, "rows are cut to this many tokens"},
        Field{"completion_only_loss", &T::completion_only_loss, "train on completions only; unset: if the data have prompts"},
        Field{"packing", &T::packing, "pack several short rows into one of up to max_length tokens; they never see each other"},
        Field{"packing_strategy", &T::packing_strategy,
              "bfd (best fit, long rows lose their end), bfd_split (long rows are cut into pieces) or wrapped (cut every "
              "max_length tokens)"},
        Field{"eval_packing", &T::eval_packing, "pack the rows of the evaluation too; unset: as packing"},
        Field{"log_num_tokens", &T::log_num_tokens, "log num_tokens, the tokens read so far, as TRL's SFTTrainer does"},
        Field{"train_sampling_strategy", &T::train_sampling_strategy, "random, sequential or group_by_length"},
        Field{"group_by_length", &T::group_by_length, "older form of train_sampling_strategy=group_by_length"},
        Field{"dataloader_drop_last", &T::dataloader_drop_last, "leave out the last batch of an epoch if it is short"},
        Field{"seed", &T::seed, "seeds adapters, dropout and, without data_seed, the order of rows"},
        Field{"data_seed", &T::data_seed, "seeds the order of rows"},
        Field{"full_determinism", &T::full_determinism, "the same bits in every run on a GPU too, by a slower attention"},
        Field{"use_cpu", &T::use_cpu, "the command trains on the CPU even where there is a GPU"},
        Field{"resume_from_checkpoint", &T::resume_from_checkpoint, "a checkpoint folder, or \"true\": the last one in output_dir"},
        Field{"ignore_data_skip", &T::ignore_data_skip, "a resumed run begins its epoch with the first batch, not where it stood"}};
  }
};

}  // namespace qlorapp
