// SPDX-License-Identifier: Apache-2.0
#include "reports.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
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
    std::array<int, 2> pair{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0)
      throw IoError("[report_to] no socket can be made.", errno);
    std::vector<std::string> words{python, files::path_in(files::parent_of(text_service), "report_service.py"), name,
                                   options.project, options.run_name.empty() ? output : options.run_name};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    Tracker tracker{name, 0, pair[0]};
    const int failed = posix_spawn(&tracker.process, python, &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(pair[1]);
    if (failed != 0)
      throw IoError(message("[report_to] {} cannot be started: {}. Check QLORAPP_PYTHON.", python, std::strerror(failed)), failed);
    send(tracker, config + "\n");
    trackers_.push_back(std::move(tracker));
  }
}

Reports::~Reports() {
  for (const Tracker& tracker : trackers_) {
    if (tracker.into >= 0) ::close(tracker.into);  // the end of the run; the tracker sends what it holds
    int status = 0;
    (void)files::retrying([&] { return ::waitpid(tracker.process, &status, 0); });
  }
}

void Reports::send(Tracker& tracker, const std::string& line) {
  for (size_t done = 0; tracker.into >= 0 && done < line.size();) {
    const ssize_t count =
        files::retrying([&] { return ::send(tracker.into, line.data() + done, line.size() - done, MSG_NOSIGNAL); });
    if (count > 0) {
      done += static_cast<size_t>(count);
      continue;
    }
    log_warning(
        message("[report_to] {} has ended: the rest of the run is not reported there. Its own message says why.", tracker.name));
    ::close(std::exchange(tracker.into, -1));
  }
}

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
  for (Tracker& tracker : trackers_) send(tracker, text);
}

}  // namespace qlorapp::cli
