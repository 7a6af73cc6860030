// SPDX-License-Identifier: Apache-2.0
#include "train/answer_file.hpp"

#include <unistd.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "files/growing_file.hpp"
#include "qlorapp/core/error.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

constexpr size_t kMostBytes = size_t{1} << 30;

struct Place {
  int64_t step = 0;
  std::string data;
};

/// Nothing for a line that was not written as a whole.
std::optional<Place> place_of(std::string_view line, const std::string& path) {
  try {
    const format::Json json = format::parse_json(line, path);
    return Place{json.at("step").get<int64_t>(), json.value("data", std::string())};
  } catch (const std::exception&) { return std::nullopt; }
}

}  // namespace

AnswerFile::AnswerFile(const std::string& folder, std::optional<int64_t> resumed_at) : path_(files::path_in(folder, kAnswerFile)) {
  keep(resumed_at.value_or(-1), std::nullopt, "");
}

void AnswerFile::add(int64_t step, std::string_view lines, std::string_view data) {
  if (step <= newest_) keep(step, step, data);
  if (lines.empty()) return;
  files::GrowingFile(path_).append(lines);
  newest_ = step;
}

void AnswerFile::keep(int64_t last, std::optional<int64_t> step, std::string_view data) {
  newest_ = -1;
  if (!files::exists(path_)) return;
  const std::string before = files::FileReader(path_).read_all(kMostBytes);
  std::string kept;
  for (size_t begin = 0; begin < before.size();) {
    const size_t end = before.find('\n', begin);
    if (end == std::string::npos) break;
    const auto line = std::string_view(before).substr(begin, end + 1 - begin);
    begin = end + 1;
    const std::optional<Place> place = place_of(line, path_);
    if (!place || place->step > last || (step && place->step == *step && place->data == data)) continue;
    kept += line;
    newest_ = std::max(newest_, place->step);
  }
  if (kept.size() == before.size()) return;
  if (kept.empty()) {
    ::unlink(path_.c_str());
  } else {
    files::write_file_atomically(path_, kept);
  }
}

}  // namespace qlorapp
