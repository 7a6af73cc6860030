// SPDX-License-Identifier: Apache-2.0
#include "stop_signals.hpp"

#include <unistd.h>

#include <atomic>
#include <cstddef>

namespace qlorapp::cli {
namespace {

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGPIPE};

std::atomic<int> received_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may not wait");

void on_signal(int signal) {
  int none = 0;
  if (received_signal.compare_exchange_strong(none, signal)) return;
  if (signal != SIGPIPE) ::_exit(128 + signal);  // a closed pipe stays closed: each line raises SIGPIPE again
}

}  // namespace

StopSignals::StopSignals() {
  received_signal = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignals::received() { return received_signal; }

std::string_view StopSignals::name(int signal) {
  switch (signal) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGHUP:
      return "SIGHUP";
    default:
      return "SIGPIPE";
  }
}

}  // namespace qlorapp::cli
