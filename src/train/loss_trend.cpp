// SPDX-License-Identifier: Apache-2.0
#include "train/loss_trend.hpp"

#include <algorithm>
#include <cmath>

#include "core/check.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kFewest = 10;  ///< Steps in a quarter.
constexpr const char* kUsual = "1e-4 to 3e-4 is usual for adapters";

}  // namespace

void LossTrend::add(double loss, int64_t step, int64_t steps) {
  if (!std::isfinite(loss)) return;
  if (4 * step > steps && 4 * (step - 1) < 3 * steps) return;
  Quarter& quarter = 4 * step <= steps ? first_ : last_;
  ++quarter.count;
  quarter.sum += loss;
  quarter.squares += loss * loss;
}

std::optional<LossTrend::Verdict> LossTrend::did_not_fall() const {
  if (std::min(first_.count, last_.count) < kFewest) return std::nullopt;
  const auto mean = [](const Quarter& q) { return q.sum / static_cast<double>(q.count); };
  const auto variance_of_mean = [&](const Quarter& q) {
    const double n = static_cast<double>(q.count);
    return std::max(0.0, q.squares / n - mean(q) * mean(q)) / (n - 1);
  };
  const double first = mean(first_), last = mean(last_);
  const double noise = 2 * std::sqrt(variance_of_mean(first_) + variance_of_mean(last_));
  const bool fell = last < 0.98 * first || first - last > noise;
  if (fell) return std::nullopt;
  return Verdict{first, last, std::min(first_.count, last_.count), last > 1.05 * first && last - first > noise};
}

std::string trend_line(const LossTrend& trend, double learning_rate) {
  const auto verdict = trend.did_not_fall();
  if (!verdict) return "";
  const std::string what = message("the loss {}: {:.4g} on average in the first {} steps, {:.4g} in the last.",
                                   verdict->rose ? "rose" : "did not fall", verdict->first, verdict->steps, verdict->last);
  return verdict->rose ? message("{} Try a lower learning rate ({:.4g} was used; {}), or a warm-up.", what, learning_rate, kUsual)
                       : message(
                             "{} Try another learning rate ({:.4g} was used; {}), target_modules=all-linear, or more epochs, and "
                             "check in the first "
                             "row above what is trained.",
                             what, learning_rate, kUsual);
}

std::string learning_rate_line(double learning_rate, int64_t parameters) {
  constexpr double kLowest = 2e-5, kHighest = 3e-3, kHighestOfSmall = 2e-2;
  constexpr int64_t kSmall = 100'000'000;
  const bool too_low = learning_rate < kLowest;
  if (!too_low && learning_rate <= (parameters < kSmall ? kHighestOfSmall : kHighest)) return "";
  return message("learning_rate {:.4g} is far {} what is usual for adapters: {}.", learning_rate, too_low ? "below" : "above",
                 too_low ? "1e-4 to 3e-4. The adapters may hardly change" : "1e-4 to 3e-4. The loss may rise");
}

}  // namespace qlorapp
