// SPDX-License-Identifier: Apache-2.0
/// A line that fills on a terminal, and nothing where output is piped.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>

namespace qlorapp::cli {

/// At most one exists at a time, and print_line() writes above it.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Draws at most five times a second. A bar that is full is drawn a last time, and the next line takes its place.
  /// @param note  shown behind the numbers, called only if the bar is drawn. May be empty.
  void update(int64_t done, int64_t total, const std::function<std::string()>& note = {});
  /// Prints a whole line to stdout above the bar.
  void line(std::string_view text);
  [[nodiscard]] bool on_terminal() const { return on_terminal_; }

 private:
  friend void print_line(std::FILE* to, std::string_view text);
  void draw();
  void clear();

  std::string label_, note_;
  bool on_terminal_, drawn_ = false;
  int64_t done_ = 0, total_ = 0;
  std::chrono::steady_clock::time_point begin_, last_;
};

/// A whole line, never on the line of a bar, with control characters escaped (core/escaped.hpp).
void print_line(std::FILE* to, std::string_view text);
/// The same for lines with their ends, where no bar is.
void print_text(std::FILE* to, std::string_view text);

}  // namespace qlorapp::cli
