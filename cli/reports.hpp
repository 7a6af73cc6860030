// SPDX-License-Identifier: Apache-2.0
/// --report_to: a run's log entries for TensorBoard (event_file.hpp), and for Weights & Biases and Trackio through their Python packages
/// (python/qlorapp/hf/report_service.py). A tracker that fails is left out with a warning; the run goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qlorapp/train/log_history.hpp"

namespace qlorapp::cli {

class EventFile;

struct ReportOptions {
  std::vector<std::string> report_to{"none"};  ///< tensorboard, wandb, trackio; none: nothing.
  std::string logging_dir;                     ///< Of event files; empty: OUTPUT/runs.
  std::string run_name, project = "huggingface";

  /// @throws ValueError for another name.
  void validate() const;
};

class Reports {
 public:
  /// @param config  of the run, a JSON object.  @throws ValueError where a tracker needs Python that is not there; IoError.
  Reports(const ReportOptions& options, const std::string& output, const std::string& config);
  ~Reports();
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  /// An entry of log_history.
  void log(const LogRecord& record);

 private:
  class Tracker;

  std::unique_ptr<EventFile> events_;
  std::vector<std::unique_ptr<Tracker>> trackers_;
};

}  // namespace qlorapp::cli
