// SPDX-License-Identifier: Apache-2.0
/// A trainer's callbacks: events, the flags that a callback may set, and functions that replace a part of the loop.
///
/// Events come in transformers' order: train_begin, (epoch_begin, (step_begin, substep_end …, pre_optimizer_step,
/// optimizer_step, step_end, [log], [evaluate], [save]) …, epoch_end, [log], [evaluate], [save]) …, log, train_end. The default
/// flow sets the flags of a step's or epoch's end before the event, so that a callback sees them and may change them; each flag
/// is cleared when its request is done; those for logging, evaluation and saving also when a step begins.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "qlorapp/train/log_history.hpp"

namespace qlorapp {

struct TrainState;  // train/train_state.hpp

/// Requests of a callback; read after each call. With several ranks those of rank 0 are for all.
struct TrainerControl {
  bool should_training_stop = false;
  bool should_epoch_stop = false;
  bool should_save = false;
  bool should_evaluate = false;
  bool should_log = false;
};

enum class TrainerEvent : uint8_t {
  kTrainBegin,
  kEpochBegin,
  kStepBegin,
  kSubstepEnd,
  kPreOptimizerStep,
  kOptimizerStep,
  kStepEnd,
  kEpochEnd,
  kPredictionStep,
  kTrainEnd
};

/// The micro-batches of one optimizer step.
struct Window {
  int64_t epoch = 0;
  int64_t first_batch = 0;  ///< Its number in the epoch.
  int64_t batches = 0;
  std::vector<std::vector<int64_t>> rows;  ///< Row numbers of each batch.
};

/// Called on the training thread. Any may be empty; what they throw ends the training and reaches the caller of train().
struct TrainerCallbacks {
  std::function<void(TrainerEvent event, const TrainState& state, TrainerControl& control)> on_event;
  std::function<void(const LogRecord& record, TrainerControl& control)> on_log;
  std::function<void(const LogRecord& metrics, TrainerControl& control)> on_evaluate;
  /// Appends to the metrics of an evaluation before they are logged and compared (metric_for_best_model). With several ranks each calls its own.
  std::function<void(LogRecord& metrics, const TrainState& state)> measure;
  /// When the checkpoint is whole and on the disk: at the end of a later step, and at the latest before the next one and before the end.
  std::function<void(const std::string& folder, TrainerControl& control)> on_save;
  /// Asked between micro-batches, and with several ranks at the end of a step: true, on one rank, ends the run at once. The step under way is
  /// dropped, and the steps before it are saved as a checkpoint. The place to look for signals.
  std::function<bool()> stop_now;
};

}  // namespace qlorapp
