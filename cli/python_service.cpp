// SPDX-License-Identifier: Apache-2.0
#include "python_service.hpp"

#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace qlorapp::cli {
namespace {

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string service_script(std::string_view file) {
  const std::string text_service = setting("QLORAPP_HF_TEXT");
  if (setting("QLORAPP_PYTHON").empty() || text_service.empty()) return {};
  return file.empty() ? text_service : files::path_in(files::parent_of(text_service), file);
}

double seconds_of(const char* variable, double otherwise) {
  const std::string text = setting(variable);
  if (text.empty()) return otherwise;
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  QLORAPP_CHECK_VALUE(error == std::errc{} && end == text.data() + text.size() && seconds > 0,
                      "[{}] must be a number above 0; got '{}'.", variable, text);
  return seconds;
}

PythonService::PythonService(std::string_view subject, std::vector<std::string> words) {
  const std::string python = setting("QLORAPP_PYTHON");
  words.insert(words.begin(), python);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw IoError(message("[{}] no socket can be made: {}.", subject, std::strerror(errno)), errno);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);  // what packages print is not an answer
  const int failed = posix_spawn(&process_, python.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  socket_ = ends[0];
  if (failed == 0) return;
  end_input();
  throw IoError(message("[{}] Python cannot be started as '{}': {}. Check QLORAPP_PYTHON.", subject, python, std::strerror(failed)),
                failed);
}

PythonService::~PythonService() {
  end_input();
  if (process_ != 0) (void)files::retrying([&] { return ::waitpid(process_, nullptr, 0); });
}

double PythonService::cpu_seconds() const {
  clockid_t clock{};
  timespec used{};
  if (::clock_getcpuclockid(process_, &clock) != 0 || ::clock_gettime(clock, &used) != 0) return 0;  // it has ended
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

bool PythonService::send_all(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t count = files::retrying([&] { return ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL); });
    if (count < 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

void PythonService::end_input() {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
}

bool PythonService::ends_within(double seconds) {
  using std::chrono::steady_clock;
  const auto last = steady_clock::now() + std::chrono::duration<double>(seconds);
  while (files::retrying([&] { return ::waitpid(process_, nullptr, WNOHANG); }) == 0) {
    if (steady_clock::now() > last) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  process_ = 0;
  return true;
}

void PythonService::stop(int signal) const { (void)::kill(process_, signal); }

}  // namespace qlorapp::cli
