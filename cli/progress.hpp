// SPDX-License-Identifier: Apache-2.0
/// A line that fills on a terminal, and nothing where output is piped.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace qlorapp::cli {

class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(int64_t done, int64_t total);
  /// Prints a whole line above the bar.
  void line(std::string_view text);
  [[nodiscard]] bool on_terminal() const { return on_terminal_; }

 private:
  void draw(int64_t done, int64_t total);
  void clear();

  std::string label_;
  bool on_terminal_, drawn_ = false;
  int64_t done_ = 0, total_ = 0;
  std::chrono::steady_clock::time_point begin_, last_;
};

}  // namespace qlorapp::cli
