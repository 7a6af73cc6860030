// SPDX-License-Identifier: Apache-2.0
#include "train/step_runner.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/train/clip.hpp"
#include "train/run_inputs.hpp"
#include "train/run_setup.hpp"

namespace qlorapp {
namespace {

/// A rank has asked all to stop.
struct Stopped {};

TrainingArguments& set_up(CausalLM& model, TrainState& state, TrainingArguments& args, StepRunner::Options options) {
  args.validate();
  const std::shared_ptr<Communicator> of_base = ranks_of_base(model);
  state.ranks = of_base ? of_base : std::move(options.ranks);
  if (state.ranks && state.ranks->size() > 1) {
    state.ranks->set_timeout(std::chrono::seconds{args.ddp_timeout});
    meet_ranks(*state.ranks, model, args);
  }
  take_options(state, args);
  set_up_model(model, args, state, options.longest_row > 0 ? options.longest_row : args.max_length, /*evaluates=*/false);
  return args;
}

/// Turned off after the window: other callers do not read them.
struct CountsTokenStatistics {
  CountsTokenStatistics(StepSettings& of, bool wanted) : settings(of) { settings.set_token_statistics(wanted); }
  ~CountsTokenStatistics() { settings.set_token_statistics(false); }
  CountsTokenStatistics(const CountsTokenStatistics&) = delete;
  CountsTokenStatistics& operator=(const CountsTokenStatistics&) = delete;

  StepSettings& settings;
};

}  // namespace

StepRunner::StepRunner(std::shared_ptr<CausalLM> model, TrainingArguments args, Options options)
    : model_(std::move(model)),
      args_(std::move(args)),
      state_(new_state(*model_, args_)),
      runner_(*model_, state_, set_up(*model_, state_, args_, options), /*evaluates=*/false),
      token_statistics_(options.token_statistics) {}

GradientNorm StepRunner::norm() const { return gradient_norm(*state_.arena, state_.scaler.inverse_scale(), state_.max_grad_norm); }

bool StepRunner::gradients(std::span<const Batch> window, const std::function<bool()>& stop_now) {
  window_.clear();
  for (const Batch& batch : window) window_.push_back(batch.to(at::kCPU));
  const at::Tensor before = is_open_ ? state_.arena->gradients().clone() : at::Tensor();
  first_micro_step_ = state_.micro_step;
  WindowRunner::Observer observer;
  if (stop_now) {
    observer.meet = [&] {
      if (rank_count() > 1 ? any_of(*state_.ranks, stop_now()) : stop_now()) throw Stopped{};
    };
  }
  try {
    const CountsTokenStatistics counts(model_->settings(), token_statistics_);
    found_ = runner_.gradients([this] { return window_; }, std::ssize(window_) * rank_count(), observer);
  } catch (const Stopped&) { return false; }
  is_open_ = true;
  if (before.defined()) {
    at::Tensor gradients = state_.arena->gradients();
    gradients.add_(before);
    found_.norm = norm();
  }
  return true;
}

void StepRunner::take_gradients(const at::Tensor& mean_loss, int64_t micro_batches) {
  window_.clear();
  state_.micro_step += static_cast<uint32_t>(micro_batches * rank_count());
  at::Tensor loss = mean_loss;
  SharedStep(state_, {}).sum_gradients_and(loss);
  found_ = {.mean_loss = loss, .norm = norm()};
  is_open_ = true;
}

bool StepRunner::update(double rate) {
  QLORAPP_CHECK_VALUE(is_open_, "[optimizer] step() must follow the gradients of a window; there are none since the last step.");
  const bool may_go_back = args_.on_non_finite == "rollback";  // then another loop reads, where it can
  bool stepped = false;
  try {
    const StepReport report = runner_.update(found_, rate, {});
    unread_.add(report, state_.global_step);
    stepped = report.stepped;
  } catch (const LossScaleExhausted& error) {
    exhausted_ = error.what();
    if (!window_.empty()) {
      const uint32_t behind = std::exchange(state_.micro_step, first_micro_step_);  // the same dropout masks
      exhausted_ += " " + runner_.diagnosis(window_);
      state_.micro_step = behind;
    }
  }
  is_open_ = false;
  if (!may_go_back && must_read()) read();
  return stepped;
}

std::vector<int64_t> StepRunner::sum(std::vector<int64_t> values) {
  return rank_count() == 1 ? values : sum_over(*state_.ranks, std::move(values));
}

void StepRunner::check_same(const std::string& what, const std::string& value) {
  if (rank_count() > 1) check_same_on_all(*state_.ranks, what, value);
}

void StepRunner::report_failure(const std::string& why) {
  if (rank_count() > 1) state_.ranks->report_failure(why);
}

void StepRunner::read() {
  // Of the hosts: a rank that hangs is named, before a GPU waits for it.
  if (rank_count() > 1 && model_->device().is_cuda()) state_.ranks->barrier();
  const std::string exhausted = std::exchange(exhausted_, {});
  unread_.read_into(state_, args_.on_non_finite == "skip", trend_);
  if (!exhausted.empty()) throw LossScaleExhausted(exhausted);
}

bool StepRunner::load_state(const std::string& folder) {
  RunInputs inputs = RunInputs::load(folder);
  const RunInputs base = base_inputs(*model_);
  inputs.base = base.base;
  inputs.base_without_scales = base.base_without_scales;
  inputs.base_config = base.base_config;
  inputs.device = base.device;
  inputs.ranks = rank_count();
  inputs.lora_dropout = model_->lora_config().lora_dropout;
  const ChangedInputs changes = check_inputs(folder, args_, inputs);
  state_.load(folder);
  return changes.any;
}

at::Tensor StepRunner::scale() { return state_.scaler.scale(at::ones({}, state_.arena->values().options())); }

}  // namespace qlorapp
