// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/log_history.hpp"

#include <array>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "qlorapp/core/check.hpp"

namespace qlorapp {

bool LogRecord::contains(std::string_view key) const {
  for (const auto& [name, value] : values_) {
    if (name == key) return true;
  }
  return false;
}

double LogRecord::number(std::string_view key) const {
  for (const auto& [name, value] : values_) {
    if (name == key) return std::visit([](auto v) { return static_cast<double>(v); }, value);
  }
  throw ValueError(concat("[log] there is no '", key, "' in this record."));
}

format::Json LogRecord::to_json() const {
  format::Json json = format::Json::object();
  for (const auto& [name, value] : values_) {
    std::visit([&, &key = name](auto v) { json[key] = v; }, value);
  }
  return json;
}

LogRecord LogRecord::from_json(const format::Json& json, std::string_view where) {
  LogRecord record;
  for (const auto& [key, value] : json.items()) {
    QLORAPP_CHECK_FORMAT(value.is_number(), "[log] ", where, ": '", key, "' in log_history must be a number; got ",
                         value.type_name(), ".");
    if (value.is_number_integer()) {
      record.set(key, value.get<int64_t>());
    } else {
      record.set(key, value.get<double>());
    }
  }
  return record;
}

std::string LogRecord::to_line() const {
  std::string line = "{";
  for (const auto& [name, value] : values_) {
    if (line.size() > 1) line += ", ";
    std::array<char, 32> buffer{};
    if (const auto* real = std::get_if<double>(&value)) {
      std::snprintf(buffer.data(), buffer.size(), "%.4g", *real);
    } else {
      std::snprintf(buffer.data(), buffer.size(), "%lld", static_cast<long long>(std::get<int64_t>(value)));
    }
    line += concat("'", name, "': ", std::string_view(buffer.data()));
  }
  return line + "}";
}

}  // namespace qlorapp
