// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/log_history.hpp"

#include <array>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "json/python_json.hpp"

namespace qlorapp {

bool LogRecord::contains(std::string_view key) const {
  for (const auto& [name, value] : values_) {
    if (name == key) return true;
  }
  return false;
}

double LogRecord::number(std::string_view key) const {
  for (const auto& [name, value] : values_) {
    if (name != key) continue;
    if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
    if (const auto* real = std::get_if<double>(&value)) return *real;
    throw ValueError(message("[log] '{}' is not a number.", key));
  }
  throw ValueError(message("[log] there is no '{}' in this record.", key));
}

format::Json LogRecord::to_json() const {
  format::Json json = format::Json::object();
  for (const auto& [name, value] : values_) {
    std::visit([&, &key = name](const auto& v) { json[key] = v; }, value);
  }
  return json;
}

LogRecord LogRecord::from_json(const format::Json& json, std::string_view where) {
  QLORAPP_CHECK_FORMAT(json.is_object(), "[log] {}: an entry of log_history must be an object; got {}.", where, json.type_name());
  LogRecord record;
  for (const auto& [key, value] : json.items()) {
    QLORAPP_CHECK_FORMAT(value.is_number() || value.is_string(),
                         "[log] {}: '{}' in log_history must be a number or a string; got {}.", where, key, value.type_name());
    if (value.is_string()) {
      record.set(key, value.get<std::string>());
    } else if (value.is_number_integer()) {
      record.set(key, value.get<int64_t>());
    } else {
      record.set(key, value.get<double>());
    }
  }
  return record;
}

void LogHistory::push_back(const LogRecord& record) {
  if (!empty()) text_ += ',';
  for (const char c : "\n" + format::dump_python_json(record.to_json(), format::kConfigStyle)) {
    text_ += c;
    if (c == '\n') text_ += "    ";  // no string of JSON holds a line feed
  }
}

std::string LogRecord::to_line() const {
  std::string line = "{";
  for (const auto& [name, value] : values_) {
    if (line.size() > 1) line += ", ";
    std::array<char, 32> buffer{};
    if (const auto* text = std::get_if<std::string>(&value)) {
      line += message("'{}': '{}'", name, *text);
      continue;
    }
    if (const auto* real = std::get_if<double>(&value)) {
      std::snprintf(buffer.data(), buffer.size(), "%.4g", *real);
    } else {
      std::snprintf(buffer.data(), buffer.size(), "%lld", static_cast<long long>(std::get<int64_t>(value)));
    }
    line += message("'{}': {}", name, std::string_view(buffer.data()));
  }
  return line + "}";
}

}  // namespace qlorapp
