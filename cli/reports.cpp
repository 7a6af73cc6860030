// SPDX-License-Identifier: Apache-2.0
#include "reports.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "event_file.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"
#include "qlorapp/core/log.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace qlorapp::cli {
namespace {

constexpr auto kTrackers = std::to_array<std::string_view>({"tensorboard", "wandb", "trackio"});

/// "eval_loss" is "eval/loss", and "loss" "train/loss", as transformers names them.
std::string tag_of(std::string_view key) {
  for (const std::string_view part : {"eval", "test"}) {
    if (key.starts_with(part) && key.substr(part.size()).starts_with('_'))
      return message("{}/{}", part, key.substr(part.size() + 1));
  }
  return message("train/{}", key);
}

}  // namespace

void ReportOptions::validate() const {
  for (const std::string& name : report_to) {
    QLORAPP_CHECK_VALUE(name == "none" || std::ranges::find(kTrackers, name) != kTrackers.end(),
                        "[report_to] must be some of tensorboard, wandb, trackio, or none; got '{}'.{}", name,
                        did_you_mean(name, kTrackers));
  }
}

/// A process that a run's entries are written to.
class Reports::Tracker {
 public:
  Tracker(std::string name, std::vector<std::string> words) : name_(std::move(name)) {
    std::array<int, 2> pair{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0)
      throw IoError("[report_to] no socket can be made.", errno);
    const timeval most{kSecondsToTake, 0};
    (void)::setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    const int failed = posix_spawn(&process_, argv.front(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(pair[1]);
    into_ = pair[0];
    if (failed == 0) return;
    ::close(into_);
    throw IoError(message("[report_to] {} cannot be started: {}. Check QLORAPP_PYTHON.", words.front(), std::strerror(failed)),
                  failed);
  }
  Tracker(const Tracker&) = delete;
  Tracker& operator=(const Tracker&) = delete;

  /// The end of the run: the tracker sends what it holds.
  ~Tracker() {
    if (into_ >= 0) ::close(into_);
    if (has_ended_within(kSecondsToEnd)) return;
    log_warning(message("[report_to] {} has not ended within {} s: what it holds may not be reported.", name_, kSecondsToEnd));
    (void)::kill(process_, SIGTERM);
    if (has_ended_within(kSecondsToTake)) return;
    (void)::kill(process_, SIGKILL);
    (void)files::retrying([&] { return ::waitpid(process_, nullptr, 0); });
  }

  void send(const std::string& line) {
    for (size_t done = 0; into_ >= 0 && done < line.size();) {
      const ssize_t count = files::retrying([&] { return ::send(into_, line.data() + done, line.size() - done, MSG_NOSIGNAL); });
      if (count > 0) {
        done += static_cast<size_t>(count);
        continue;
      }
      const bool is_slow = errno == EAGAIN || errno == EWOULDBLOCK;
      log_warning(message("[report_to] {} {}: the rest of the run is not reported there. Its own message says why.", name_,
                          is_slow ? "takes nothing more" : "has ended"));
      ::close(std::exchange(into_, -1));
    }
  }

 private:
  static constexpr int kSecondsToTake = 10, kSecondsToEnd = 120;

  [[nodiscard]] bool has_ended_within(int seconds) const {
    using std::chrono::steady_clock;
    const auto last = steady_clock::now() + std::chrono::seconds(seconds);
    while (files::retrying([&] { return ::waitpid(process_, nullptr, WNOHANG); }) == 0) {
      if (steady_clock::now() > last) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  std::string name_;
  pid_t process_ = 0;
  int into_ = -1;  ///< Its standard input; -1: it has failed.
};

Reports::Reports(const ReportOptions& options, const std::string& output, const std::string& config) {
  for (const std::string& name : options.report_to) {
    if (name == "tensorboard") {
      events_ = std::make_unique<EventFile>(options.logging_dir.empty() ? files::path_in(output, "runs") : options.logging_dir);
      log_info(message("logs for TensorBoard: {}", events_->path()));
    }
    if (name == "tensorboard" || name == "none") continue;
    const char *const python = std::getenv("QLORAPP_PYTHON"), *const text_service = std::getenv("QLORAPP_HF_TEXT");
    QLORAPP_CHECK_VALUE(python != nullptr && text_service != nullptr,
                        "[report_to] {} is a Python package: start the command as `python -m qlorapp`, or use tensorboard.", name);
    const std::string script = files::path_in(files::parent_of(text_service), "report_service.py");
    const std::string& run = options.run_name.empty() ? output : options.run_name;
    trackers_.push_back(std::make_unique<Tracker>(name, std::vector<std::string>{python, script, name, options.project, run}));
    trackers_.back()->send(config + "\n");
  }
}

Reports::~Reports() = default;

void Reports::log(const LogRecord& record) {
  const int64_t step = record.contains("step") ? static_cast<int64_t>(record.number("step")) : 0;
  std::vector<std::pair<std::string, double>> values;
  nlohmann::ordered_json line{{"step", step}, {"values", nlohmann::ordered_json::object()}};
  for (const auto& [key, value] : record.values()) {
    if (key == "step" || std::holds_alternative<std::string>(value)) continue;
    const double number = record.number(key);
    values.emplace_back(tag_of(key), number);
    line["values"][tag_of(key)] = number;
  }
  if (values.empty()) return;
  if (events_) {
    try {
      events_->add(step, values);
    } catch (const IoError& error) {
      log_warning(message("{} The rest of the run is not reported there.", error.what()));
      events_.reset();
    }
  }
  const std::string text = line.dump() + "\n";
  for (const auto& tracker : trackers_) tracker->send(text);
}

}  // namespace qlorapp::cli
