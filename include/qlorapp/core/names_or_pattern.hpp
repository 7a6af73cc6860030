// SPDX-License-Identifier: Apache-2.0
/// The modules that a setting covers: a list of names, one pattern, or unset.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace qlorapp {

/// PEFT has one key for both: in JSON and Python a list means names, a string a pattern, null (None) nothing.
struct NamesOrPattern {
  std::vector<std::string> names;      ///< Empty when there is a pattern.
  std::optional<std::string> pattern;  ///< A regular expression, or a word that the setting defines ("all-linear").

  NamesOrPattern() = default;
  NamesOrPattern(std::initializer_list<std::string> list) : names(list) {}
  NamesOrPattern(std::vector<std::string> list) : names(std::move(list)) {}
  NamesOrPattern(std::string text) : pattern(std::move(text)) {}
  NamesOrPattern(const char* text) : pattern(text) {}

  /// Neither names nor a pattern.
  [[nodiscard]] bool empty() const { return names.empty() && !pattern; }
  friend bool operator==(const NamesOrPattern&, const NamesOrPattern&) = default;
};

}  // namespace qlorapp
