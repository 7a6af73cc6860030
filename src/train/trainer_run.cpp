// SPDX-License-Identifier: Apache-2.0
// The order of things in a run: epochs, steps, events, flags, and what a step's or an epoch's end brings.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <iterator>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "data/sampler.hpp"
#include "files/folder.hpp"
#include "io/background_commit.hpp"
#include "io/checkpoint_folder.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/trainer.hpp"
#include "speed.hpp"
#include "train/early_stopping.hpp"
#include "train/loss_svg.hpp"
#include "train/loss_trend.hpp"
#include "train/run_report.hpp"
#include "train/unread_losses.hpp"
#include "train/window_runner.hpp"

namespace qlorapp {
namespace {

double seconds_since_1970() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

/// With the strategy "steps": is this step an n-th one? n below one is a share of the run.
bool is_due(const std::string& strategy, double every, int64_t step, int64_t max_steps) {
  if (strategy != "steps") return false;
  const int64_t interval = count_interval_steps(every, max_steps);
  return interval > 0 && step % interval == 0;
}

SamplerOptions sampler_options(const TrainingArguments& args, const std::vector<Example>& rows, int64_t ranks) {
  SamplerOptions options;
  options.strategy = sampling_strategy(args.sampling());
  options.seed = args.data_seed.value_or(args.seed);
  options.group_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks;
  if (options.strategy == SamplingStrategy::kGroupByLength) {
    for (const Example& row : rows) options.lengths.push_back(std::ssize(row.input_ids));
  }
  return options;
}

/// Ends a run between micro-batches; not an error, so that nothing takes it for one.
struct StopNow {};

}  // namespace

/// The end of a step or an epoch, whose flags are owed if an exception leaves it undone.
class Trainer::Owed {
 public:
  explicit Owed(Trainer& trainer) : trainer_(trainer) {}
  ~Owed() {
    if (std::uncaught_exceptions() == before_) return;
    trainer_.state_.owes_log = trainer_.control_.should_log;
    trainer_.state_.owes_evaluation = trainer_.control_.should_evaluate;
    trainer_.state_.owes_save = trainer_.control_.should_save;
  }
  Owed(const Owed&) = delete;
  Owed& operator=(const Owed&) = delete;

 private:
  Trainer& trainer_;
  int before_ = std::uncaught_exceptions();
};

void Trainer::poll() {
  const bool is_alone = rank_count() == 1;  // several ranks stop where they meet
  if (is_alone && is_training_ && callbacks_.stop_now && callbacks_.stop_now()) throw StopNow{};
}

void Trainer::stop_if_asked() {
  if (any_of(*state_.ranks, callbacks_.stop_now && callbacks_.stop_now())) throw StopNow{};
}

void Trainer::agree() {
  if (rank_count() == 1) return;
  constexpr bool TrainerControl::*kFlags[] = {&TrainerControl::should_training_stop, &TrainerControl::should_epoch_stop,
                                              &TrainerControl::should_save, &TrainerControl::should_evaluate,
                                              &TrainerControl::should_log};
  std::vector<int64_t> values{int64_t{callbacks_.stop_now && callbacks_.stop_now()}};
  for (const auto flag : kFlags) values.push_back(int64_t{is_first() && control_.*flag});
  values = sum_over(*state_.ranks, std::move(values));
  for (size_t i = 0; i < std::size(kFlags); ++i) control_.*kFlags[i] = values[i + 1] > 0;
  if (is_training_ && values[0] > 0) throw StopNow{};
}

/// Leaves a checkpoint of the steps that are whole.
void Trainer::stop() {
  stopped_ = true;
  if (rank_count() > 1) {
    finish_save();
  } else {
    saving_to_.clear();
    tell_of_save(saving_->settle());  // if that one failed, there is still this one
  }
  read_losses();
  if (state_.global_step == 0) return;
  const std::string own = files::path_in(args_.output_dir, message("checkpoint-{}", state_.global_step));
  const bool is_there = is_first() && files::is_same_file(own, origin_);  // other ranks may not see the folder
  const bool is_saved = any_of(*state_.ranks, is_there) && !args_.save_only_model;
  if (!is_saved || state_.owes_log || state_.owes_evaluation || state_.owes_save) save_checkpoint();
}

void Trainer::event(TrainerEvent event) {
  if (callbacks_.on_event) callbacks_.on_event(event, state_, control_);
}

TrainOutput Trainer::train(const std::optional<std::string>& resume_from) {
  QLORAPP_CHECK_VALUE(batches_per_epoch_ > 0, "[trainer] the training data hold no rows.");
  QLORAPP_CHECK_VALUE(
      args_.eval_strategy == "no" || !eval_data_.empty(),
      "[trainer] eval_strategy is {}, but there are no evaluation data. Give eval_dataset (--eval_data), or leave it \"no\".",
      args_.eval_strategy);
  QLORAPP_CHECK_VALUE(state_.arena == &model_->arena(),
                      "[trainer] the active adapter must be the one that this trainer was made for. Activate that one again, or "
                      "make a new trainer.");
  const bool has_folder = folder_ != nullptr;
  struct End {  // however the run ends
    Trainer& trainer;
    bool keeps_folder;
    ~End() {
      trainer.runner_->clear_graphs();
      trainer.is_training_ = false;
      if (!keeps_folder) trainer.folder_.reset();
    }
  } const end{*this, has_folder};
  resumed_from_ = resume_from.value_or("");
  started_ = seconds_since_1970();
  try {
    if (args_.save_strategy != "no" && !has_folder && is_first())
      folder_ = std::make_shared<RunFolder>(args_.output_dir);  // before anything else: another run may hold it
    TrainOutput output = run(resume_from);
    report(stopped_ ? "stopped" : "finished", "");
    return output;
  } catch (const std::exception& error) {
    state_.ranks->report_failure(first_line(error));
    saving_to_.clear();
    if (const auto path = saving_->settle()) note_saved(*path);  // the error may be another, and this one is worth having
    report("failed", first_line(error));
    throw;
  }
}

/// Writes run_report.json. An error here is logged; it never hides the error that ended the run.
void Trainer::report(const std::string& outcome, const std::string& error) const try {
  if (!folder_ || folder_->is_new()) return;  // nothing is written, or the run was refused before it began
  write_run_report(args_.output_dir,
                   {.outcome = outcome,
                    .error = error,
                    .run_id = folder_->run_id(),
                    .resumed_from = resumed_from_,
                    .resumed_with_changes = resumed_with_changes_,
                    .first_step = first_step_,
                    .max_steps = max_steps_,
                    .seconds = rounded(seconds_since_1970() - started_, 4),
                    .rows = rows_,
                    .rows_ending_in_eos = rows_ending_in_eos_,
                    .longest_row = longest_row(),
                    .evaluates = !eval_data_.empty()},
                   *model_, state_, args_);
  write_loss_svg(args_.output_dir,
                 format::parse_json("[" + state_.log_history.text() + "]", "log_history", {.allow_nonfinite = true}));
} catch (const std::exception& failed) {
  if (error.empty()) log_warning(message("[trainer] run_report.json or loss.svg was not written: {}", first_line(failed)));
}

TrainOutput Trainer::run(const std::optional<std::string>& resume_from) {
  stopped_ = at_epoch_end_ = in_epoch_end_ = false;
  if (resume_from) {
    restore(*resume_from);
  } else if (state_.global_step == 0) {
    origin_.clear();
    changed_ = false;
  }
  if (folder_) run_folder();
  const auto begin = std::chrono::steady_clock::now();
  first_step_ = state_.global_step;
  resumed_with_changes_ = changed_;
  first_tokens_ = state_.tokens_seen;
  control_ = {};
  control_.should_training_stop = stops_early(args_, state_);  // resumed from its last checkpoint
  trend_->clear();
  if (resume_from) {
    unread_->clear();  // of a run that was interrupted: restore has its sums
  } else {
    read_losses();
  }
  log_info(plan_line(*model_, args_, longest_row(), !eval_data_.empty()));
  if (args_.worst_case_first.value_or(!device().is_cpu()) && !train_data_.empty()) runner_->run_worst_case(largest_micro_batch());
  event(TrainerEvent::kTrainBegin);
  is_training_ = true;
  try {
    agree();
    if (args_.eval_on_start) {
      evaluate();
      agree();
    }
    for (bool again = true; again;) {
      try {
        again = false;
        run_epochs();
      } catch (const TrainingDiverged& error) {
        again = roll_back(error);
        if (!again) throw;
      }
    }
  } catch (const StopNow&) { stop(); }
  is_training_ = false;
  finish_save();
  if (state_.global_step > 0 && state_.optimizer.step_count() == 0) {
    log_warning(
        message("[trainer] the adapters did not change: all {} steps had gradients that are not finite in float16 and were "
                "skipped. Train for longer (the loss scale is {} now), or in bf16 or fp32.",
                state_.global_step, state_.scaler.get_scale()));
  }
  TrainOutput output{state_.global_step, state_.global_step > 0 ? state_.loss_sum / static_cast<double>(state_.global_step) : 0.0,
                     summary(seconds_since(begin)), stopped_};
  if (stopped_) return output;
  log(output.metrics, false);
  output.metrics.set("epoch", epoch());
  if (args_.counts_input_tokens()) output.metrics.set("num_input_tokens_seen", state_.tokens_seen);
  finish();
  return output;
}

bool Trainer::is_complete() const {
  const bool has_read_all = state_.cursor.epoch + 1 >= epochs_ && state_.cursor.batch >= batches_per_epoch_;
  return state_.global_step >= max_steps_ || (state_.rollbacks > 0 && has_read_all);
}

/// From where the state is to the end of the run.
void Trainer::run_epochs() {
  if (state_.owes_log || state_.owes_evaluation || state_.owes_save) {
    const Owed owed(*this);
    control_.should_log = state_.owes_log;
    control_.should_evaluate = state_.owes_evaluation;
    control_.should_save = state_.owes_save;
    log_evaluate_save();
  }
  if (state_.owes_epoch_end && (is_complete() || control_.should_training_stop))
    end_epoch();  // its last step was saved, and then it was killed
  while (!is_complete() && state_.cursor.epoch < epochs_ && !control_.should_training_stop) run_epoch();
  read_losses();
}

/// After a step that was not finite: weights, moments and counts become those of the newest checkpoint of this run, and the data go on where
/// they are, so that the rows of that step do not come again. @returns false if that is not asked for, or was done too often.
bool Trainer::roll_back(const Error& reason) {
  constexpr int64_t kMost = 3;
  if (args_.on_non_finite != "rollback") return false;
  finish_save();
  const std::string from =
      text_of_first(*state_.ranks, is_first() ? newest_checkpoint(args_.output_dir).path.value_or(origin_) : std::string());
  if (from.empty() || state_.rollbacks >= kMost) {
    log_warning(from.empty()
                    ? std::string("[trainer] there is no checkpoint to roll back to: save more often, or use on_non_finite=skip.")
                    : message("[trainer] the run was rolled back {} times already: it ends.", state_.rollbacks));
    return false;
  }
  const int64_t step = state_.global_step, rollbacks = state_.rollbacks, skipped = state_.skipped_steps;
  const uint32_t micro_step = state_.micro_step;
  DataCursor cursor = state_.cursor;
  if (at_epoch_end_) cursor = {cursor.epoch + 1, 0};
  at_epoch_end_ = in_epoch_end_ = false;
  unread_->clear();
  state_.best_metric.reset();
  state_.best_global_step.reset();
  state_.best_model_checkpoint.clear();
  restore(from);
  state_.cursor = cursor;
  state_.micro_step = micro_step;
  state_.rollbacks = rollbacks + 1;
  state_.skipped_steps = skipped;
  state_.owes_log = state_.owes_evaluation = state_.owes_save = state_.owes_epoch_end = false;
  control_ = {};
  log_warning(message("[trainer] rolled back from step {} to {}; the data go on behind the rows of step {}. {}", step, from, step,
                      first_line(reason)));
  return true;
}

Window Trainer::next_window(const std::vector<int64_t>& order) const {
  const int64_t begin = state_.cursor.batch, size = args_.per_device_train_batch_size;
  Window window{
      state_.cursor.epoch, begin, std::min(args_.gradient_accumulation_steps * rank_count(), batches_per_epoch_ - begin), {}};
  for (int64_t batch = begin; batch < begin + window.batches; ++batch) {
    const auto first = order.begin() + batch * size;
    window.rows.emplace_back(first, first + std::min<int64_t>(size, order.end() - first));
  }
  return window;
}

void Trainer::run_step(const Window& window) {
  std::exception_ptr late;
  const auto tell = [&](TrainerEvent what) {
    if (what != TrainerEvent::kOptimizerStep) return event(what);
    try {
      event(what);
    } catch (...) { late = std::current_exception(); }  // the update is made: the step is finished and counted first
  };
  StepReport report;
  try {
    WindowRunner::Observer observer{tell, [this] { poll(); }};
    if (rank_count() > 1) observer.meet = [this] { stop_if_asked(); };
    report = runner_->run([&] { return batches_of(window); }, window.batches, observer);
  } catch (const LossScaleExhausted& error) {
    const std::string why = message("{} {}", error.what(), runner_->diagnosis(batches_of(window)));
    state_.cursor.batch += window.batches;  // where a rolled back run goes on
    state_.micro_step += static_cast<uint32_t>(window.batches);
    throw LossScaleExhausted(why);
  }
  state_.cursor.batch += window.batches;
  count_step(report);
  const Owed owed(*this);
  flow_at_step_end();
  if (late) std::rethrow_exception(late);
  event(TrainerEvent::kStepEnd);
  if (!device().is_cuda() || unread_->full()) {
    if (rank_count() > 1 && device().is_cuda())
      state_.ranks->barrier();  // of the hosts: a rank that hangs is named, before a GPU waits for it
    read_losses();
  }
  tell_of_save(saving_->poll());
  agree();
  log_evaluate_save();
}

void Trainer::run_epoch() {
  control_.should_epoch_stop = false;
  const bool only_its_end = state_.cursor.batch >= batches_per_epoch_;  // resumed after the last step of an epoch
  if (!only_its_end) {
    event(TrainerEvent::kEpochBegin);
    agree();
  }
  const std::vector<int64_t> order =
      only_its_end ? std::vector<int64_t>()
                   : epoch_order(std::ssize(train_data_), state_.cursor.epoch, sampler_options(args_, train_data_, rank_count()));
  while (state_.cursor.batch < batches_per_epoch_ && state_.global_step < max_steps_ && !control_.should_training_stop &&
         !control_.should_epoch_stop) {
    const Window window = next_window(order);
    control_.should_log = control_.should_evaluate = control_.should_save = false;
    event(TrainerEvent::kStepBegin);
    run_step(window);
  }
  end_epoch();
}

void Trainer::end_epoch() {
  in_epoch_end_ = true;
  state_.owes_epoch_end = false;
  at_epoch_end_ = state_.cursor.batch >= batches_per_epoch_ || control_.should_epoch_stop;
  const Owed owed(*this);
  flow_at_epoch_end();
  event(TrainerEvent::kEpochEnd);
  agree();
  log_evaluate_save();
  if (at_epoch_end_) state_.cursor = {state_.cursor.epoch + 1, 0};
  at_epoch_end_ = in_epoch_end_ = false;
}

void Trainer::count_step(const StepReport& report) {
  unread_->add(report, state_.global_step);
  state_.last_learning_rate = report.learning_rate;
  ++state_.steps_since_log;
  state_.tokens_seen += report.input_tokens;
  const int64_t base = model_->decoder().parameter_count() - model_->config().vocab_size * model_->config().hidden_size;
  const int64_t parameters = base + model_->arena().numel();
  state_.total_flos += 6.0 * static_cast<double>(report.input_tokens) * static_cast<double>(parameters);
  if (args_.torch_empty_cache_steps && state_.global_step % *args_.torch_empty_cache_steps == 0 && !device().is_cpu()) {
    at::getDeviceAllocator(device().type())->emptyCache();
  }
}

void Trainer::flow_at_step_end() {
  const int64_t step = state_.global_step;
  const bool may_evaluate = args_.eval_strategy == "steps" && args_.eval_delay <= static_cast<double>(step);
  if (is_due(args_.logging_strategy, args_.logging_steps, step, max_steps_) || (args_.logging_first_step && step == 1))
    control_.should_log = true;
  if (may_evaluate && is_due("steps", args_.eval_interval(), step, max_steps_)) control_.should_evaluate = true;
  if (is_due(args_.save_strategy, args_.save_steps, step, max_steps_)) control_.should_save = true;
  if (!is_complete()) return;
  // The last step is evaluated and saved too, or the end of a run could not be resumed from.
  control_.should_training_stop = true;
  if (may_evaluate) control_.should_evaluate = true;
  if (args_.save_strategy == "steps") control_.should_save = true;
}

void Trainer::flow_at_epoch_end() {
  if (args_.logging_strategy == "epoch") control_.should_log = true;
  if (args_.eval_strategy == "epoch" && args_.eval_delay <= epoch()) control_.should_evaluate = true;
  if (args_.save_strategy == "epoch") control_.should_save = true;
}

void Trainer::log_evaluate_save() {
  state_.owes_log = state_.owes_evaluation = state_.owes_save = false;
  const bool has_work = control_.should_log || control_.should_evaluate || control_.should_save;
  if (control_.should_log || control_.should_save) read_losses();
  if (control_.should_log && state_.steps_since_log > 0) {
    LogRecord record;
    record.set("loss", state_.loss_since_log / static_cast<double>(state_.steps_since_log));
    record.set("grad_norm", state_.last_grad_norm);
    record.set("learning_rate", state_.last_learning_rate);
    if (args_.log_num_tokens) record.set("num_tokens", state_.tokens_seen);
    state_.loss_since_log = 0;
    state_.steps_since_log = 0;
    log(std::move(record), true);
  }
  if (control_.should_evaluate) run_evaluation();
  if (control_.should_save) begin_save();
  if (has_work) agree();  // on_log, on_evaluate and on_save may have asked for something
}

void Trainer::run_evaluation() {
  if (eval_data_.empty()) {
    control_.should_evaluate = false;
    return;
  }
  const LogRecord metrics = evaluate();
  control_.should_evaluate = false;
  const bool is_best = note_best(metrics);
  if (args_.save_strategy == "best") control_.should_save = is_best && state_.global_step > 0;
}

void Trainer::read_losses() { unread_->read_into(state_, args_.on_non_finite == "skip", *trend_); }

LogRecord Trainer::last_step() {
  if (rank_count() == 1) read_losses();  // else each rank must find at the same step that a loss is not finite
  LogRecord record;
  record.set("loss", state_.last_loss);
  record.set("grad_norm", state_.last_grad_norm);
  record.set("learning_rate", state_.last_learning_rate);
  record.set("epoch", epoch());
  record.set("step", state_.global_step);
  return record;
}

void Trainer::log(LogRecord record, bool training) {
  record.set("epoch", epoch());
  if (args_.counts_input_tokens()) {
    record.set("num_input_tokens_seen", state_.tokens_seen);
    if (training) {
      const double seconds = seconds_since_1970() - started_;
      record.set("train_runtime", rounded(seconds, 4));
      record.set("train_tokens_per_second", rounded(static_cast<double>(state_.tokens_seen - first_tokens_) / seconds, 3));
    }
  }
  record.set("step", state_.global_step);
  state_.log_history.push_back(record);
  control_.should_log = false;
  if (callbacks_.on_log) callbacks_.on_log(record, control_);
}

}  // namespace qlorapp
