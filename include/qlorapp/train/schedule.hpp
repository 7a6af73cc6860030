// SPDX-License-Identifier: Apache-2.0
/// The learning rate as a pure function of the step.
///
/// With s = optimizer steps taken so far, W = warm-up steps and T = training steps, the base rate is multiplied by
///     s < W                  s / max(1, W)                        the first step has rate 0 (all but `constant`)
///     linear                 max(0, (T − s) / max(1, T − W))
///     cosine                 max(0, ½ (1 + cos(2π · cycles · p))),  p = (s − W) / max(1, T − W), cycles = ½
///     constant, constant_with_warmup                  1             (`constant` has no warm-up)
///
/// Source: transformers' get_scheduler and torch's LambdaLR, in their order of roundings: tests/python/test_schedule.py
/// demands equal doubles.
#pragma once

#include <cstdint>
#include <string_view>

namespace qlorapp {

enum class ScheduleType : uint8_t { kLinear, kCosine, kConstant, kConstantWithWarmup };

/// @param name  linear, cosine, constant or constant_with_warmup. @throws ValueError with the list.
[[nodiscard]] ScheduleType schedule_type(std::string_view name);

struct Schedule {
  ScheduleType type = ScheduleType::kLinear;
  int64_t warmup_steps = 0;    ///< W
  int64_t training_steps = 0;  ///< T
  double cycles = 0.5;         ///< Cosine only: waves between W and T.

  /// @returns what the base rate is multiplied by in the step that follows `steps_taken` steps.
  [[nodiscard]] double factor(int64_t steps_taken) const;
  [[nodiscard]] double learning_rate(double base, int64_t steps_taken) const { return base * factor(steps_taken); }
};

/// Optimizer steps of a run: max_steps if > 0, else ceil(epochs · ceil(micro_batches / accumulation)), at least one an epoch.
/// @param micro_batches  of one epoch.
[[nodiscard]] int64_t count_training_steps(int64_t micro_batches, int64_t accumulation, double epochs, int64_t max_steps);

/// W: `warmup_steps` if >= 1 (its whole part), else the share `warmup_steps` of T, rounded up; where that is 0, the share
/// `warmup_ratio`.
[[nodiscard]] int64_t count_warmup_steps(double warmup_steps, double warmup_ratio, int64_t training_steps);

/// logging_steps, eval_steps, save_steps: a number of steps, or below 1 the share of T, rounded up.
[[nodiscard]] int64_t count_interval_steps(double steps, int64_t training_steps);

}  // namespace qlorapp
