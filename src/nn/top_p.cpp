// SPDX-License-Identifier: Apache-2.0
#include "nn/top_p.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace qlorapp {
namespace {

constexpr size_t kGroups = 1U << 16U;
constexpr float kLeft = -std::numeric_limits<float>::infinity();

/// Of a number of this order: higher scores have higher groups.
size_t group_of(float score) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0F);  // -0 is 0
  constexpr uint32_t kSign = 0x8000'0000U;
  return ((bits & kSign) != 0U ? ~bits : bits | kSign) >> 16U;
}

/// Several sums at a time, which need not wait for each other.
double sum_of(std::span<const float> values) {
  std::array<double, 8> sums{};
  size_t i = 0;
  for (; i + sums.size() <= values.size(); i += sums.size())
    for (size_t k = 0; k < sums.size(); ++k) sums[k] += static_cast<double>(values[i + k]);
  for (; i < values.size(); ++i) sums[0] += static_cast<double>(values[i]);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

TopP::TopP() : mass_(kGroups) {}

void TopP::keep(std::span<float> scores, std::span<const float> probabilities, double p) {
  const double total = sum_of(probabilities), out = 1.0 - p;
  if (std::isnan(total)) return;
  // All that are less probable than this have no more than `out` together: those that are left are few, as a rule.
  const auto least_likely = static_cast<float>(out / static_cast<double>(scores.size()) * (1 - 1e-6));
  if (likely_.size() < scores.size()) likely_.resize(scores.size());
  size_t count = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const bool is_likely = probabilities[i] >= least_likely;
    likely_[count] = i;
    count += is_likely ? 1 : 0;
    scores[i] = is_likely ? scores[i] : kLeft;
  }
  const std::span<const size_t> likely = std::span(likely_).first(count);
  size_t last = 0;  // the group in which the set ends; the highest first
  for (const size_t i : likely) {
    const size_t group = group_of(scores[i]);
    mass_[group] += static_cast<double>(probabilities[i]);
    last = std::max(last, group);
  }
  const double wanted = total - out;  // of tokens above one that leaves
  double above = 0;
  while (last > 0 && (mass_[last] == 0.0 || above + mass_[last] < wanted)) above += mass_[last--];
  tokens_.clear();
  for (const size_t i : likely) {
    const size_t group = group_of(scores[i]);
    mass_[group] = 0;  // for the next row
    if (group == last) tokens_.push_back({scores[i], i});
    if (group < last) scores[i] = kLeft;
  }
  std::ranges::sort(tokens_,
                    [](const Token& a, const Token& b) { return a.score != b.score ? a.score > b.score : a.index > b.index; });
  for (const Token& token : tokens_) {
    if (above >= wanted && above > 0) scores[token.index] = kLeft;
    else above += static_cast<double>(probabilities[token.index]);
  }
}

}  // namespace qlorapp
