// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/trainer.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/collate.hpp"
#include "qlorapp/data/sampler.hpp"
#include "qlorapp/train/base_fingerprint.hpp"
#include "qlorapp/train/evaluate.hpp"
#include "qlorapp/train/step.hpp"

namespace qlorapp {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// "steps" every n-th step, "epoch" at its end, "no" never; n below one is a share of the run.
bool is_due(const std::string& strategy, double every, int64_t step, int64_t max_steps, bool epoch_ends) {
  if (strategy == "epoch") return epoch_ends;
  if (strategy != "steps") return false;
  const int64_t interval = count_interval_steps(every, max_steps);
  return interval > 0 && step % interval == 0;
}

int64_t batch_count(size_t rows, int64_t batch_size, bool drop_last) {
  const auto n = static_cast<int64_t>(rows);
  return drop_last ? n / batch_size : (n + batch_size - 1) / batch_size;
}

/// The model as train_step sees it, with a look at the callback after each micro-batch.
struct Interruptible {
  CausalLM& model;
  const std::function<void()>& after_each;

  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, uint64_t seed, uint32_t micro_step) {
    const LossSum loss = model.forward_backward(batch, grad_scale, seed, micro_step);
    if (after_each) after_each();
    return loss;
  }
};

/// On a GPU a wrong id could only become NaN.
void check_vocabulary(const std::vector<Example>& rows, const char* name, int64_t size) {
  for (size_t row = 0; row < rows.size(); ++row) {
    for (const int64_t id : rows[row].input_ids) {
      QLORAPP_CHECK_VALUE(id >= 0 && id < size, "[trainer] ", name, ": token ids must be from 0 to ", size - 1,
                          ", the vocabulary's last; row ", row, " has ", id, ". Use the tokenizer of this model.");
    }
    for (const int64_t label : rows[row].labels) {
      QLORAPP_CHECK_VALUE(label == Example::kIgnored || (label >= 0 && label < size), "[trainer] ", name, ": labels must be ",
                          int64_t{Example::kIgnored}, " (ignored) or from 0 to ", size - 1, ", the vocabulary's last; row ", row,
                          " has ", label, ". Use the tokenizer of this model.");
    }
  }
}

AdamW::Options optimizer_options(const TrainingArguments& args) {
  return {args.adam_beta1,
          args.adam_beta2,
          args.adam_epsilon,
          args.weight_decay,
          args.optimizer_is_8bit() ? AdamW::State::kEightBit : AdamW::State::kFloat32,
          args.optimizer_is_paged()};
}

/// torch's defaults, with a floor and an end: a run whose steps are all skipped is not training, and says so.
GradScaler::Options scaler_options(const CausalLM& model, const TrainingArguments& args) {
  GradScaler::Options options;
  options.device = model.device().type();
  // On a GPU without bf16, bf16 is float16 (io/device.hpp) and needs what float16 needs.
  options.enabled = args.fp16 || (model.device().is_cuda() && model.lm_head().scalar_type() == at::kHalf);
  options.min_scale = 1.0;
  options.max_consecutive_skips = 50;
  return options;
}

SamplerOptions sampler_options(const TrainingArguments& args, const std::vector<Example>& rows) {
  SamplerOptions options;
  options.strategy = sampling_strategy(args.train_sampling_strategy);
  options.seed = args.data_seed.value_or(args.seed);
  options.group_size = args.per_device_train_batch_size * args.gradient_accumulation_steps;
  if (options.strategy == SamplingStrategy::kGroupByLength) {
    for (const Example& row : rows) options.lengths.push_back(std::ssize(row.input_ids));
  }
  return options;
}

}  // namespace

Trainer::Trainer(CausalLM& model, TrainingArguments args, std::vector<Example> train_data, std::vector<Example> eval_data,
                 std::string base_model, TrainerCallbacks callbacks)
    : model_(model),
      args_(std::move(args)),
      train_data_(std::move(train_data)),
      eval_data_(std::move(eval_data)),
      base_model_(std::move(base_model)),
      callbacks_(std::move(callbacks)),
      state_(model.arena(), optimizer_options(args_), scaler_options(model, args_)) {
  args_.validate();
  if (args_.optimizer_is_paged() && model.device().is_cpu()) {
    log_warning_once(
        concat("[trainer] optim=", args_.optim, ": on a CPU the state stays in its memory; the numbers are the same."));
  }
  QLORAPP_CHECK_VALUE(!train_data_.empty(), "[trainer] the training data hold no rows.");
  check_vocabulary(train_data_, "train_dataset", model_.config().vocab_size);
  check_vocabulary(eval_data_, "eval_dataset", model_.config().vocab_size);
  batches_per_epoch_ = batch_count(train_data_.size(), args_.per_device_train_batch_size, args_.dataloader_drop_last);
  QLORAPP_CHECK_VALUE(batches_per_epoch_ > 0, "[trainer] dataloader_drop_last leaves nothing of ", train_data_.size(),
                      " rows in batches of ", args_.per_device_train_batch_size, ".");
  const int64_t window = args_.gradient_accumulation_steps;
  steps_per_epoch_ = (batches_per_epoch_ + window - 1) / window;
  max_steps_ = count_training_steps(batches_per_epoch_, window, args_.num_train_epochs, args_.max_steps);
  state_.schedule.type = schedule_type(args_.lr_scheduler_type);
  state_.schedule.warmup_steps = count_warmup_steps(args_.warmup_steps, args_.warmup_ratio, max_steps_);
  state_.schedule.training_steps = max_steps_;
  state_.base_learning_rate = args_.learning_rate;
  state_.max_grad_norm = args_.max_grad_norm;
  state_.count_position_zero = args_.count_position_zero;
  state_.seed = static_cast<uint64_t>(args_.seed);
  state_.base_fingerprint = base_fingerprint(model_);
  if (args_.full_determinism) model_.set_deterministic(true);
  if (args_.gradient_checkpointing) model_.set_segments(parse_segments(args_.keep_text(), std::ssize(model_.blocks())));
  if (args_.memory() != MemorySettings{}) model_.set_memory(args_.memory());  // else what the model was told holds
  if (args_.embedding_on_host && model_.config().tie_word_embeddings) {
    log_warning_once(
        "[trainer] embedding_on_host has no effect: this model's head is its embedding table, and the head stays on the GPU.");
  }
}

std::vector<Batch> Trainer::next_window(const std::vector<int64_t>& order, int64_t first_batch) const {
  std::vector<Batch> window;
  const int64_t end = std::min(first_batch + args_.gradient_accumulation_steps, batches_per_epoch_);
  for (int64_t batch = first_batch; batch < end; ++batch) {
    const int64_t begin = batch * args_.per_device_train_batch_size;
    const int64_t count = std::min<int64_t>(args_.per_device_train_batch_size, std::ssize(order) - begin);
    const std::span rows = std::span(order).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    window.push_back(collate(train_data_, rows).to(model_.device()));
  }
  return window;
}

TrainOutput Trainer::train(const std::optional<std::string>& resume_from) {
  if (resume_from) restore(*resume_from);
  const auto begin = std::chrono::steady_clock::now();
  const int64_t first_step = state_.global_step;
  control_ = {};
  if (resume_from) unread_.clear();  // of a run that was interrupted: restore has its sums
  else read_losses();
  while (state_.global_step < max_steps_ && !control_.should_training_stop) {
    const std::vector<int64_t> order =
        epoch_order(std::ssize(train_data_), state_.cursor.epoch, sampler_options(args_, train_data_));
    while (state_.cursor.batch < batches_per_epoch_ && state_.global_step < max_steps_ && !control_.should_training_stop) {
      const std::vector<Batch> window = next_window(order, state_.cursor.batch);
      Interruptible model{model_, callbacks_.on_substep_end};
      const StepReport report = train_step(model, state_, window);
      state_.cursor.batch += std::ssize(window);
      after_step(report);
    }
    if (state_.cursor.batch >= batches_per_epoch_) state_.cursor = {state_.cursor.epoch + 1, 0};
  }
  read_losses();
  const double seconds = seconds_since(begin);
  TrainOutput output{state_.global_step, state_.global_step > 0 ? state_.loss_sum / static_cast<double>(state_.global_step) : 0.0,
                     summary(seconds, first_step)};
  LogRecord last = output.metrics;
  last.set("step", state_.global_step);
  log(std::move(last));
  return output;
}

double Trainer::epoch() const {
  return static_cast<double>(state_.cursor.epoch) +
         static_cast<double>(state_.cursor.batch) / static_cast<double>(batches_per_epoch_);
}

void Trainer::after_step(const StepReport& report) {
  unread_.push_back({report.mean_loss, report.stepped ? report.grad_norm : at::Tensor(), state_.global_step});
  ++state_.steps_since_log;
  state_.tokens_seen += report.target_tokens;
  const int64_t step = state_.global_step;
  const bool epoch_ends = state_.cursor.batch >= batches_per_epoch_;
  control_.should_log =
      is_due(args_.logging_strategy, args_.logging_steps, step, max_steps_, epoch_ends) || (args_.logging_first_step && step == 1);
  control_.should_evaluate =
      !eval_data_.empty() && is_due(args_.eval_strategy, args_.eval_interval(), step, max_steps_, epoch_ends);
  control_.should_save = is_due(args_.save_strategy, args_.save_steps, step, max_steps_, epoch_ends);
  // The last step is saved too, as transformers does, or the end of a run could not be resumed from.
  if (step == max_steps_ && args_.save_strategy != "no") control_.should_save = true;
  if (callbacks_.on_step_end) callbacks_.on_step_end(step, max_steps_, control_);
  constexpr size_t kMostUnread = 256;
  if (!model_.device().is_cuda() || control_.should_log || control_.should_save || unread_.size() >= kMostUnread) read_losses();

  if (control_.should_log && state_.steps_since_log > 0) {
    LogRecord record;
    record.set("loss", state_.loss_since_log / static_cast<double>(state_.steps_since_log));
    record.set("grad_norm", report.grad_norm.item<double>());
    record.set("learning_rate", report.learning_rate);
    record.set("epoch", epoch());
    record.set("step", step);
    state_.loss_since_log = 0;
    state_.steps_since_log = 0;
    log(std::move(record));
  }
  if (control_.should_evaluate) {
    LogRecord metrics = evaluate();
    metrics.set("step", step);
    if (callbacks_.on_evaluate) callbacks_.on_evaluate(metrics, control_);
    log(std::move(metrics));
  }
  if (control_.should_save) save_checkpoint();
}

void Trainer::read_losses() {
  const std::vector<Unread> unread = std::exchange(unread_, {});
  for (const Unread& step : unread) {
    const auto loss = step.loss.item<double>();
    constexpr double kLargest = 0x1p63;  // squares of larger gradients overflow in the moments
    if (const double norm = step.grad_norm.defined() ? step.grad_norm.item<double>() : 0.0; !(norm < kLargest)) {
      throw TrainingDiverged(
          concat("[trainer] the norm of the gradients must be finite and below 9.2e18; got ", norm, " in step ", step.step,
                 ", whose loss is ", loss,
                 ". A step whose gradients are not finite changes neither adapters nor moments, and "
                 "nothing was saved since. Look at the rows of that step, lower the learning rate, or resume from the "
                 "last checkpoint."));
    }
    if (!std::isfinite(loss) && !said_diverged_) {
      said_diverged_ = true;
      log_warning(
          "[trainer] the loss is not finite any more: training has diverged. Go back to a checkpoint and lower the learning rate.");
    }
    state_.loss_sum += loss;
    state_.loss_since_log += loss;
  }
}

void Trainer::log(LogRecord record) {
  state_.log_history.push_back(std::move(record));
  if (callbacks_.on_log) callbacks_.on_log(state_.log_history.back(), control_);
}

LogRecord Trainer::evaluate() {
  QLORAPP_CHECK_VALUE(!eval_data_.empty(), "[trainer] there are no evaluation data. Give eval_dataset (--eval_data).");
  const auto begin = std::chrono::steady_clock::now();
  const EvalResult loss =
      qlorapp::evaluate(model_, eval_data_, {args_.per_device_eval_batch_size, /*exact_match=*/false, callbacks_.on_substep_end});
  const double seconds = seconds_since(begin);
  LogRecord metrics;
  metrics.set("eval_loss", loss.mean_of_batches);
  metrics.set("eval_loss_token_weighted", loss.token_weighted);
  metrics.set("eval_runtime", seconds);
  metrics.set("eval_samples_per_second", static_cast<double>(eval_data_.size()) / seconds);
  metrics.set("eval_steps_per_second",
              static_cast<double>(batch_count(eval_data_.size(), args_.per_device_eval_batch_size, false)) / seconds);
  metrics.set("epoch", epoch());
  return metrics;
}

LogRecord Trainer::summary(double seconds, int64_t first_step) const {
  const auto steps = static_cast<double>(state_.global_step - first_step);
  const double rows = steps * static_cast<double>(args_.per_device_train_batch_size * args_.gradient_accumulation_steps);
  LogRecord metrics;
  metrics.set("train_runtime", seconds);
  metrics.set("train_samples_per_second", rows / seconds);
  metrics.set("train_steps_per_second", steps / seconds);
  metrics.set("train_loss", state_.global_step > 0 ? state_.loss_sum / static_cast<double>(state_.global_step) : 0.0);
  metrics.set("epoch", epoch());
  return metrics;
}

}  // namespace qlorapp
