// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

int64_t share_of(double share, int64_t steps) { return static_cast<int64_t>(std::ceil(static_cast<double>(steps) * share)); }

}  // namespace

ScheduleType schedule_type(std::string_view name) {
  if (name == "linear") return ScheduleType::kLinear;
  if (name == "cosine") return ScheduleType::kCosine;
  if (name == "constant") return ScheduleType::kConstant;
  if (name == "constant_with_warmup") return ScheduleType::kConstantWithWarmup;
  throw ValueError(concat("[lr_scheduler_type] must be linear, cosine, constant or constant_with_warmup; got '", name, "'."));
}

double Schedule::factor(int64_t steps_taken) const {
  if (type == ScheduleType::kConstant) return 1.0;
  if (steps_taken < warmup_steps) return static_cast<double>(steps_taken) / static_cast<double>(std::max<int64_t>(1, warmup_steps));
  const auto span = static_cast<double>(std::max<int64_t>(1, training_steps - warmup_steps));
  switch (type) {
    case ScheduleType::kLinear:
      return std::max(0.0, static_cast<double>(training_steps - steps_taken) / span);
    case ScheduleType::kCosine: {
      const double progress = static_cast<double>(steps_taken - warmup_steps) / span;
      return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * cycles * 2.0 * progress)));
    }
    case ScheduleType::kConstant:
    case ScheduleType::kConstantWithWarmup:
      break;
  }
  return 1.0;
}

int64_t count_training_steps(int64_t micro_batches, int64_t accumulation, double epochs, int64_t max_steps) {
  if (max_steps > 0) return max_steps;
  const int64_t an_epoch = micro_batches / accumulation + (micro_batches % accumulation > 0 ? 1 : 0);
  return share_of(epochs, std::max<int64_t>(1, an_epoch));
}

int64_t count_warmup_steps(double warmup_steps, double warmup_ratio, int64_t training_steps) {
  if (warmup_steps >= 1) return static_cast<int64_t>(warmup_steps);
  return share_of(warmup_steps > 0 ? warmup_steps : warmup_ratio, training_steps);
}

int64_t count_interval_steps(double steps, int64_t training_steps) {
  return steps < 1 ? share_of(steps, training_steps) : static_cast<int64_t>(steps);
}

}  // namespace qlorapp
