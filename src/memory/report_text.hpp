// SPDX-License-Identifier: Apache-2.0
/// How plans are written down: numbers, tables, and names of what was planned. For the files of this folder that print.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/memory/roofline.hpp"

namespace qlorapp::report {

using ops::MemoryPhase;
using ops::MemoryUse;

inline std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}
/// What is not a tenth of a GiB has a unit that shows it.
inline std::string gib(Bytes bytes) {
  const double count = static_cast<double>(bytes.count) / (1 << 30);
  return bytes.count != 0 && std::abs(count) < 0.1 ? to_string(bytes) : fixed(count, 2) + " GiB";
}

/// Columns of equal width; the first to the left, the others to the right.
class Table {
 public:
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  [[nodiscard]] std::string text() const {
    std::vector<size_t> widths;
    for (const auto& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string result;
    for (const auto& row : rows_) {
      std::string line = "  ";
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string space(widths[i] - row[i].size(), ' ');
        line += i == 0 || &row[i] == &row.back() ? row[i] + (i + 1 < row.size() ? space + "  " : "") : space + row[i] + "  ";
      }
      while (!line.empty() && line.back() == ' ') line.pop_back();
      result += line + "\n";
    }
    return result;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

inline Bytes part(const MemoryParts& parts, MemoryUse use) { return parts[static_cast<size_t>(use)]; }
inline Bytes parts_of(const MemoryParts& parts, std::initializer_list<MemoryUse> uses) {
  Bytes total;
  for (const MemoryUse use : uses) total += part(parts, use);
  return total;
}

inline std::string name_of(const Gpu& gpu) { return gpu.name.empty() ? "a card of " + gib(gpu.memory) : std::string(gpu.name); }

inline bool rates_are_known(const PlanSettings& settings, const Gpu& gpu) {
  return gpu.tensor_rate > 0 && gpu.bandwidth > 0 && (settings.compute_dtype != at::kFloat || gpu.float32_rate > 0);
}

/// How certain times of this dtype on this card are.
inline std::string evidence_text(Evidence evidence) {
  return message("{}, +-{} %", to_string(evidence), fixed(100 * uncertainty(evidence), 0));
}

inline std::string dtype_name(at::ScalarType dtype) {
  return dtype == at::kHalf ? "float16" : dtype == at::kBFloat16 ? "bfloat16" : "float32";
}

/// "1.8 h", "2.3 min", "41.0 s", "0.13 s".
inline std::string duration(double seconds) {
  return seconds >= 5400  ? fixed(seconds / 3600, 1) + " h"
         : seconds >= 120 ? fixed(seconds / 60, 1) + " min"
                          : fixed(seconds, seconds < 1 ? 2 : 1) + " s";
}

inline double optimizer_step_seconds(const PlanSettings& settings, const Gpu& gpu) {
  const StepTime time = step_time(settings, gpu, static_cast<double>(settings.length));
  return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer;
}

}  // namespace qlorapp::report
