// SPDX-License-Identifier: Apache-2.0
/// The part of TrainingArguments about logging, evaluation and saving. See training_arguments.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "qlorapp/core/field_table.hpp"

namespace qlorapp {

struct LoggingArguments {
  std::string logging_strategy = "steps";
  double logging_steps = 500;
  bool logging_first_step = false;
  bool logging_nan_inf_filter = true;
  std::variant<bool, std::string> include_num_input_tokens_seen = std::string("no");
  bool include_tokens_per_second = false;
  std::string log_level = "passive";
  std::string log_level_replica = "warning";
  bool log_on_each_node = true;
  std::optional<bool> disable_tqdm;
  std::string eval_strategy = "no";
  std::optional<double> eval_steps;
  double eval_delay = 0;
  bool eval_on_start = false;
  bool prediction_loss_only = false;
  std::optional<int64_t> eval_accumulation_steps;
  bool eval_do_concat_batches = true;
  bool eval_use_gather_object = false;
  bool batch_eval_metrics = false;
  std::vector<std::string> include_for_metrics;
  bool include_inputs_for_metrics = false;
  bool jit_mode_eval = false;
  bool use_legacy_prediction_loop = false;
  std::string save_strategy = "steps";
  double save_steps = 500;
  std::optional<int64_t> save_total_limit;
  bool save_only_model = false;
  bool save_safetensors = true;
  bool save_on_each_node = false;
  bool enable_jit_checkpoint = false;
  bool load_best_model_at_end = false;
  std::optional<std::string> metric_for_best_model;
  std::optional<bool> greater_is_better;
  bool skip_memory_metrics = true;

  static constexpr auto fields() {
    using T = LoggingArguments;
    constexpr auto kSaid = FieldStatus::kAcceptedAndSaid;
    constexpr auto kRefused = FieldStatus::kRefused;
    return FieldTable{
        Field{"logging_strategy", &T::logging_strategy, "no, steps or epoch"},
        Field{"logging_steps", &T::logging_steps, "steps between log entries; below 1: a share of all steps"},
        Field{"logging_first_step", &T::logging_first_step, "log step 1 too"},
        Field{"logging_nan_inf_filter", &T::logging_nan_inf_filter,
              "the mean loss of an evaluation leaves out batches that are not finite, and says so; a training loss is always "
              "shown as it is"},
        Field{"include_num_input_tokens_seen", &T::include_num_input_tokens_seen,
              "log num_input_tokens_seen and tokens a second: no, all or non_padding, which are the same where nothing is "
              "padded"},
        Field{"include_tokens_per_second", &T::include_tokens_per_second, "log train_tokens_per_second at the end"},
        Field{"log_level", &T::log_level,
              "what the library says in Python: debug, info, warning, error, critical; passive: as logging is set"},
        Field{"log_level_replica", &T::log_level_replica, "", kSaid, "one process trains."},
        Field{"log_on_each_node", &T::log_on_each_node, "", kSaid, "one process trains."},
        Field{"disable_tqdm", &T::disable_tqdm, "plain lines instead of a progress bar; unset: where output is piped"},
        Field{"eval_strategy", &T::eval_strategy, "no, steps or epoch"},
        Field{"eval_steps", &T::eval_steps, "steps between evaluations; below 1: a share; unset: logging_steps"},
        Field{"eval_delay", &T::eval_delay, "no evaluation before this step or epoch, whichever eval_strategy counts"},
        Field{"eval_on_start", &T::eval_on_start, "evaluate before the first step"},
        Field{"prediction_loss_only", &T::prediction_loss_only, "evaluate() and predict() look at the loss only"},
        Field{"eval_accumulation_steps", &T::eval_accumulation_steps, "", kSaid, "predictions leave the device after each batch."},
        Field{"eval_do_concat_batches", &T::eval_do_concat_batches, "compute_metrics gets one array; false: a list of one a batch"},
        Field{"eval_use_gather_object", &T::eval_use_gather_object, "", kSaid, "one process evaluates."},
        Field{"batch_eval_metrics", &T::batch_eval_metrics,
              "compute_metrics is called for each batch, with compute_result for the last"},
        Field{"include_for_metrics", &T::include_for_metrics, "what compute_metrics gets besides: inputs, loss"},
        Field{"include_inputs_for_metrics", &T::include_inputs_for_metrics, "older form of include_for_metrics=[\"inputs\"]"},
        Field{"jit_mode_eval", &T::jit_mode_eval, "", kRefused,
              "blocks are hand-written C++, there is no graph to compile. Leave it out."},
        Field{"use_legacy_prediction_loop", &T::use_legacy_prediction_loop, "", kSaid, "there is one evaluation loop."},
        Field{"save_strategy", &T::save_strategy, "no, steps, epoch or best (each time metric_for_best_model improves)"},
        Field{"save_steps", &T::save_steps, "steps between checkpoints; below 1: a share of all steps"},
        Field{"save_total_limit", &T::save_total_limit, "checkpoints to keep, the oldest go, the best stays; unset or 0: all"},
        Field{"save_only_model", &T::save_only_model, "checkpoints without optimizer and run state, which cannot be resumed from"},
        Field{"save_safetensors", &T::save_safetensors, "", kRefused, "adapters are written as safetensors only. Leave it true."},
        Field{"save_on_each_node", &T::save_on_each_node, "", kSaid, "one process saves."},
        Field{"enable_jit_checkpoint", &T::enable_jit_checkpoint,
              "in Python: SIGTERM ends the run after its step, with a checkpoint"},
        Field{"load_best_model_at_end", &T::load_best_model_at_end, "the adapters of the best evaluation, at the end"},
        Field{"metric_for_best_model", &T::metric_for_best_model,
              "which metric of an evaluation is the best one's; with load_best_model_at_end unset: loss"},
        Field{"greater_is_better", &T::greater_is_better, "the metric's direction; unset: unless its name ends in loss"},
        Field{"skip_memory_metrics", &T::skip_memory_metrics,
              "false: metrics of train() have train_mem_peak, on a GPU train_mem_gpu_peak, in bytes"}};
  }
};

}  // namespace qlorapp
