// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/plan_run.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include "qlorapp/core/check.hpp"
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

PlanSettings run_settings(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  PlanSettings settings = settings_of(model);
  apply_arguments(settings, args);
  settings.length = std::max<int64_t>(2, longest);
  if (!evaluates) settings.eval_batch = 0;
  settings.device.architecture = gpu_architecture(model.device());
  return settings;
}

/// All adapters' gradients meet once an optimizer step; for the rest of it the cards do not wait for each other.
constexpr double kScalingOfTwo = 0.97;

}  // namespace

void apply_arguments(PlanSettings& settings, const TrainingArguments& args) {
  settings.batch = args.per_device_train_batch_size;
  settings.accumulation = args.gradient_accumulation_steps;
  settings.length = args.max_length;
  settings.eval_batch = args.eval_strategy == "no" ? 0 : args.per_device_eval_batch_size;
  settings.optimizer_is_8bit = args.optimizer_is_8bit();
  settings.float8 = args.fp8;
}

PlanSettings plan_settings(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args) {
  PlanSettings settings;
  settings.model = model;
  settings.lora = lora;
  settings.compute_dtype = compute_dtype(args);
  apply_arguments(settings, args);
  settings.memory = args.memory();
  if (args.gradient_checkpointing) settings.segments = parse_segments(args.keep_text(), model.num_hidden_layers);
  return settings;
}

namespace {

/// The largest micro-batch, not above the one that is asked for, with which a step fits; the effective batch stays.
FittedArguments fit_batch(const PlanSettings& settings, const TrainingArguments& args, Bytes available) {
  const int64_t rows = args.per_device_train_batch_size * args.gradient_accumulation_steps;
  for (int64_t batch = args.per_device_train_batch_size; batch >= 1; --batch) {
    if (rows % batch != 0) continue;
    FittedArguments fitted{args, settings, ""};
    fitted.settings.batch = fitted.args.per_device_train_batch_size = batch;
    fitted.settings.accumulation = fitted.args.gradient_accumulation_steps = rows / batch;
    if (!plan_memory(fitted.settings, available).fits) continue;
    fitted.text = concat("auto_find_batch_size: ", batch, " x ", rows / batch, " rows");
    return fitted;
  }
  PlanSettings one = settings;
  one.batch = one.accumulation = 1;
  const MemoryPlan plan = plan_memory(one);
  throw ValueError(concat("[auto_find_batch_size] not even one row of ", settings.length, " tokens fits ", to_string(available),
                          "; it takes ", to_string(plan.of(plan.fullest_of_training()).allocated),
                          ". Ways out: ", ways_out(one, available), "; or memory_budget=auto, which buys memory with time."));
}

}  // namespace

FittedArguments fit_arguments(const PlanSettings& settings, const TrainingArguments& args, const Gpu& rates, Bytes available) {
  if (args.memory_budget.empty())
    return args.auto_find_batch_size ? fit_batch(settings, args, available) : FittedArguments{args, settings, ""};
  FittedArguments fitted{args, settings, ""};
  const Bytes room = args.memory_budget == "auto" ? available : parse_bytes("memory_budget", args.memory_budget);
  const BudgetChoice choice =
      fit_budget(settings, rates, {room, args.per_device_train_batch_size * args.gradient_accumulation_steps});
  TrainingArguments& own = fitted.args;
  own.per_device_train_batch_size = choice.settings.batch;
  own.gradient_accumulation_steps = choice.settings.accumulation;
  own.gradient_checkpointing = choice.keep != to_string(Keep::kEverything);
  own.checkpoint_keep = {choice.keep};
  own.loss_chunk_rows = choice.settings.memory.loss_chunk_rows;
  own.mlp_tile_rows = choice.settings.memory.mlp_tile_rows;
  own.weight_workspace = to_string(choice.settings.memory.weight_workspace);
  own.embedding_on_host = choice.settings.memory.embedding_on_host;
  fitted.settings = choice.settings;
  fitted.text = choice.text;
  return fitted;
}

FittedArguments fit_arguments(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  const at::Device device = model.device();
  return fit_arguments(run_settings(model, args, longest, evaluates), args,
                       rates_of(gpu_name(device), gpu_architecture(device), {}), memory_for(device));
}

std::string advice_when_full(const CausalLM& model, const TrainingArguments& args, int64_t longest) {
  PlanSettings settings = run_settings(model, args, longest, /*evaluates=*/false);
  settings.batch = settings.accumulation = 1;
  const MemoryPlan plan = plan_memory(settings);
  const Bytes need = plan.of(plan.fullest_of_training()).allocated, room = memory_for(model.device());
  return concat("One row of ", settings.length, " tokens takes ", to_string(need), ", and there are ", to_string(room),
                need > room ? concat(": ", to_string(need - room), " are missing") : std::string(", less what is in pieces"),
                ". Ways out: ", ways_out(settings, room), "; or memory_budget=auto, which buys memory with time.");
}

std::string plan_line(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates) {
  const PlanSettings settings = run_settings(model, args, longest, evaluates);
  return summary_line(plan_memory(settings), settings);
}

Recommendation recommend(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args, const Gpu& gpu,
                         const Deadline& deadline, const DeviceAllowance& allowance) {
  const auto positive = [](const char* name, double value) {
    QLORAPP_CHECK_VALUE(std::isfinite(value) && value > 0, "[plan] ", name, " must be above 0; got ", value, ".");
  };
  positive("hours", deadline.hours);
  positive("dataset_rows", static_cast<double>(deadline.dataset_rows));
  positive("avg_tokens", static_cast<double>(deadline.average_tokens));
  positive("gpus", static_cast<double>(deadline.gpus));
  positive("effective_batch", static_cast<double>(deadline.effective_batch));
  QLORAPP_CHECK_VALUE(deadline.average_tokens <= args.max_length, "[plan] avg_tokens must be at most max_length, ", args.max_length,
                      "; got ", deadline.average_tokens, ". Give --seq: the length that rows are cut to.");

  Recommendation best;
  best.args = args;
  best.lora = lora;
  best.args.bf16 = gpu.has_bf16();
  best.args.fp16 = !gpu.has_bf16();
  const Bytes room = room_on(gpu, allowance);
  double best_rate = 0;
  for (const Keep keep : {Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly, Keep::kInputOnHost}) {
    TrainingArguments own = best.args;
    own.gradient_checkpointing = keep != Keep::kEverything;
    if (own.gradient_checkpointing) own.checkpoint_keep = {std::string(to_string(keep))};
    PlanSettings settings = plan_settings(model, lora, own);
    settings.accumulation = 1;
    settings.device = {at::kCUDA, gpu.architecture, 1};
    const int64_t most = std::max<int64_t>(1, deadline.effective_batch / deadline.gpus);
    int64_t batch = largest_batch(settings, room, most);
    while (batch > 0 && most % batch != 0) --batch;  // the effective batch comes out even
    if (batch == 0) continue;
    settings.batch = batch;
    const StepTime time = step_time(settings, gpu, static_cast<double>(deadline.average_tokens));
    const int64_t accumulation = most / batch;
    const double seconds = time.micro_batch() * static_cast<double>(accumulation) + time.optimizer;
    const double rate = static_cast<double>(batch * accumulation) / seconds;  // rows a second on one card
    if (rate <= best_rate * 1.01) continue;  // a larger batch that gains nothing is not worth its memory
    best_rate = rate;
    best.args = own;
    best.args.per_device_train_batch_size = batch;
    best.args.per_device_eval_batch_size = batch;
    best.args.gradient_accumulation_steps = accumulation;
    best.plan = plan_memory(settings);
  }
  QLORAPP_CHECK_VALUE(best_rate > 0, "[plan] not one row of ", args.max_length, " tokens fits ", to_string(room),
                      " with this model, whatever is recomputed. Give a shorter --seq, a smaller model or a larger GPU.");

  const double cards = static_cast<double>(deadline.gpus);
  const double rows_a_second = best_rate * cards * (deadline.gpus > 1 ? kScalingOfTwo : 1.0);
  const double hours_an_epoch = static_cast<double>(deadline.dataset_rows) / rows_a_second / 3600;
  const double off = uncertainty(gpu.evidence);
  const double epochs_in_time = deadline.hours / (hours_an_epoch * (1 + off));
  best.epochs = epochs_in_time >= args.num_train_epochs ? args.num_train_epochs
                : epochs_in_time >= 1                   ? std::floor(epochs_in_time)
                                                        : std::floor(epochs_in_time * 100) / 100;
  QLORAPP_CHECK_VALUE(best.epochs > 0, "[plan] ", deadline.hours,
                      " hours are not enough for a hundredth of an epoch, which takes about ", fixed(hours_an_epoch, 1),
                      " h. Give more hours, more GPUs or fewer rows.");
  best.args.num_train_epochs = best.epochs;
  best.hours = hours_an_epoch * best.epochs;
  best.hours_at_most = best.hours * (1 + off);
  const int64_t batch = best.args.per_device_train_batch_size, accumulation = best.args.gradient_accumulation_steps;
  best.text = concat("batch ", batch, " x accumulation ", accumulation, " x ", deadline.gpus,
                     " GPU(s) = ", batch * accumulation * deadline.gpus, " rows an update; ",
                     best.args.fp16 ? "float16 with loss scaling (this card has no bfloat16)" : "bfloat16", "; ",
                     best.args.gradient_checkpointing ? "checkpointing, keeping " + best.args.keep_text()
                                                      : std::string("no checkpointing: everything fits"),
                     ".\n", to_string(best.plan.peak_reserved()), " of ", to_string(room), " on each card at ", args.max_length,
                     " tokens a row.\n", fixed(hours_an_epoch, 1), " h an epoch, ", fixed(best.epochs, best.epochs < 1 ? 2 : 0),
                     " epoch(s): ", fixed(best.hours, 1), " h, between ", fixed(best.hours * (1 - off), 1), " and ",
                     fixed(best.hours_at_most, 1), " h (", to_string(gpu.evidence), ") of ", fixed(deadline.hours, 0), " h.\n");
  return best;
}

}  // namespace qlorapp
