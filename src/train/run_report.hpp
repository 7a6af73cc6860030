// SPDX-License-Identifier: Apache-2.0
/// run_report.json: what became of a run, beside what was planned, for a reader who was not there.
#pragma once

#include <cstdint>
#include <string>

#include "qlorapp/core/units.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/comparison.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// What neither the state nor the arguments know.
struct RunReport {
  std::string outcome;  ///< "finished", "stopped" or "failed".
  std::string error;    ///< First line; empty: none.
  std::string run_id;
  std::string resumed_from;  ///< A checkpoint; empty: the run began here.
  bool resumed_with_changes = false;
  int64_t first_step = 0, max_steps = 0;
  double seconds = 0;
  int64_t rows = 0, rows_ending_in_eos = 0;  ///< Of the training data, before they are packed.
  int64_t longest_row = 0;                   ///< Tokens.
  bool evaluates = false;
};

/// Writes the file into a folder, whole or not at all. Asks the device for its memory: synchronizes. @throws IoError
void write_run_report(const std::string& folder, const RunReport& report, const CausalLM& model, const TrainState& state,
                      const TrainingArguments& args);

/// Adds "comparison" to the folder's report, if it has one. @throws IoError, FormatError
void add_to_run_report(const std::string& folder, const Comparison& comparison);

}  // namespace qlorapp
