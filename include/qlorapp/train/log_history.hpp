// SPDX-License-Identifier: Apache-2.0
/// The logged lines of a run, in order, with transformers' keys.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "qlorapp/json/json.hpp"

namespace qlorapp {

/// Strings come from users' own logs only.
using LogValue = std::variant<int64_t, double, std::string>;

/// One entry: loss, grad_norm, learning_rate, epoch, step; or eval_loss …; or train_runtime ….
class LogRecord {
 public:
  void set(std::string_view key, double value) { values_.emplace_back(key, value); }
  void set(std::string_view key, int64_t value) { values_.emplace_back(key, value); }
  void set(std::string_view key, std::string value) { values_.emplace_back(key, std::move(value)); }
  /// Appends those of another record.
  void append(const LogRecord& other) { values_.insert(values_.end(), other.values_.begin(), other.values_.end()); }
  [[nodiscard]] const std::vector<std::pair<std::string, LogValue>>& values() const { return values_; }
  /// @throws ValueError if there is no such key, or it holds a string.
  [[nodiscard]] double number(std::string_view key) const;
  /// Whether there is such a key.
  [[nodiscard]] bool contains(std::string_view key) const;

  /// NaN and infinities are written as Python's json writes them, so that a diverged run can still be read.
  [[nodiscard]] format::Json to_json() const;
  /// @throws FormatError naming the key whose value is neither number nor string.
  [[nodiscard]] static LogRecord from_json(const format::Json& json, std::string_view where);

  /// "{'loss': 1.2345, 'grad_norm': 0.5, …}", numbers to four significant digits.
  [[nodiscard]] std::string to_line() const;

 private:
  std::vector<std::pair<std::string, LogValue>> values_;
};

/// The entries of a run, as the text that trainer_state.json has. One string grows: small pieces that stay, between the large ones
/// that a step frees, would make the heap grow with every entry, and a save would build a tree of all of them.
class LogHistory {
 public:
  void push_back(const LogRecord& record);
  /// Entries that are indented as in `"log_history": […]`, with commas between them.
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] bool empty() const { return text_.empty(); }
  void clear() { text_.clear(); }

 private:
  std::string text_;
};

}  // namespace qlorapp
