// SPDX-License-Identifier: Apache-2.0
#include "stop_signals.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "core/check.hpp"
#include "files/retry.hpp"

namespace qlorapp::cli {
namespace {

std::atomic<int> received_signal{0}, told_by{-1};
std::atomic<bool> second_ends{true};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free, "a signal handler may not wait");

void on_signal(int signal) {
  const int error = errno;
  int none = 0;
  const bool is_first = received_signal.compare_exchange_strong(none, signal);
  // A closed pipe stays closed: each line raises SIGPIPE again.
  if (!is_first && second_ends && signal != SIGPIPE) ::_exit(128 + signal);
  if (const int pipe = told_by; pipe >= 0) (void)!::write(pipe, "", 1);
  errno = error;
}

}  // namespace

StopSignals::StopSignals(std::initializer_list<int> signals, Second second) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw IoError("[signals] the system gives no pipe.", errno);
  reads_ = ends[0];
  told_by = ends[1];
  received_signal = 0;
  second_ends = second == Second::kEndsProcess;
  for (const int signal : signals) {
    struct sigaction action {
    }, before{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);
    before_.emplace_back(signal, before);
  }
}

StopSignals::~StopSignals() {
  for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
  ::close(told_by.exchange(-1));
  ::close(reads_);
}

int StopSignals::received() { return received_signal; }

void StopSignals::forget() { received_signal = 0; }

bool StopSignals::await_input() const {
  for (;;) {
    std::array<pollfd, 2> sources{{{STDIN_FILENO, POLLIN, 0}, {reads_, POLLIN, 0}}};
    (void)files::retrying([&] { return ::poll(sources.data(), sources.size(), -1); });
    std::array<char, 64> told{};
    while (::read(reads_, told.data(), told.size()) > 0) {}
    if (received() != 0) return false;
    if (sources[0].revents != 0) return true;  // else the pipe told of a signal that was forgotten
  }
}

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
