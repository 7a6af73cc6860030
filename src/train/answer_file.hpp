// SPDX-License-Identifier: Apache-2.0
/// eval_answers.jsonl: the answers of each evaluation of a run (docs/formats/run_report.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace qlorapp {

inline constexpr std::string_view kAnswerFile = "eval_answers.jsonl";

/// Each evaluation is appended at once. A run that is resumed or rolled back makes some evaluations again: the file has each of them once.
class AnswerFile {
 public:
  /// @param resumed_at  the step that a run goes on from: lines of later ones go. Unset: a run begins, and all lines go.
  /// @throws IoError
  AnswerFile(const std::string& folder, std::optional<int64_t> resumed_at);

  /// @param lines  whole ones, of this step and this data. They replace those of the same step and data, and of later steps.
  /// @param data   "data" of the lines; empty: they have none.  @throws IoError
  void add(int64_t step, std::string_view lines, std::string_view data = "");

 private:
  /// Keeps the whole lines of steps up to `last`, without those of `step` and `data`.
  void keep(int64_t last, std::optional<int64_t> step, std::string_view data);

  std::string path_;
  int64_t newest_ = -1;  ///< The newest step in the file.
};

}  // namespace qlorapp
