// SPDX-License-Identifier: Apache-2.0
#include "train/step_runner.hpp"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/train/clip.hpp"
#include "train/run_setup.hpp"

namespace qlorapp {
namespace {

/// Rows are not known before they come.
TrainingArguments& set_up(CausalLM& model, TrainState& state, TrainingArguments& args) {
  args.validate();
  take_options(state, args);
  set_up_model(model, args, state, args.max_length, /*evaluates=*/false);
  return args;
}

}  // namespace

StepRunner::StepRunner(std::shared_ptr<CausalLM> model, TrainingArguments args)
    : model_(std::move(model)),
      args_(std::move(args)),
      state_(new_state(*model_, args_)),
      runner_(*model_, state_, set_up(*model_, state_, args_), /*evaluates=*/false) {}

GradientNorm StepRunner::norm() const { return gradient_norm(*state_.arena, state_.scaler.inverse_scale(), state_.max_grad_norm); }

void StepRunner::gradients(std::span<const Batch> window) {
  window_.clear();
  for (const Batch& batch : window) window_.push_back(batch.to(at::kCPU));
  const at::Tensor before = is_open_ ? state_.arena->gradients().clone() : at::Tensor();
  first_micro_step_ = state_.micro_step;
  found_ = runner_.gradients([this] { return window_; }, std::ssize(window_), {});
  is_open_ = true;
  if (!before.defined()) return;
  at::Tensor gradients = state_.arena->gradients();
  gradients.add_(before);
  found_.norm = norm();
}

void StepRunner::take_gradients(const at::Tensor& mean_loss, int64_t micro_batches) {
  window_.clear();
  state_.micro_step += static_cast<uint32_t>(micro_batches);
  found_ = {mean_loss, norm(), 0, 0};
  is_open_ = true;
}

bool StepRunner::update(double rate) {
  QLORAPP_CHECK_VALUE(is_open_, "[optimizer] step() must follow the gradients of a window; there are none since the last step.");
  StepReport report;
  try {
    report = runner_.update(found_, rate, {});
  } catch (const LossScaleExhausted& error) {
    if (window_.empty()) throw;
    const uint32_t behind = std::exchange(state_.micro_step, first_micro_step_);  // the same dropout masks
    const std::string where = runner_.diagnosis(window_);
    state_.micro_step = behind;
    throw LossScaleExhausted(message("{} {}", error.what(), where));
  }
  is_open_ = false;
  unread_.add(report, state_.global_step);
  if (!model_->device().is_cuda() || unread_.full()) read();
  return report.stepped;
}

void StepRunner::read() { unread_.read_into(state_, args_.on_non_finite == "skip", trend_); }

at::Tensor StepRunner::scale() { return state_.scaler.scale(at::ones({}, state_.arena->values().options())); }

}  // namespace qlorapp
