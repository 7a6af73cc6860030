// SPDX-License-Identifier: Apache-2.0
#include "train/early_stopping.hpp"

#include <cmath>

namespace qlorapp {

void count_evaluation(const TrainingArguments& args, double metric, TrainState& state) {
  const auto& best = state.best_metric;
  const bool is_better = !best || ((args.best_is_greatest() ? metric > *best : metric < *best) &&
                                   std::fabs(metric - *best) > args.early_stopping_threshold);
  state.evaluations_without_gain = is_better ? 0 : state.evaluations_without_gain + 1;
}

bool stops_early(const TrainingArguments& args, const TrainState& state) {
  return args.early_stopping_patience && state.evaluations_without_gain >= *args.early_stopping_patience;
}

}  // namespace qlorapp
