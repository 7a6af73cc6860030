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

  static constexpr auto fields() {
    using T = LoggingArguments;
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
        Field{"eval_strategy", &T::eval_strategy, "no, steps or epoch"},
        Field{"eval_steps", &T::eval_steps, "steps between evaluations; below 1: a share; unset: logging_steps"},
        Field{"eval_delay", &T::eval_delay, "no evaluation before this step or epoch, whichever eval_strategy counts"},
        Field{"eval_on_start", &T::eval_on_start, "evaluate before the first step"},
        Field{"save_strategy", &T::save_strategy, "no, steps, epoch or best (each time metric_for_best_model improves)"},
        Field{"save_steps", &T::save_steps, "steps between checkpoints; below 1: a share of all steps"},
        Field{"save_total_limit", &T::save_total_limit, "checkpoints to keep, the oldest go, the best stays; unset or 0: all"},
        Field{"save_only_model", &T::save_only_model, "checkpoints without optimizer and run state, which cannot be resumed from"},
        Field{"load_best_model_at_end", &T::load_best_model_at_end, "the adapters of the best evaluation, at the end"},
        Field{"metric_for_best_model", &T::metric_for_best_model,
              "which metric of an evaluation is the best one's; with load_best_model_at_end unset: loss"},
        Field{"greater_is_better", &T::greater_is_better, "the metric's direction; unset: unless its name ends in loss"}};
  }
};

}  // namespace qlorapp
