// SPDX-License-Identifier: Apache-2.0
/// The options of a run in one field table: those of transformers' TrainingArguments that the loop and the command use, under its names.
///
/// A name that is not here is an unknown option; the command answers transformers' other names by itself (cli/unused_options.hpp). Older
/// spellings (aliases) mean the same and are logged once. Defaults are transformers' own; checkpoint_keep, the four memory options behind it
/// (nn/keep.hpp, nn/memory_settings.hpp), count_position_zero and ddp_timeout's minute are ours, max_length, completion_only_loss, assistant_only_loss and packing's are TRL's
/// SFTConfig's.
///
/// The table is written in two parts, one a topic, which this struct puts together; a config that has these options and more
/// of its own derives from it and appends to fields() and aliases() in the same way.
///
/// Source: transformers 5.23, 4.57 and 4.46 TrainingArguments; TRL SFTConfig.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/train/precision.hpp"

namespace qlorapp {

/// Options of a step: batches, optimizer, schedule, precision, memory, data, seeds.
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
  bool base_on_host = false;
  std::string base_sharding = "no";
  std::string memory_budget;
  bool fp8 = false;
  bool cuda_graphs = false;
  std::optional<int64_t> torch_empty_cache_steps;
  bool auto_find_batch_size = false;
  std::optional<bool> worst_case_first;
  bool count_position_zero = false;
  double val_size = 0;
  int64_t max_length = 1024;
  std::optional<bool> completion_only_loss;
  bool assistant_only_loss = false;
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
  std::string on_non_finite = "raise";
  bool use_cpu = false;
  std::optional<std::string> resume_from_checkpoint;
  bool ignore_data_skip = false;
  bool resume_with_changes = false;
  int64_t ddp_timeout = 60;
  bool ddp_sum_in_bf16 = false;

  static constexpr auto fields() {
    using T = RunArguments;
    return FieldTable{
        Field{"output_dir", &T::output_dir, "folder for the adapter, checkpoints and trainer_state.json"},
        Field{"overwrite_output_dir", &T::overwrite_output_dir, "on the command line: write into a folder that holds another run"},
        Field{"per_device_train_batch_size", &T::per_device_train_batch_size,
              "rows per micro-batch; the default of the command is rows per update"},
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
        Field{"warmup_ratio", &T::warmup_ratio, "warm-up as a share of all steps; used if warmup_steps is 0"},
        Field{"optim", &T::optim,
              "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit or paged_adamw_32bit"},
        Field{"weight_decay", &T::weight_decay, "weight decay of AdamW, on all adapters"},
        Field{"adam_beta1", &T::adam_beta1, "decay of the first moment"},
        Field{"adam_beta2", &T::adam_beta2, "decay of the second moment"},
        Field{"adam_epsilon", &T::adam_epsilon, "added to the root of the second moment"},
        Field{"max_grad_norm", &T::max_grad_norm, "clip gradients to this global norm; 0: no clipping"},
        Field{"bf16", &T::bf16, "compute in bfloat16"},
        Field{"fp16", &T::fp16, "compute in float16 with loss scaling"},
        Field{"tf32", &T::tf32, "on a GPU: compute float32 matrix products in TF32; unset: torch's setting"},
        Field{"gradient_checkpointing", &T::gradient_checkpointing, "recompute blocks in the backward pass to save memory"},
        Field{"checkpoint_keep", &T::checkpoint_keep,
              "tensors that gradient_checkpointing keeps per block: everything, attention_only, input_only or input_on_host; or a "
              "mixture, from the first block on: input_only:20,everything:12 (one number may be omitted); or every:K or sqrt: only "
              "the input of every K-th or about every √N-th block"},
        Field{"loss_chunk_rows", &T::loss_chunk_rows,
              "rows of logits computed at a time; 0: 2048 on a GPU, fewer with a vocabulary above 150,000, and 512 on a CPU"},
        Field{"mlp_tile_rows", &T::mlp_tile_rows, "rows computed at a time in an MLP that is not kept; 0: all"},
        Field{"weight_workspace", &T::weight_workspace,
              "dequantized weights that a GPU holds at a time: layer (fastest), stack or projection (smallest)"},
        Field{
            "embedding_on_host", &T::embedding_on_host,
            "keep the embedding table in pinned host memory, from which a GPU reads its rows; no effect if the head is tied to it"},
        Field{
            "base_on_host", &T::base_on_host,
            "keep the frozen linear layers in pinned host memory and copy each block to the GPU while the one before it computes; "
            "false leaves them where they are"},
        Field{"base_sharding", &T::base_sharding,
              "no, full or node: with several processes each holds a part of the base, and each block is gathered while the one "
              "before it "
              "computes; full divides it over all processes, node over those of each machine"},
        Field{"memory_budget", &T::memory_budget,
              "an amount such as 14GiB, or auto for the free memory; chooses checkpoint_keep, loss_chunk_rows, mlp_tile_rows, "
              "weight_workspace, embedding_on_host and the micro-batch for the fastest step that fits; the effective batch stays "
              "the same"},
        Field{"fp8", &T::fp8,
              "multiply the frozen weights in eight bits (e4m3, one scale per row); faster on sm_89 and newer, less exact; "
              "requires lora_dropout=0 and bf16"},
        Field{"cuda_graphs", &T::cuda_graphs,
              "on a GPU: run micro-steps of at most 2,048 tokens whose row lengths repeat as one CUDA graph, with identical "
              "results; for small models and short rows of few different lengths, without lora_dropout"},
        Field{"torch_empty_cache_steps", &T::torch_empty_cache_steps,
              "on a GPU: steps between releases of unused cached memory; unset: never"},
        Field{"auto_find_batch_size", &T::auto_find_batch_size,
              "shrink the micro-batch until the plan fits; accumulation grows to keep the effective batch"},
        Field{"worst_case_first", &T::worst_case_first,
              "before the first step, run the longest rows as one micro-batch and discard the result, so that a lack of memory "
              "shows at the start; unset: true on a GPU"},
        Field{"count_position_zero", &T::count_position_zero,
              "divide the loss by transformers' older count, which includes the first token of each row"},
        Field{"val_size", &T::val_size,
              "on the command line: rows of the data to evaluate on instead of training on them: a number, or below 1 a share, "
              "rounded up; "
              "which ones is decided by data_seed, or seed"},
        Field{"max_length", &T::max_length, "rows are cut to this many tokens"},
        Field{"completion_only_loss", &T::completion_only_loss, "train on completions only; unset: if the data have prompts"},
        Field{"assistant_only_loss", &T::assistant_only_loss, "messages: train on the assistant's turns only"},
        Field{"packing", &T::packing, "pack several short rows into one of up to max_length tokens; attention does not cross rows"},
        Field{"packing_strategy", &T::packing_strategy,
              "bfd (best fit; long rows lose their end), bfd_split (long rows are cut into pieces) or wrapped (cut every "
              "max_length tokens)"},
        Field{"eval_packing", &T::eval_packing, "pack evaluation rows too; unset: same as packing"},
        Field{"log_num_tokens", &T::log_num_tokens, "log num_tokens, the tokens read so far, as TRL's SFTTrainer does"},
        Field{"train_sampling_strategy", &T::train_sampling_strategy, "random, sequential or group_by_length"},
        Field{"group_by_length", &T::group_by_length, "older form of train_sampling_strategy=group_by_length"},
        Field{"dataloader_drop_last", &T::dataloader_drop_last, "drop the last batch of an epoch if it is incomplete"},
        Field{"seed", &T::seed, "seeds adapters, dropout and, without data_seed, the order of rows"},
        Field{"data_seed", &T::data_seed, "seeds the order of rows"},
        Field{"full_determinism", &T::full_determinism, "identical results in every run on a GPU too; attention is slower"},
        Field{"on_non_finite", &T::on_non_finite,
              "after a step whose gradients are not finite (in float16 the loss scale decides): raise, skip (at most 16 in a row), "
              "or "
              "rollback: continue from the last checkpoint, behind the rows of that step (at most 3 times)"},
        Field{"use_cpu", &T::use_cpu, "on the command line: train on the CPU even if a GPU is present"},
        Field{"resume_from_checkpoint", &T::resume_from_checkpoint,
              "a checkpoint folder, or \"true\": the newest undamaged one of the run in output_dir"},
        Field{"ignore_data_skip", &T::ignore_data_skip, "a resumed run restarts its epoch at the first batch"},
        Field{"resume_with_changes", &T::resume_with_changes,
              "resume although the data, or options that affect the results, differ from those of the checkpoint"},
        Field{"ddp_timeout", &T::ddp_timeout, "several processes: seconds that one waits for the others before the run ends"},
        Field{"ddp_sum_in_bf16", &T::ddp_sum_in_bf16,
              "several processes: sum gradients in bfloat16, which halves what they exchange and rounds to three digits"}};
  }
};

/// Logging, evaluation and saving.
struct LoggingArguments {
  std::string logging_strategy = "steps";
  double logging_steps = 500;
  bool logging_first_step = false;
  bool logging_nan_inf_filter = true;
  std::variant<bool, std::string> include_num_input_tokens_seen = std::string("no");
  bool include_tokens_per_second = false;
  std::string eval_strategy = "no";
  std::optional<double> eval_steps;
  double eval_delay = 0;
  bool eval_on_start = false;
  std::string save_strategy = "steps";
  double save_steps = 500;
  std::optional<int64_t> save_total_limit;
  bool save_only_model = false;
  bool load_best_model_at_end = false;
  std::optional<std::string> metric_for_best_model;
  std::optional<bool> greater_is_better;
  std::optional<int64_t> early_stopping_patience;
  double early_stopping_threshold = 0;
  std::optional<int64_t> eval_generate;
  int64_t eval_max_new_tokens = 128;

  static constexpr auto fields() {
    using T = LoggingArguments;
    return FieldTable{
        Field{"logging_strategy", &T::logging_strategy, "no, steps or epoch"},
        Field{"logging_steps", &T::logging_steps, "steps between log entries; below 1: a share of all steps"},
        Field{"logging_first_step", &T::logging_first_step, "log step 1 too"},
        Field{"logging_nan_inf_filter", &T::logging_nan_inf_filter,
              "leave batches with an inf or NaN loss out of the mean evaluation loss, with a warning; training losses are never "
              "filtered"},
        Field{"include_num_input_tokens_seen", &T::include_num_input_tokens_seen,
              "log num_input_tokens_seen and tokens per second: no, all or non_padding; the last two are equal without padding"},
        Field{"include_tokens_per_second", &T::include_tokens_per_second, "log train_tokens_per_second at the end"},
        Field{"eval_strategy", &T::eval_strategy, "no, steps or epoch"},
        Field{"eval_steps", &T::eval_steps, "steps between evaluations; below 1: a share of all steps; unset: logging_steps"},
        Field{"eval_delay", &T::eval_delay, "no evaluation before this step or epoch (the unit of eval_strategy)"},
        Field{"eval_on_start", &T::eval_on_start, "evaluate before the first step"},
        Field{"save_strategy", &T::save_strategy, "no, steps, epoch or best (each time metric_for_best_model improves)"},
        Field{"save_steps", &T::save_steps, "steps between checkpoints; below 1: a share of all steps"},
        Field{"save_total_limit", &T::save_total_limit, "checkpoints to keep: the newest ones and the best; unset or 0: all"},
        Field{"save_only_model", &T::save_only_model,
              "save checkpoints without optimizer and run state; a run cannot resume from them"},
        Field{"load_best_model_at_end", &T::load_best_model_at_end, "load the adapters of the best evaluation at the end"},
        Field{"metric_for_best_model", &T::metric_for_best_model,
              "evaluation metric that selects the best model; unset with load_best_model_at_end: loss"},
        Field{"greater_is_better", &T::greater_is_better,
              "a higher metric_for_best_model is better; unset: true unless its name ends in loss"},
        Field{"early_stopping_patience", &T::early_stopping_patience,
              "on the command line: end the run after so many evaluations in a row that do not improve metric_for_best_model; "
              "unset: never"},
        Field{"early_stopping_threshold", &T::early_stopping_threshold,
              "with early_stopping_patience: an improvement must be larger than this"},
        Field{"eval_generate", &T::eval_generate, "answers per evaluation, into eval_answers.jsonl; unset: 8, at the end; 0: none"},
        Field{"eval_max_new_tokens", &T::eval_max_new_tokens, "with eval_generate: tokens of an answer, at most"}};
  }
};

struct TrainingArguments : RunArguments, LoggingArguments {
  static constexpr auto fields() { return FieldTable{RunArguments::fields(), LoggingArguments::fields()}; }
  static constexpr std::array<Alias, 6> aliases() {
    return {Alias{"evaluation_strategy", "eval_strategy", kOlder},
            Alias{"no_cuda", "use_cpu", kOlder},
            Alias{"max_seq_length", "max_length", kOlder},
            Alias{"per_gpu_train_batch_size", "per_device_train_batch_size", kOlder},
            Alias{"per_gpu_eval_batch_size", "per_device_eval_batch_size", kOlder},
            Alias{"activation_checkpointing", "gradient_checkpointing"}};
  }

  /// Looks at each value and at those that must fit together.
  /// @throws ValueError naming the first wrong option, its rule and its value.
  void validate() const;

  /// @pre validate() has passed.
  [[nodiscard]] Precision precision() const { return bf16 ? Precision::kBf16 : fp16 ? Precision::kFp16 : Precision::kFp32; }
  [[nodiscard]] bool optimizer_is_8bit() const { return optim.ends_with("_8bit"); }
  [[nodiscard]] bool optimizer_is_paged() const { return optim.starts_with("paged_"); }
  /// The text that parse_segments() accepts. "everything" without gradient_checkpointing.
  [[nodiscard]] std::string keep_text() const;
  /// The options of memory, parsed. @throws ValueError as their parsers.
  [[nodiscard]] MemorySettings memory() const;
  /// The same for a model that has settings already: a base that waits on the host stays there, as it may not fit elsewhere.
  [[nodiscard]] MemorySettings memory_over(const MemorySettings& model) const;
  [[nodiscard]] double eval_interval() const { return eval_steps.value_or(0) > 0 ? *eval_steps : logging_steps; }
  /// train_sampling_strategy, or what its older form says.
  [[nodiscard]] std::string sampling() const { return group_by_length ? "group_by_length" : train_sampling_strategy; }
  /// Are input tokens counted in the log?
  [[nodiscard]] bool counts_input_tokens() const;
  /// The metric that decides which evaluation is the best, with its "eval_"; empty: none does.
  [[nodiscard]] std::string best_metric_name() const;
  /// greater_is_better, or what transformers derives from the metric's name.
  [[nodiscard]] bool best_is_greatest() const;
};

}  // namespace qlorapp
