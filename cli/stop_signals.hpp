// SPDX-License-Identifier: Apache-2.0
/// Signals that ask a run, or an answer, to end: SIGINT (Ctrl-C), SIGTERM (schedulers), SIGHUP (a closed terminal), SIGPIPE (the reader of the
/// output ended).
#pragma once

#include <csignal>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

namespace qlorapp::cli {

/// While it lives, the first of them is noted. One that the process ignores stays ignored (nohup). One at a time.
class StopSignals {
 public:
  enum class Second { kEndsProcess, kIsNoted };

  explicit StopSignals(std::initializer_list<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGPIPE},
                       Second second = Second::kEndsProcess);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came; 0: none. Exit code of a run that it ended: 128 plus its number.
  [[nodiscard]] static int received();
  static void forget();
  /// Waits until there is something to read from standard input, a terminal. @returns false if a signal came first.
  [[nodiscard]] bool await_input() const;
  /// "SIGTERM".
  [[nodiscard]] static std::string_view name(int signal);

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
  /// The end of a pipe to which the handler writes. So a signal just before a wait is not lost, in whichever thread it arrives.
  int reads_ = -1;
};

}  // namespace qlorapp::cli
