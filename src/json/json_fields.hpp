// SPDX-License-Identifier: Apache-2.0
/// Takes the fields of a JSON object one by one and names the one that is wrong.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

/// A JSON value in an error message: short, on one line, printable.
inline std::string shown(const Json& value) {
  const std::string text = printable(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  return text.substr(1, text.size() - 2);
}

/// Keys in one line of a message; a hostile file may have a million.
inline std::string listed(const std::vector<std::string>& keys) {
  constexpr size_t kMost = 10;
  std::string text;
  for (size_t i = 0; i < keys.size() && i < kMost; ++i) text += (i == 0 ? "" : ", ") + printable(keys[i]);
  return keys.size() > kMost ? message("{} and {} more", text, keys.size() - kMost) : text;
}

/// Every getter marks its key as taken; an absent key and null are the same (std::nullopt), as they are for transformers.
class JsonFields {
 public:
  /// @param where   The file, for messages.  @param prefix  What stands before a key in messages, e.g. "rope_parameters.".
  JsonFields(const Json& object, std::string where, std::string prefix = "")
      : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {
    QLORAPP_CHECK_FORMAT(object.is_object(), "[{}] {} must be a JSON object; got {}. Check the file.", where_,
                         prefix_.empty() ? "the file" : prefix_.substr(0, prefix_.size() - 1), shown(object));
  }

  [[nodiscard]] const std::string& where() const { return where_; }

  /// @returns the value, or nullptr if absent or null.
  const Json* value(std::string_view key) {
    taken_.emplace(key);
    const auto found = object_.find(std::string(key));
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::optional<int64_t> integer(std::string_view key, int64_t least, int64_t most) {
    const Json* found = value(key);
    if (found == nullptr) return std::nullopt;
    if (!found->is_number_integer() || found->get<int64_t>() < least || found->get<int64_t>() > most) {
      fail(key, message("must be an integer from {} to {}", least, most), *found);
    }
    return found->get<int64_t>();
  }
  int64_t required_integer(std::string_view key, int64_t least, int64_t most) { return required(key, integer(key, least, most)); }

  /// Finite; an integer counts as a number, a boolean does not.
  std::optional<double> number(std::string_view key) {
    const Json* found = value(key);
    if (found == nullptr) return std::nullopt;
    if (!found->is_number() || !std::isfinite(found->get<double>())) fail(key, "must be a finite number", *found);
    return found->get<double>();
  }
  double required_number(std::string_view key) { return required(key, number(key)); }

  std::optional<bool> boolean(std::string_view key) {
    const Json* found = value(key);
    if (found == nullptr) return std::nullopt;
    if (!found->is_boolean()) fail(key, "must be true or false", *found);
    return found->get<bool>();
  }

  std::optional<std::string> text(std::string_view key) {
    const Json* found = value(key);
    if (found == nullptr) return std::nullopt;
    if (!found->is_string()) fail(key, "must be a string", *found);
    return found->get<std::string>();
  }
  std::string required_text(std::string_view key) { return required(key, text(key)); }

  std::optional<std::vector<std::string>> texts(std::string_view key) {
    const Json* found = value(key);
    if (found == nullptr) return std::nullopt;
    bool all = found->is_array();
    for (size_t i = 0; all && i < found->size(); ++i) all = (*found)[i].is_string();
    if (!all) fail(key, "must be a list of strings", *found);
    return found->get<std::vector<std::string>>();
  }

  /// The keys that no getter asked for, in the order of the file.
  [[nodiscard]] std::vector<std::string> remaining() const {
    std::vector<std::string> keys;
    for (const auto& [key, ignored] : object_.items()) {
      if (!taken_.contains(key)) keys.push_back(key);
    }
    return keys;
  }

  [[noreturn]] void fail(std::string_view key, std::string_view rule, const Json& got,
                         std::string_view advice = "Check the file.") const {
    throw FormatError(message("[{}] {}{} {}; got {}. {}", where_, prefix_, key, rule, shown(got), advice));
  }

  template <class Value>
  Value required(std::string_view key, std::optional<Value>&& found) const {
    QLORAPP_CHECK_FORMAT(found.has_value(), "[{}] {}{} is required; it is missing. Check the file.", where_, prefix_, key);
    return *std::move(found);
  }

 private:
  const Json& object_;
  std::string where_, prefix_;
  std::set<std::string, std::less<>> taken_;
};

}  // namespace qlorapp::format
