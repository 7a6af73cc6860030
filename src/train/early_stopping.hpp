// SPDX-License-Identifier: Apache-2.0
/// Ends a run whose evaluations no longer get better.
///
/// Source: transformers 5.23, EarlyStoppingCallback. Its counter is kept with the run and survives a resume.
#pragma once

#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// Counts an evaluation. One that beats the best so far by more than early_stopping_threshold sets the counter to 0.
/// @param metric  the value of metric_for_best_model, before it becomes state.best_metric.
void count_evaluation(const TrainingArguments& args, double metric, TrainState& state);

/// early_stopping_patience evaluations in a row were no better.
[[nodiscard]] bool stops_early(const TrainingArguments& args, const TrainState& state);

}  // namespace qlorapp
