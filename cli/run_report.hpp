// SPDX-License-Identifier: Apache-2.0
/// Output of a run while it trains: log entries, saved checkpoints, and a bar with the loss.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "progress.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp::cli {

/// Prints the first and the last step for any logging_steps, unless logging_strategy is "no". Lines that logging_steps leaves
/// out are not put into log_history, which stays transformers'.
class RunReport {
 public:
  explicit RunReport(std::string logging_strategy) : strategy_(std::move(logging_strategy)) {}

  /// For the trainer that watch() names before it trains.
  [[nodiscard]] TrainerCallbacks callbacks();
  void watch(Trainer& trainer) { trainer_ = &trainer; }
  void line(std::string_view text) { bar_.line(text); }

 private:
  void after_step(const TrainState& state, TrainerControl& control);

  std::string strategy_;
  Trainer* trainer_ = nullptr;
  bool is_first_ = true;
  ProgressBar bar_{"training"};
};

}  // namespace qlorapp::cli
