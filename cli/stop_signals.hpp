// SPDX-License-Identifier: Apache-2.0
/// Signals that ask a run to end: SIGINT (Ctrl-C), SIGTERM (schedulers), SIGHUP (a closed terminal), SIGPIPE (the reader of the output ended).
#pragma once

#include <array>
#include <csignal>
#include <string_view>

namespace qlorapp::cli {

/// While it lives, the first of them is noted and the second ends the process at once. One that the process ignores stays ignored
/// (nohup). One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came; 0: none. Exit code of a run that it ended: 128 plus its number.
  [[nodiscard]] static int received();
  /// "SIGTERM".
  [[nodiscard]] static std::string_view name(int signal);

 private:
  std::array<struct sigaction, 4> before_{};
};

}  // namespace qlorapp::cli
