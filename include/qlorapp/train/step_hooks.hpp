// SPDX-License-Identifier: Apache-2.0
/// Functions that the caller of a step runs within it.
#pragma once

#include <functional>

#include "qlorapp/train/shared_step.hpp"

namespace qlorapp {

/// Each may be empty. An exception ends the step and reaches the caller.
struct StepHooks {
  /// All micro-batches are computed. Behind it gradients of several ranks are summed, so the window cannot be retried.
  std::function<void()> before_exchange = {};
  std::function<void()> before_optimizer_step = {};
  /// Also runs if the scaler skipped the step.
  std::function<void()> after_optimizer_step = {};
  /// Replaces sum_counts(). A caller that retries a window passes sum_counts_once(), one for all attempts.
  SumCounts sum_counts = {};
};

}  // namespace qlorapp
