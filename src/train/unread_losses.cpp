// SPDX-License-Identifier: Apache-2.0
#include "train/unread_losses.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/train/grad_scaler.hpp"

namespace qlorapp {

void UnreadLosses::add(const StepReport& report, int64_t step) {
  steps_.push_back({report.mean_loss, report.grad_norm, step, !report.stepped});
}

void UnreadLosses::read_into(TrainState& state, bool skips, LossTrend& trend) {
  constexpr int64_t kMostInARow = 17;  // as with a loss scale (trainer.cpp)
  const std::vector<Step> steps = std::exchange(steps_, {});
  for (const Step& step : steps) {
    const auto loss = step.loss.item<double>();
    constexpr double kLargest = 0x1p63;  // squares of larger gradients overflow in the moments
    if (step.grad_norm.defined()) state.last_grad_norm = step.grad_norm.item<double>();
    state.skipped_steps += step.skipped ? 1 : 0;
    const double norm = step.grad_norm.defined() && !step.skipped ? state.last_grad_norm : 0.0;
    if (!(norm < kLargest)) {
      ++state.skipped_steps;
      if (!skips || ++state.skips_in_a_row >= kMostInARow) {
        throw TrainingDiverged(message(
            "[trainer] the norm of the gradients must be finite and below 9.2e18; got {} in step {}{}, whose loss is {}. A "
            "step whose gradients are not finite changes neither adapters nor moments, and nothing was saved since. Look at "
            "the rows of that step, lower the learning rate, or resume from the last checkpoint.",
            std::fabs(norm), step.number, skips ? message(", as in the {} before it", kMostInARow - 1) : std::string(),
            std::fabs(loss)));
      }
      log_warning(message("[trainer] skipped step {}: the norm of its gradients is {}, its loss {}.", step.number, std::fabs(norm),
                          std::fabs(loss)));
      if (std::isfinite(state.last_loss)) {  // as transformers' logging_nan_inf_filter
        state.loss_sum += state.last_loss;
        state.loss_since_log += state.last_loss;
      }
      continue;
    }
    state.skips_in_a_row = 0;
    if (!std::isfinite(loss) && !warned_) {
      warned_ = true;
      log_warning(
          "[trainer] the loss is no longer finite: training has diverged. Go back to a checkpoint and lower the learning rate.");
    }
    state.last_loss = loss;
    trend.add(loss, step.number, state.schedule.training_steps);
    state.loss_sum += loss;
    state.loss_since_log += loss;
  }
}

}  // namespace qlorapp
