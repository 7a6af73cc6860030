// SPDX-License-Identifier: Apache-2.0
/// trainer_state.json, with the keys of transformers' TrainerState: scripts that plot log_history read it.
#pragma once

#include <cstdint>
#include <string>

#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// What a run's state does not know of the run.
struct RunLength {
  double epoch = 0;  ///< Whole epochs and the share of the one under way.
  int64_t max_steps = 0;
  int64_t epochs = 0;
};

/// Writes the file into `folder`, whole or not at all. @throws IoError
void write_trainer_state(const std::string& folder, const TrainState& state, const TrainingArguments& args,
                         const RunLength& length);

/// Takes history, best metric and total_flos from a checkpoint's file into the state. The best checkpoint is looked for beside it, by its
/// name; warns if it is gone.
/// @throws FormatError naming the file and the key; IoError.
void read_trainer_history(const std::string& folder, TrainState& state);

}  // namespace qlorapp
