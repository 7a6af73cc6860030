// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

using format::Json;

int64_t share_of(double share, int64_t steps) { return static_cast<int64_t>(std::ceil(static_cast<double>(steps) * share)); }

double half_wave(double cycles, double progress) { return 0.5 * (1.0 + std::cos(std::numbers::pi * cycles * 2.0 * progress)); }

double warm_up(RampShape shape, double progress) {
  switch (shape) {
    case RampShape::kLinear:
      return progress;
    case RampShape::kCosine:
      return 0.5 * (1.0 - std::cos(std::numbers::pi * progress));
    case RampShape::kOneMinusSqrt:
      break;
  }
  return 1.0 - std::sqrt(1.0 - progress);
}

double decay(RampShape shape, double progress, double cycles) {
  switch (shape) {
    case RampShape::kLinear:
      return 1.0 - progress;
    case RampShape::kCosine:
      return half_wave(cycles, progress);
    case RampShape::kOneMinusSqrt:
      break;
  }
  return 1.0 - std::sqrt(progress);
}

double warmup_stable_decay(const Schedule& s, int64_t step) {
  const int64_t stable = s.stable_steps.value_or(s.training_steps - s.warmup_steps - s.decay_steps);
  const auto above_least = [&](double factor) { return std::max(0.0, factor * (1.0 - s.min_share) + s.min_share); };
  if (step < s.warmup_steps) {
    return above_least(
        warm_up(s.warmup_shape, static_cast<double>(step) / static_cast<double>(std::max<int64_t>(1, s.warmup_steps))));
  }
  if (step < s.warmup_steps + stable) return 1.0;
  if (step < s.warmup_steps + stable + s.decay_steps) {
    const double progress =
        static_cast<double>(step - s.warmup_steps - stable) / static_cast<double>(std::max<int64_t>(1, s.decay_steps));
    return above_least(decay(s.decay_shape, progress, s.cycles));
  }
  return s.min_share;
}

double cosine_warmup_with_min_lr(const Schedule& s, double least, int64_t steps_taken) {
  const auto step = static_cast<double>(steps_taken), warmup = static_cast<double>(s.warmup_steps);
  if (step < warmup) {
    if (!s.warmup_share) return (step + 1.0) / std::max(1.0, warmup);
    return *s.warmup_share + (1.0 - *s.warmup_share) * step / std::max(1.0, warmup - 1);
  }
  const double progress = (step - warmup + 1.0) / std::max(1.0, static_cast<double>(s.training_steps) - warmup);
  return std::max(0.0, half_wave(s.cycles, progress) * (1 - least) + least);
}

double polynomial(const Schedule& s, double base, int64_t step) {
  if (step > s.training_steps) return s.end_rate / base;
  const auto span = static_cast<double>(std::max<int64_t>(1, s.training_steps - s.warmup_steps));
  const double remaining = 1 - static_cast<double>(step - s.warmup_steps) / span;
  return ((base - s.end_rate) * std::pow(remaining, s.power) + s.end_rate) / base;
}

/// Reads lr_scheduler_kwargs key by key; at the end every key must have been asked for.
class Settings {
 public:
  Settings(std::string_view type, Json json) : type_(type), json_(std::move(json)) {}

  const Json* find(const char* name) {
    known_.emplace_back(name);
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  template <class Into>
  void number(const char* name, Into& into) {
    if (const Json* value = find(name)) {
      QLORAPP_CHECK_VALUE(value->is_number() && std::isfinite(value->get<double>()), "{}{} must be a number; got {}.", where(),
                          name, value->dump());
      into = value->get<double>();
    }
  }
  template <class Into>
  void steps(const char* name, Into& into) {
    if (const Json* value = find(name)) {
      QLORAPP_CHECK_VALUE(value->is_number_integer() && value->get<int64_t>() >= 0, "{}{} must be an integer >= 0; got {}.",
                          where(), name, value->dump());
      into = value->get<int64_t>();
    }
  }
  void shape(const char* name, RampShape& into) {
    if (const Json* value = find(name)) {
      static const std::vector<std::string_view> kShapes{"linear", "cosine", "1-sqrt"};
      const auto at = std::find(kShapes.begin(), kShapes.end(), value->is_string() ? value->get<std::string>() : "");
      QLORAPP_CHECK_VALUE(at != kShapes.end(), "{}{} must be one of {}; got {}.", where(), name, joined(kShapes), value->dump());
      into = static_cast<RampShape>(at - kShapes.begin());
    }
  }
  void done() const {
    for (const auto& [key, value] : json_.items()) {
      QLORAPP_CHECK_VALUE(std::find(known_.begin(), known_.end(), key) != known_.end(), "{}there is no setting '{}'; {} has {}.{}",
                          where(), key, type_, joined(known_), did_you_mean(key, known_));
    }
  }
  [[nodiscard]] std::string where() const { return message("[lr_scheduler_kwargs] {}: ", type_); }

 private:
  std::string_view type_;
  Json json_;
  std::vector<std::string_view> known_;
};

}  // namespace

const std::vector<std::string_view>& schedule_names() {
  static const std::vector<std::string_view> kNames{"linear",
                                                    "cosine",
                                                    "cosine_with_restarts",
                                                    "polynomial",
                                                    "constant",
                                                    "constant_with_warmup",
                                                    "inverse_sqrt",
                                                    "cosine_with_min_lr",
                                                    "cosine_warmup_with_min_lr",
                                                    "warmup_stable_decay"};
  return kNames;
}

ScheduleType schedule_type(std::string_view name) {
  const auto& names = schedule_names();
  const auto found = std::find(names.begin(), names.end(), name);
  QLORAPP_CHECK_VALUE(found != names.end(), "[lr_scheduler_type] must be one of {}; got '{}'.{}", joined(names), name,
                      did_you_mean(name, names));
  return static_cast<ScheduleType>(found - names.begin());
}

Schedule make_schedule(std::string_view type, const std::string& kwargs_json) {
  Json json = format::parse_json(kwargs_json, "lr_scheduler_kwargs");
  if (json.is_string()) json = format::parse_json(json.get<std::string>(), "lr_scheduler_kwargs");
  if (json.is_null()) json = Json::object();
  QLORAPP_CHECK_VALUE(json.is_object(), "[lr_scheduler_kwargs] must be an object of settings; got {}.", json.dump());
  Schedule schedule;
  schedule.type = schedule_type(type);
  Settings settings(type, std::move(json));
  using enum ScheduleType;
  switch (schedule.type) {
    case kLinear:
    case kConstant:
    case kConstantWithWarmup:
      break;
    case kCosineWithRestarts:
      schedule.cycles = 1;
      [[fallthrough]];
    case kCosine:
      settings.number("num_cycles", schedule.cycles);
      break;
    case kPolynomial:
      settings.number("lr_end", schedule.end_rate);
      settings.number("power", schedule.power);
      break;
    case kInverseSqrt:
      settings.steps("timescale", schedule.timescale);
      break;
    case kCosineWarmupWithMinLr:
    case kCosineWithMinLr: {
      std::optional<double> share;
      settings.number("num_cycles", schedule.cycles);
      settings.number("min_lr", schedule.min_rate);
      settings.number("min_lr_rate", share);
      if (schedule.type == kCosineWarmupWithMinLr) settings.number("warmup_lr_rate", schedule.warmup_share);
      QLORAPP_CHECK_VALUE(share.has_value() != schedule.min_rate.has_value(), "{}give one of min_lr and min_lr_rate.",
                          settings.where());
      schedule.min_share = share.value_or(0);
      break;
    }
    case kWarmupStableDecay: {
      std::optional<int64_t> decay_steps;
      settings.steps("num_decay_steps", decay_steps);
      settings.steps("num_stable_steps", schedule.stable_steps);
      settings.shape("warmup_type", schedule.warmup_shape);
      settings.shape("decay_type", schedule.decay_shape);
      settings.number("min_lr_ratio", schedule.min_share);
      settings.number("num_cycles", schedule.cycles);
      QLORAPP_CHECK_VALUE(decay_steps.has_value(), "{}num_decay_steps is required.", settings.where());
      schedule.decay_steps = *decay_steps;
      break;
    }
  }
  settings.done();
  return schedule;
}

double Schedule::factor(int64_t steps_taken, double base) const {
  using enum ScheduleType;
  if (type == kConstant) return 1.0;
  if (type == kWarmupStableDecay) return warmup_stable_decay(*this, steps_taken);
  const double least = min_rate ? *min_rate / base : min_share;
  if (type == kCosineWarmupWithMinLr) return cosine_warmup_with_min_lr(*this, least, steps_taken);
  if (steps_taken < warmup_steps) return static_cast<double>(steps_taken) / static_cast<double>(std::max<int64_t>(1, warmup_steps));
  const auto span = static_cast<double>(std::max<int64_t>(1, training_steps - warmup_steps));
  const double progress = static_cast<double>(steps_taken - warmup_steps) / span;
  switch (type) {
    case kLinear:
      return std::max(0.0, static_cast<double>(training_steps - steps_taken) / span);
    case kCosine:
      return std::max(0.0, half_wave(cycles, progress));
    case kCosineWithRestarts:
      return progress >= 1.0 ? 0.0 : std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * std::fmod(cycles * progress, 1.0))));
    case kCosineWithMinLr:
      return std::max(0.0, half_wave(cycles, progress) * (1 - least) + least);
    case kPolynomial:
      return polynomial(*this, base, steps_taken);
    case kInverseSqrt: {
      const int64_t scale = timescale > 0 ? timescale : warmup_steps > 0 ? warmup_steps : 10'000;
      return 1.0 / std::sqrt(static_cast<double>(steps_taken + scale - warmup_steps) / static_cast<double>(scale));
    }
    default:
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
