// SPDX-License-Identifier: Apache-2.0
/// Losses and norms that are still on the device, so that a GPU need not wait for the host to read each.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/train/step_report.hpp"
#include "qlorapp/train/train_state.hpp"
#include "train/loss_trend.hpp"

namespace qlorapp {

class UnreadLosses {
 public:
  void add(const StepReport& report, int64_t step);
  /// Whether so many wait that they are to be read now.
  [[nodiscard]] bool full() const { return steps_.size() >= kMost; }
  /// Forgets them: those of a run that was interrupted.
  void clear() { steps_.clear(); }

  /// Adds them to the sums of the state. Synchronizes.
  /// @param skips  a step whose norm is not finite, or too large to be squared, is counted and left out of the sums.
  /// @throws TrainingDiverged if there is such a step and `skips` is false, or if 17 of them follow each other.
  /// @param trend  gets each loss.
  void read_into(TrainState& state, bool skips, LossTrend& trend);

 private:
  static constexpr size_t kMost = 256;
  struct Step {
    at::Tensor loss, grad_norm;
    int64_t number = 0;
    bool skipped = false;  ///< By a scaler, whose business the norm was.
  };
  std::vector<Step> steps_;
  bool warned_ = false;
};

}  // namespace qlorapp
