// SPDX-License-Identifier: Apache-2.0
#include "reports.hpp"

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "event_file.hpp"
#include "files/folder.hpp"
#include "python_service.hpp"
#include "qlorapp/core/log.hpp"

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
  Tracker(std::string name, std::vector<std::string> words) : name_(std::move(name)), service_("report_to", std::move(words)) {
    const timeval most{kSecondsToTake, 0};
    (void)::setsockopt(service_.socket(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  }
  Tracker(const Tracker&) = delete;
  Tracker& operator=(const Tracker&) = delete;

  /// The end of the run: the tracker sends what it holds.
  ~Tracker() {
    service_.end_input();
    if (service_.ends_within(seconds_to_end_)) return;
    log_warning(message("[report_to] {} has not ended within {:g} s: what it holds may not be reported.", name_, seconds_to_end_));
    service_.stop(SIGTERM);
    if (!service_.ends_within(kSecondsToTake)) service_.stop(SIGKILL);
  }

  void send(const std::string& line) {
    if (service_.socket() < 0 || service_.send_all(line)) return;
    const bool is_slow = errno == EAGAIN || errno == EWOULDBLOCK;
    log_warning(message("[report_to] {} {}: the rest of the run is not reported there. Its own message says why.", name_,
                        is_slow ? "takes nothing more" : "has ended"));
    service_.end_input();
  }

 private:
  static constexpr int kSecondsToTake = 10;

  std::string name_;
  double seconds_to_end_ = seconds_of("QLORAPP_REPORT_SECONDS", 120);
  PythonService service_;
};

Reports::Reports(const ReportOptions& options, const std::string& output, const std::string& config) {
  for (const std::string& name : options.report_to) {
    if (name == "tensorboard") {
      events_ = std::make_unique<EventFile>(options.logging_dir.empty() ? files::path_in(output, "runs") : options.logging_dir);
      log_info(message("logs for TensorBoard: {}", events_->path()));
    }
    if (name == "tensorboard" || name == "none") continue;
    const std::string script = service_script("report_service.py");
    QLORAPP_CHECK_VALUE(!script.empty(),
                        "[report_to] {} is a Python package: start the command as `python -m qlorapp`, or use tensorboard.", name);
    const std::string& run = options.run_name.empty() ? output : options.run_name;
    trackers_.push_back(std::make_unique<Tracker>(name, std::vector<std::string>{script, name, options.project, run}));
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
