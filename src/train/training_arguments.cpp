// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/training_arguments.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string_view>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "core/printable.hpp"
#include "json/python_json.hpp"
#include "nn/base_store.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/train/schedule.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kWhere = "[TrainingArguments] ";

void at_least(std::string_view name, int64_t value, int64_t least) {
  QLORAPP_CHECK_VALUE(value >= least, "{}{} must be an integer >= {}; got {}.", kWhere, name, least, value);
}

void not_negative(std::string_view name, double value) {
  QLORAPP_CHECK_VALUE(std::isfinite(value) && value >= 0, "{}{} must be finite and >= 0; got {}.", kWhere, name, value);
}

void positive(std::string_view name, double value) {
  QLORAPP_CHECK_VALUE(std::isfinite(value) && value > 0, "{}{} must be finite and > 0; got {}.", kWhere, name, value);
}

void below_one(std::string_view name, double value) {
  QLORAPP_CHECK_VALUE(value >= 0 && value < 1, "{}{} must be in [0, 1); got {}.", kWhere, name, value);
}

void one_of(std::string_view name, std::string_view value, std::span<const std::string_view> known) {
  QLORAPP_CHECK_VALUE(std::find(known.begin(), known.end(), value) != known.end(), "{}{} must be one of {}; got '{}'.{}", kWhere,
                      name, joined(known), value, did_you_mean(value, known));
}

std::string joined(const std::vector<std::string>& entries) {
  std::string text;
  for (const std::string& entry : entries) text += (text.empty() ? "" : ",") + entry;
  return text;
}

/// A number of steps, or below 1 a share of all.
void interval(std::string_view name, double value) {
  positive(name, value);
  QLORAPP_CHECK_VALUE(value < 1 || value == std::floor(value), "{}{} must be an integer if bigger than 1; got {}.", kWhere, name,
                      value);
}

/// The settings fit the schedule, and end below the rate that they begin with.
void check_schedule(const TrainingArguments& args) {
  const Schedule schedule = make_schedule(args.lr_scheduler_type, args.lr_scheduler_kwargs.json);
  QLORAPP_CHECK_VALUE(schedule.type != ScheduleType::kPolynomial || args.learning_rate > schedule.end_rate,
                      "{}learning_rate must be above the lr_end of lr_scheduler_kwargs, {}; got {}.", kWhere, schedule.end_rate,
                      args.learning_rate);
}

/// The checkpoint of the best evaluation can only be there if each evaluation that may be the best is followed by a save.
void check_best_model(const TrainingArguments& args) {
  const bool saves_best = args.save_strategy == "best";
  QLORAPP_CHECK_VALUE(!saves_best || args.eval_strategy != "no",
                      "{}save_strategy=best needs evaluations. Set eval_strategy to steps or epoch.", kWhere);
  QLORAPP_CHECK_VALUE(!saves_best || args.load_best_model_at_end || args.metric_for_best_model,
                      "{}save_strategy=best needs metric_for_best_model. Set it to loss, or to a metric of your own.", kWhere);
  if (!args.load_best_model_at_end || saves_best) return;
  QLORAPP_CHECK_VALUE(args.eval_strategy == args.save_strategy && args.eval_strategy != "no",
                      "{}load_best_model_at_end needs eval_strategy and save_strategy to be the same, steps or epoch, or "
                      "save_strategy=best; got {} and {}.",
                      kWhere, args.eval_strategy, args.save_strategy);
  if (args.eval_strategy != "steps") return;
  const double saves = args.save_steps, evals = args.eval_interval();
  const double times = saves / evals;
  QLORAPP_CHECK_VALUE((saves < 1) == (evals < 1) && std::abs(times - std::round(times)) < 1e-6 && times > 0.5,
                      "{}load_best_model_at_end needs save_steps to be a multiple of eval_steps; got {} and {}.", kWhere, saves,
                      evals);
}

/// As transformers' EarlyStoppingCallback, which is given to a trainer.
void check_early_stopping(const TrainingArguments& args) {
  not_negative("early_stopping_threshold", args.early_stopping_threshold);
  if (!args.early_stopping_patience) {
    QLORAPP_CHECK_VALUE(args.early_stopping_threshold == 0,
                        "{}early_stopping_threshold={} needs early_stopping_patience. Give both.", kWhere,
                        args.early_stopping_threshold);
    return;
  }
  at_least("early_stopping_patience", *args.early_stopping_patience, 1);
  QLORAPP_CHECK_VALUE(args.eval_strategy != "no",
                      "{}early_stopping_patience needs evaluations. Set eval_strategy to steps or epoch.", kWhere);
  QLORAPP_CHECK_VALUE(!args.best_metric_name().empty(),
                      "{}early_stopping_patience needs metric_for_best_model, or load_best_model_at_end, whose metric is the loss.",
                      kWhere);
  if (!args.load_best_model_at_end) {
    log_warning_once(message(
        "{}early_stopping_patience without load_best_model_at_end: the adapters at the end are the last ones, not the best.",
        kWhere));
  }
}

}  // namespace

bool TrainingArguments::counts_input_tokens() const {
  const auto* word = std::get_if<std::string>(&include_num_input_tokens_seen);
  return word ? *word != "no" : std::get<bool>(include_num_input_tokens_seen);
}

std::string TrainingArguments::best_metric_name() const {
  if (!metric_for_best_model && !load_best_model_at_end) return "";
  const std::string name = metric_for_best_model.value_or("loss");
  return name.starts_with("eval_") ? name : "eval_" + name;
}

bool TrainingArguments::best_is_greatest() const { return greater_is_better.value_or(!best_metric_name().ends_with("loss")); }

void TrainingArguments::validate() const {
  static constexpr std::array<std::string_view, 6> kOptimizers{"adamw_torch",    "adamw_torch_fused", "adamw_8bit",
                                                               "adamw_bnb_8bit", "paged_adamw_8bit",  "paged_adamw_32bit"};
  static constexpr std::array<std::string_view, 3> kIntervals{"no", "steps", "epoch"};
  static constexpr std::array<std::string_view, 4> kSaves{"no", "steps", "epoch", "best"};
  static constexpr std::array<std::string_view, 3> kSampling{"random", "sequential", "group_by_length"};

  QLORAPP_CHECK_VALUE(!output_dir.empty(), "{}output_dir must not be empty. Name a folder.", kWhere);
  try {
    std::string ignored;
    format::append_json_string(ignored, output_dir, /*ensure_ascii=*/true);
  } catch (const ValueError&) {  // checkpoints name it
    throw ValueError(message("{}output_dir must be UTF-8; got {}. Name another folder.", kWhere, printable(output_dir)));
  }
  at_least("per_device_train_batch_size", per_device_train_batch_size, 1);
  at_least("per_device_eval_batch_size", per_device_eval_batch_size, 1);
  at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1);
  QLORAPP_CHECK_VALUE(max_steps == -1 || max_steps > 0, "{}max_steps must be > 0, or -1 to follow num_train_epochs; got {}.",
                      kWhere, max_steps);
  if (max_steps < 0) positive("num_train_epochs", num_train_epochs);
  not_negative("learning_rate", learning_rate);
  one_of("lr_scheduler_type", lr_scheduler_type, schedule_names());
  check_schedule(*this);
  not_negative("warmup_steps", warmup_steps);
  QLORAPP_CHECK_VALUE(warmup_ratio >= 0 && warmup_ratio <= 1, "{}warmup_ratio must be in [0, 1]; got {}.", kWhere, warmup_ratio);
  one_of("optim", optim, kOptimizers);
  not_negative("weight_decay", weight_decay);
  below_one("adam_beta1", adam_beta1);
  below_one("adam_beta2", adam_beta2);
  not_negative("adam_epsilon", adam_epsilon);
  QLORAPP_CHECK_VALUE(!optimizer_is_8bit() || static_cast<float>(adam_epsilon) > 0,
                      "{}adam_epsilon must be > 0 with optim={}, because a stored second moment may round to 0; got {}.", kWhere,
                      optim, adam_epsilon);
  not_negative("max_grad_norm", max_grad_norm);
  QLORAPP_CHECK_VALUE(!(fp16 && bf16), "{}At most one of fp16 and bf16 can be True, but not both.", kWhere);
  check_segments(joined(checkpoint_keep));
  memory().validate();
  if (!memory_budget.empty() && memory_budget != "auto") static_cast<void>(parse_bytes("memory_budget", memory_budget));
  QLORAPP_CHECK_VALUE(!(fp8 && fp16), "{}fp8=True computes the rest of the step in bfloat16; got fp16=True. Leave one of them out.",
                      kWhere);
  QLORAPP_CHECK_VALUE(
      !fp8 || memory().weight_workspace != WeightWorkspace::kProjection,
      "{}fp8=True multiplies projections that share an input as one; got weight_workspace=projection. Use layer or stack.", kWhere);
  QLORAPP_CHECK_VALUE(!cuda_graphs || (memory_budget.empty() && !auto_find_batch_size),
                      "{}cuda_graphs=True keeps the memory of each recorded micro-step, which memory_budget and "
                      "auto_find_batch_size do not plan. Leave it or them out.",
                      kWhere);
  static constexpr std::array<std::string_view, 3> kSharding{"no", "full", "node"};
  one_of("base_sharding", base_sharding, kSharding);
  const std::string_view obstacle = obstacle_to_graphs(residency_of(kWhere, base_on_host, base_sharding));
  QLORAPP_CHECK_VALUE(!cuda_graphs || obstacle.empty(), "{}cuda_graphs=True must be without {}; got both. Leave one of them out.",
                      kWhere, obstacle);
  QLORAPP_CHECK_VALUE(std::isfinite(val_size) && val_size >= 0 && (val_size < 1 || val_size == std::floor(val_size)),
                      "{}val_size must be a number of rows, or a share below 1; got {}.", kWhere, val_size);
  at_least("max_length", max_length, 2);
  static constexpr std::array<std::string_view, 3> kPacking{"bfd", "bfd_split", "wrapped"};
  one_of("packing_strategy", packing_strategy, kPacking);
  one_of("train_sampling_strategy", train_sampling_strategy, kSampling);
  static constexpr std::array<std::string_view, 3> kPolicies{"raise", "skip", "rollback"};
  one_of("on_non_finite", on_non_finite, kPolicies);
  if (torch_empty_cache_steps) at_least("torch_empty_cache_steps", *torch_empty_cache_steps, 1);

  one_of("logging_strategy", logging_strategy, kIntervals);
  if (logging_strategy == "steps") interval("logging_steps", logging_steps);
  one_of("eval_strategy", eval_strategy, kIntervals);
  if (eval_strategy == "steps") interval("eval_steps", eval_interval());
  not_negative("eval_delay", eval_delay);
  one_of("save_strategy", save_strategy, kSaves);
  if (save_strategy == "steps" && save_steps != 0) interval("save_steps", save_steps);  // 0: at the end alone, as in transformers
  if (save_total_limit) at_least("save_total_limit", *save_total_limit, 0);
  if (eval_generate) at_least("eval_generate", *eval_generate, 0);
  at_least("eval_max_new_tokens", eval_max_new_tokens, 1);
  at_least("seed", seed, 0);
  if (data_seed) at_least("data_seed", *data_seed, 0);
  if (const auto* word = std::get_if<std::string>(&include_num_input_tokens_seen)) {
    static constexpr std::array<std::string_view, 3> kCounts{"no", "all", "non_padding"};
    one_of("include_num_input_tokens_seen", *word, kCounts);
  }
  check_best_model(*this);
  check_early_stopping(*this);

  if (lr_scheduler_type == "constant" && (warmup_steps > 0 || warmup_ratio > 0)) {
    log_warning_once(message("{}lr_scheduler_type=constant has no warm-up; use constant_with_warmup for one.", kWhere));
  }
}

std::string TrainingArguments::keep_text() const { return gradient_checkpointing ? joined(checkpoint_keep) : "everything"; }

MemorySettings TrainingArguments::memory() const {
  return {loss_chunk_rows, mlp_tile_rows, parse_weight_workspace(weight_workspace), embedding_on_host, base_on_host};
}

MemorySettings TrainingArguments::memory_over(const MemorySettings& model) const {
  MemorySettings settings = memory();
  settings.base_on_host = settings.base_on_host || model.base_on_host;
  return settings;
}

}  // namespace qlorapp
