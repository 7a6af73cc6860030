// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/plan_run.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include "core/check.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/budget.hpp"
#include "qlorapp/memory/roofline.hpp"

namespace qlorapp {
namespace {

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

at::ScalarType compute_dtype(const TrainingArguments& args) {
  return args.bf16 ? at::kBFloat16 : args.fp16 ? at::kHalf : at::kFloat;
}

/// All adapters' gradients are summed once per optimizer step; for the rest of it the cards do not wait for each other. Assumed, not measured.
constexpr double kShareOfEachCard = 0.97;
/// Of a card without a measurement: plans may be 3 % under, and a day's run should not end for that.
constexpr double kSafePart = 0.95;

/// What a budget chose, as the run's arguments.
void apply_choice(const BudgetChoice& choice, TrainingArguments& args) {
  args.per_device_train_batch_size = choice.settings.batch;
  args.gradient_accumulation_steps = choice.settings.accumulation;
  args.gradient_checkpointing = choice.keep != to_string(Keep::kEverything);
  args.checkpoint_keep = {choice.keep};
  args.loss_chunk_rows = choice.settings.memory.loss_chunk_rows;
  args.mlp_tile_rows = choice.settings.memory.mlp_tile_rows;
  args.weight_workspace = to_string(choice.settings.memory.weight_workspace);
  args.embedding_on_host = choice.settings.memory.embedding_on_host;
  args.base_on_host = choice.settings.memory.base_on_host;
}

}  // namespace

ops::PlannedDevice planned_device(at::Device device) {
  ops::PlannedDevice planned{device.type(), gpu_architecture(device), at::get_num_threads()};
  planned.expandable_segments = ops::uses_expandable_segments();
  if (device.is_cuda()) planned.multiprocessors = rates_of(gpu_name(device), planned.architecture, {}).multiprocessors;
  return planned;
}

namespace {

/// Sets the fields that the arguments decide. The others stay.
PlanSettings completed(PlanSettings settings, const TrainingArguments& args) {
  settings.batch = args.per_device_train_batch_size;
  settings.accumulation = args.gradient_accumulation_steps;
  settings.length = args.max_length;
  settings.eval_batch = args.eval_strategy == "no" ? 0 : args.per_device_eval_batch_size;
  settings.optimizer_is_8bit = args.optimizer_is_8bit();
  settings.optimizer_is_paged = args.optimizer_is_paged();
  settings.deterministic = settings.deterministic || args.full_determinism;
  settings.float8 = args.fp8;
  if (args.gradient_checkpointing) settings.segments = parse_segments(args.keep_text(), settings.model.num_hidden_layers);
  if (args.memory() != MemorySettings{}) settings.memory = args.memory_over(settings.memory);
  return settings;
}

}  // namespace

PlanSettings plan_settings(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args,
                           const PlannedBase& base) {
  return completed({.model = model,
                    .lora = lora,
                    .load_in_4bit = base.load_in_4bit,
                    .quantization = base.quantization,
                    .keep_blocks = base.keep_blocks,
                    .skip_modules = base.skip_modules,
                    .compute_dtype = base.compute_dtype.value_or(compute_dtype(args)),
                    .base_shards = args.base_sharding == "no" ? 1 : base.ranks,
                    .device = base.device},
                   args);
}

PlanSettings plan_settings(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  PlanSettings settings = completed(settings_of(model), args);
  settings.length = std::max<int64_t>(2, longest);
  if (!evaluates) settings.eval_batch = 0;
  settings.device = planned_device(model.device());
  return settings;
}

namespace {

/// Rows of an optimizer step.
int64_t effective_batch(const TrainingArguments& args) {
  int64_t rows = 0;
  QLORAPP_CHECK_VALUE(!__builtin_mul_overflow(args.per_device_train_batch_size, args.gradient_accumulation_steps, &rows),
                      "[plan] per_device_train_batch_size x gradient_accumulation_steps must fit in 64 bits; got {} x {}. Make one "
                      "of them smaller.",
                      args.per_device_train_batch_size, args.gradient_accumulation_steps);
  return rows;
}

/// The largest micro-batch, not above the one that is asked for, with which a step fits; the effective batch stays.
FittedArguments fit_batch(const PlanSettings& settings, const TrainingArguments& args, Bytes available) {
  const int64_t rows = effective_batch(args);
  constexpr int64_t kMostRows = 1 << 20;  // more fit nowhere
  for (int64_t batch = std::min(kMostRows, args.per_device_train_batch_size); batch >= 1; --batch) {
    if (rows % batch != 0) continue;
    FittedArguments fitted{args, settings, ""};
    fitted.settings.batch = fitted.args.per_device_train_batch_size = batch;
    fitted.settings.accumulation = fitted.args.gradient_accumulation_steps = rows / batch;
    if (!plan_memory(fitted.settings, available).fits) continue;
    fitted.text = message("auto_find_batch_size: {} x {} rows", batch, rows / batch);
    return fitted;
  }
  throw ValueError(message("[auto_find_batch_size] not even one row fits. {}", advice_for_one_row(settings, available)));
}

/// The fastest way to take an update of `rows` rows on one card, and how fast it is.
struct CardRun {
  TrainingArguments args;
  MemoryPlan plan;
  std::string way;
  double rows_a_second = 0;
};

/// @param ranks  over which args.base_sharding shards the base.
CardRun best_on_card(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args, const Gpu& gpu,
                     Bytes room, int64_t rows, int64_t average_tokens, int64_t ranks) {
  CardRun run{args, {}, "", 0};
  run.args.bf16 = gpu.has_bf16();
  run.args.fp16 = !gpu.has_bf16();
  PlanSettings settings = plan_settings(model, lora, run.args, {.ranks = ranks});
  settings.segments.clear();
  settings.device = gpu.device();
  const bool evaluates = settings.eval_batch > 0;
  settings.eval_batch = evaluates ? 1 : 0;
  settings.batch = settings.accumulation = 1;
  const BudgetChoice choice = fit_budget(
      settings, gpu,
      {Bytes{static_cast<int64_t>(kSafePart * static_cast<double>(room.count))}, rows, static_cast<double>(average_tokens), "gpu"});
  apply_choice(choice, run.args);
  run.plan = choice.plan;
  run.way = choice.way;
  run.rows_a_second = static_cast<double>(rows) / choice.seconds;
  if (evaluates) {  // of as many rows as training has, which mostly takes less than training
    PlanSettings same = choice.settings;
    same.eval_batch = same.batch;
    const MemoryPlan plan = plan_memory(same, room);
    run.args.per_device_eval_batch_size = plan.fits ? same.eval_batch : 1;
    if (plan.fits) run.plan = plan;
  }
  return run;
}

/// What --hours takes for granted, a line each, with the option that says otherwise.
std::string assumptions(const Deadline& deadline, const Recommendation& best, const TrainingArguments& asked, const Gpu& gpu) {
  const auto whole = [](double value) { return fixed(value, value == std::floor(value) ? 0 : 2); };
  std::string text = "Assumed:\n";
  const auto line = [&]<class... Args>(Format<Args...> what, Args&&... args) {
    text += "  - " + message(what, std::forward<Args>(args)...) + "\n";
  };
  line(
      "{} rows (--dataset_rows), {} tokens each on average (--avg_tokens), at most {} (--seq). A conversation of several turns "
      "is one row.",
      deadline.dataset_rows, deadline.average_tokens, asked.max_length);
  line(
      "Rows are concatenated without padding. Time follows the average length, memory the longest row; --packing changes neither.");
  line("{} of {} epochs (--num_train_epochs), {}; {} rows per update (--effective_batch).", whole(best.epochs),
       whole(asked.num_train_epochs),
       best.epochs < asked.num_train_epochs ? "as many as end in time at the slowest estimate" : "all of which end in time",
       deadline.effective_batch);
  line("Products at {} TFLOP/s, {} % of the {} published ({}); the card runs nothing else.",
       fixed(gpu.tensor_rate * gpu.sustained * 1e-12, 0), fixed(100 * gpu.sustained, 0), fixed(gpu.tensor_rate * 1e-12, 0),
       to_string(gpu.evidence));
  line("The time excludes loading, evaluation and saving.");
  line("Quality is not estimated: rank {} (--r), learning rate and epochs need a check on held-out rows (--eval_data).",
       best.lora.r);
  return text;
}

}  // namespace

FittedArguments fit_arguments(const PlanSettings& settings, const TrainingArguments& args, const Gpu& rates, Bytes available) {
  if (args.memory_budget.empty())
    return args.auto_find_batch_size ? fit_batch(settings, args, available) : FittedArguments{args, settings, ""};
  FittedArguments fitted{args, settings, ""};
  const Bytes room =
      args.memory_budget == "auto" ? available : std::min(available, parse_bytes("memory_budget", args.memory_budget));
  const BudgetChoice choice = fit_budget(settings, rates, {room, effective_batch(args)});
  apply_choice(choice, fitted.args);
  fitted.settings = choice.settings;
  fitted.text = choice.text;
  return fitted;
}

FittedArguments fit_arguments(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  const at::Device device = model.device();
  return fit_arguments(plan_settings(model, args, longest, evaluates), args,
                       rates_of(gpu_name(device), gpu_architecture(device), {}), memory_for(device));
}

std::string advice_when_full(const CausalLM& model, const TrainingArguments& args, int64_t longest) {
  return advice_for_one_row(plan_settings(model, args, longest, /*evaluates=*/false), memory_for(model.device()));
}

std::string plan_line(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  const PlanSettings settings = plan_settings(model, args, longest, evaluates);
  return summary_line(plan_memory_in(settings, memory_for(model.device())), settings);
}

Bytes planned_peak(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  return plan_memory_in(plan_settings(model, args, longest, evaluates), memory_for(model.device())).training_peak();
}

Recommendation recommend(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args, const Gpu& gpu,
                         const Deadline& deadline, const DeviceAllowance& allowance) {
  const auto positive = [](const char* name, double value) {
    QLORAPP_CHECK_VALUE(std::isfinite(value) && value > 0, "[plan] {} must be above 0; got {}.", name, value);
  };
  constexpr double kMostHours = 1e6;
  QLORAPP_CHECK_VALUE(!(deadline.hours > kMostHours), "[plan] hours must be at most {}; got {}.", kMostHours, deadline.hours);
  positive("hours", deadline.hours);
  positive("dataset_rows", static_cast<double>(deadline.dataset_rows));
  positive("avg_tokens", static_cast<double>(deadline.average_tokens));
  positive("gpus", static_cast<double>(deadline.gpus));
  positive("effective_batch", static_cast<double>(deadline.effective_batch));
  QLORAPP_CHECK_VALUE(deadline.effective_batch >= deadline.gpus,
                      "[plan] effective_batch must be at least one row per GPU, {}; got {}.", deadline.gpus,
                      deadline.effective_batch);
  QLORAPP_CHECK_VALUE(
      deadline.effective_batch % deadline.gpus == 0,
      "[plan] effective_batch must be a multiple of gpus, {}, because each GPU computes the same number of rows; got {}.",
      deadline.gpus, deadline.effective_batch);
  QLORAPP_CHECK_VALUE(deadline.average_tokens <= args.max_length,
                      "[plan] avg_tokens must be at most max_length, {}; got {}. Give --seq: the length that rows are cut to.",
                      args.max_length, deadline.average_tokens);

  const Bytes room = room_on(gpu, allowance);
  const double off = uncertainty(gpu.evidence);
  const auto hours_of_epoch = [&](double rows_a_second) {
    const auto cards = static_cast<double>(deadline.gpus);
    return static_cast<double>(deadline.dataset_rows) / (rows_a_second * (deadline.gpus > 1 ? cards * kShareOfEachCard : 1)) / 3600;
  };
  const auto best_with = [&](const std::string& sharding) {
    TrainingArguments own = args;
    own.base_sharding = sharding;
    return best_on_card(model, lora, own, gpu, room, deadline.effective_batch / deadline.gpus, deadline.average_tokens,
                        deadline.gpus);
  };
  CardRun alone;
  try {
    alone = best_with(args.base_sharding);
  } catch (const ValueError&) {
    if (deadline.gpus == 1 || args.base_sharding != "no") throw;
    alone = best_with("full");  // the whole base does not fit on each
  }
  Recommendation best;
  best.args = alone.args;
  best.lora = lora;
  best.plan = alone.plan;
  const double hours_an_epoch = hours_of_epoch(alone.rows_a_second);
  const double epochs_in_time = deadline.hours / (hours_an_epoch * (1 + off));
  best.epochs = epochs_in_time >= args.num_train_epochs ? args.num_train_epochs
                : epochs_in_time >= 1                   ? std::floor(epochs_in_time)
                                                        : std::floor(epochs_in_time * 100) / 100;
  QLORAPP_CHECK_VALUE(best.epochs > 0,
                      "[plan] {} hours are not enough for a hundredth of an epoch; an epoch takes about {} h on {}. Give more "
                      "hours, a faster card or fewer rows.",
                      deadline.hours, fixed(hours_an_epoch, 1),
                      deadline.gpus == 1 ? std::string("one card") : message("{} cards", deadline.gpus));
  best.args.num_train_epochs = best.epochs;
  best.hours = hours_an_epoch * best.epochs;
  best.hours_at_most = best.hours * (1 + off);
  const auto between = [&](double hours) {
    return message("{} h, between {} and {} h ({})", fixed(hours, 1), fixed(hours * (1 - off), 1), fixed(hours * (1 + off), 1),
                   to_string(gpu.evidence));
  };
  best.text = message(
      "{}, on {} = {} rows per update; {}.\n{} of {} at {} tokens per row.\n{} h per epoch, {} epoch(s): {} of {} h.\n", alone.way,
      deadline.gpus == 1 ? std::string("one GPU") : message("each of {} GPUs", deadline.gpus), deadline.effective_batch,
      best.args.fp16 ? "float16 with loss scaling (this card has no bfloat16)" : "bfloat16", to_string(best.plan.peak_reserved()),
      to_string(room), args.max_length, fixed(hours_an_epoch, 1), fixed(best.epochs, best.epochs < 1 ? 2 : 0), between(best.hours),
      fixed(deadline.hours, deadline.hours == std::floor(deadline.hours) ? 0 : 2));
  if (best.args.base_sharding != "no")
    best.text += message("The frozen base is sharded over the {} GPUs (base_sharding).\n", deadline.gpus);
  if (deadline.gpus > 1) {
    best.text += message(
        "Start one process per GPU: torchrun --nproc-per-node {} --no-python qlorapp train --config FILE. Each GPU counts as {} % "
        "of one "
        "alone (assumed).\n",
        deadline.gpus, fixed(kShareOfEachCard * 100, 0));
  }
  best.text += assumptions(deadline, best, args, gpu);
  return best;
}

}  // namespace qlorapp
