// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

float single(double value) { return static_cast<float>(value); }  // a Python float meets a float32 tensor

/// theta^(2i / width).
std::vector<float> periods(double theta, int64_t width) {
  std::vector<float> all;
  all.reserve(static_cast<size_t>(width / 2));
  for (int64_t i = 0; i < width; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(width);
    all.push_back(single(std::pow(static_cast<double>(single(theta)), static_cast<double>(exponent))));
  }
  return all;
}

void slow_long_waves(std::vector<float>& frequencies, const RopeSettings& rope) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const float long_wave = single(original / rope.low_freq_factor), short_wave = single(original / rope.high_freq_factor);
  const float factor = single(rope.factor);
  for (float& frequency : frequencies) {
    const float wave = single(2 * std::numbers::pi) / frequency;
    if (wave > long_wave) {
      frequency /= factor;
    } else if (!(wave < short_wave)) {
      const float blend =
          (single(original) / wave - single(rope.low_freq_factor)) / single(rope.high_freq_factor - rope.low_freq_factor);
      frequency = (1.0F - blend) * frequency / factor + blend * frequency;
    }
  }
}

/// The pair that turns so many times over `original` positions.
double pair_that_turns(double times, const RopeSettings& rope) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<double>(rope.width) * std::log(original / (times * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
}

std::vector<float> yarn(const RopeSettings& rope) {
  double low = pair_that_turns(rope.beta_fast, rope), high = pair_that_turns(rope.beta_slow, rope);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, static_cast<double>(rope.width - 1));
  if (low == high) high += 0.001;  // as there
  std::vector<float> frequencies = periods(rope.theta, rope.width);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - single(low)) / single(high - low), 0.0F, 1.0F), kept = 1.0F - ramp;
    const float slowed = 1.0F / (single(rope.factor) * frequencies[i]), full = 1.0F / frequencies[i];
    frequencies[i] = slowed * (1.0F - kept) + full * kept;
  }
  return frequencies;
}

}  // namespace

std::string to_string(RopeSettings::Type type) {
  switch (type) {
    case RopeSettings::Type::kDefault:
      return "default";
    case RopeSettings::Type::kLinear:
      return "linear";
    case RopeSettings::Type::kDynamic:
      return "dynamic";
    case RopeSettings::Type::kLlama3:
      return "llama3";
    case RopeSettings::Type::kYarn:
      return "yarn";
    case RopeSettings::Type::kLongRope:
      return "longrope";
    case RopeSettings::Type::kNone:
      return "none";
  }
  throw Error("[rope] a type without a name");
}

bool is_long_for(const RopeSettings& rope, int64_t length) {
  const bool counts = rope.type == RopeSettings::Type::kDynamic || rope.type == RopeSettings::Type::kLongRope;
  return counts && length > rope.original_max_position_embeddings;
}

std::vector<float> rope_inverse_frequencies(const RopeSettings& rope, int64_t length) {
  using enum RopeSettings::Type;
  if (rope.type == kNone) return std::vector<float>(static_cast<size_t>(rope.width / 2), 0.0F);
  if (rope.type == kYarn) return yarn(rope);
  double theta = rope.theta;
  if (rope.type == kDynamic && is_long_for(rope, length)) {
    const double stretched =
        rope.factor * static_cast<double>(length) / static_cast<double>(rope.original_max_position_embeddings) - (rope.factor - 1);
    theta *= std::pow(stretched, static_cast<double>(rope.width) / static_cast<double>(rope.width - 2));
  }
  std::vector<float> frequencies = periods(theta, rope.width);
  const std::vector<double>& divisors = is_long_for(rope, length) ? rope.long_factor : rope.short_factor;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    if (rope.type == kLongRope) frequencies[i] *= single(divisors[i]);
    frequencies[i] = 1.0F / frequencies[i];
    if (rope.type == kLinear) frequencies[i] /= single(rope.factor);
  }
  if (rope.type == kLlama3) slow_long_waves(frequencies, rope);
  return frequencies;
}

}  // namespace qlorapp::format
