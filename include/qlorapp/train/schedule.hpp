// SPDX-License-Identifier: Apache-2.0
/// The learning rate as a pure function of the step.
///
/// With s = optimizer steps taken so far, W = warm-up steps and T = training steps, the base rate is multiplied by
///     s < W                        s / max(1, W)                        the first step has rate 0 (all but `constant`)
///     linear                       max(0, (T − s) / max(1, T − W))
///     cosine                       max(0, ½ (1 + cos(2π · cycles · p))),  p = (s − W) / max(1, T − W), cycles = ½
///     cosine_with_restarts         max(0, ½ (1 + cos(π · (cycles · p mod 1)))), cycles = 1;  0 from p = 1 on
///     cosine_with_min_lr           cosine · (1 − m) + m,  m = min_lr_rate, or min_lr / base rate
///     cosine_warmup_with_min_lr    the same with p one step further; warm-up (s + 1) / W, or from warmup_lr_rate up
///     polynomial                   ((base − lr_end) · (1 − p)^power + lr_end) / base
///     inverse_sqrt                 1 / √((s + timescale − W) / timescale),  timescale = W or 10000
///     warmup_stable_decay          1 for num_stable_steps, then down to min_lr_ratio within num_decay_steps
///     constant, constant_with_warmup                  1             (`constant` has no warm-up)
///
/// Source: transformers' get_scheduler and torch's LambdaLR, in their order of roundings: tests/python/test_schedule.py
/// demands equal doubles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

enum class ScheduleType : uint8_t {
  kLinear,
  kCosine,
  kCosineWithRestarts,
  kPolynomial,
  kConstant,
  kConstantWithWarmup,
  kInverseSqrt,
  kCosineWithMinLr,
  kCosineWarmupWithMinLr,
  kWarmupStableDecay
};

/// The names of all, in the order of the enumeration.
[[nodiscard]] const std::vector<std::string_view>& schedule_names();
/// @throws ValueError with the list.
[[nodiscard]] ScheduleType schedule_type(std::string_view name);

/// How warmup_stable_decay goes up and down.
enum class RampShape : uint8_t { kLinear, kCosine, kOneMinusSqrt };

struct Schedule {
  ScheduleType type = ScheduleType::kLinear;
  int64_t warmup_steps = 0;                 ///< W
  int64_t training_steps = 0;               ///< T
  double cycles = 0.5;                      ///< num_cycles: waves between W and T.
  double power = 1;                         ///< polynomial
  double end_rate = 1e-7;                   ///< lr_end of polynomial, a rate
  int64_t timescale = 0;                    ///< inverse_sqrt; 0: W or 10000
  double min_share = 0;                     ///< min_lr_rate or min_lr_ratio, a share of the base rate
  std::optional<double> min_rate = {};      ///< min_lr, a rate
  std::optional<double> warmup_share = {};  ///< warmup_lr_rate, a share of the base rate
  std::optional<int64_t> stable_steps = {};
  int64_t decay_steps = 0;
  RampShape warmup_shape = RampShape::kLinear, decay_shape = RampShape::kCosine;

  /// @returns the factor of the base rate in the step after `steps_taken` steps.
  [[nodiscard]] double factor(int64_t steps_taken, double base = 1.0) const;
  [[nodiscard]] double learning_rate(double base, int64_t steps_taken) const { return base * factor(steps_taken, base); }
};

/// @param kwargs_json  lr_scheduler_kwargs: null, an object, or a string that holds one.
/// @throws ValueError for a setting that this schedule does not have (naming the nearest), of another type, or missing.
[[nodiscard]] Schedule make_schedule(std::string_view type, const std::string& kwargs_json);

/// Optimizer steps of a run: max_steps if > 0, else ceil(epochs · ceil(micro_batches / accumulation)), at least one an epoch.
/// @param micro_batches  of one epoch.
[[nodiscard]] int64_t count_training_steps(int64_t micro_batches, int64_t accumulation, double epochs, int64_t max_steps);

/// W: `warmup_steps` if >= 1 (its whole part), else the share `warmup_steps` of T, rounded up; where that is 0, the share
/// `warmup_ratio`.
[[nodiscard]] int64_t count_warmup_steps(double warmup_steps, double warmup_ratio, int64_t training_steps);

/// logging_steps, eval_steps, save_steps: a number of steps, or below 1 the share of T, rounded up.
[[nodiscard]] int64_t count_interval_steps(double steps, int64_t training_steps);

}  // namespace qlorapp
