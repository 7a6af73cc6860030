// SPDX-License-Identifier: Apache-2.0
/// Whether the training loss of a run fell, and whether its learning rate is one of adapters: what a person learns otherwise from a result that
/// answers as before.
///
/// The rule: the losses of the steps in the first and in the last quarter of the run are compared. With at least 10 steps in each, "it did not
/// fall" if the mean of the last quarter is at least 98 % of the first's, and the difference is below twice its standard error. A run with fewer
/// steps, one that ended early, and one whose first quarter was trained by another process (a resumed run) is not judged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace qlorapp {

class LossTrend {
 public:
  /// @param step  from 1.  @param steps  of the whole run.
  void add(double loss, int64_t step, int64_t steps);
  void clear() { first_ = last_ = {}; }

  struct Verdict {
    double first = 0, last = 0;  ///< Mean losses.
    int64_t steps = 0;           ///< In each quarter, about.
    bool rose = false;           ///< By more than 5 % and twice the standard error.
  };
  /// Nothing if the loss fell, or if there is too little to say so.
  [[nodiscard]] std::optional<Verdict> did_not_fall() const;

 private:
  struct Quarter {
    int64_t count = 0;
    double sum = 0, squares = 0;
  };
  Quarter first_, last_;
};

/// "the loss did not fall: …" with what to try; empty if it fell.
[[nodiscard]] std::string trend_line(const LossTrend& trend, double learning_rate);

/// One line before a run whose learning rate is far from usual for adapters: below 2e-5, or above 3e-3 (2e-2 for models of less than 100 million
/// parameters, which learn with larger ones). Empty otherwise.
[[nodiscard]] std::string learning_rate_line(double learning_rate, int64_t parameters);

}  // namespace qlorapp
