// SPDX-License-Identifier: Apache-2.0
/// JSON from and to any config that has a field table (core/field_table.hpp).
///
/// One key per field, in the order of the table. Reading is strict: an unknown key is an error that suggests the nearest, a value
/// of another type is an error that names the key, the wanted type and the value, and a key given under two spellings is an
/// error. Keys that are absent keep their value, so several sources can be laid over each
/// other. A number without a fraction is an integer whatever its spelling (1e3), and one value stands for a list of one.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "core/printable.hpp"
#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/core/names_or_pattern.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

template <class Config>
concept HasFieldTable = requires {
  Config::fields();
};

/// Logs once that a name is older, and its present name.
inline void say_older_name(std::string_view where, std::string_view alias, std::string_view name) {
  log_warning_once(message("[{}] {} is now called {}; both names work.", where, alias, name));
}

namespace detail {

inline std::string wanted(const bool*) { return "true or false"; }
inline std::string wanted(const int64_t*) { return "an integer"; }
inline std::string wanted(const double*) { return "a number"; }
inline std::string wanted(const std::string*) { return "a string"; }
inline std::string wanted(const FreeForm*) { return "any JSON value"; }
inline std::string wanted(const NamesOrPattern*) { return "a string or a list of strings"; }
template <class Value>
std::string wanted(const std::vector<Value>*);
template <class Value>
std::string wanted(const std::map<std::string, Value>*);
template <class Value>
std::string wanted(const std::optional<Value>*);
template <class... Values>
std::string wanted(const std::variant<Values...>*);

template <class Value>
std::string type_text() {
  return wanted(static_cast<const Value*>(nullptr));
}
template <class Value>
std::string wanted(const std::vector<Value>*) {
  return message("a list, each entry {}", type_text<Value>());
}
template <class Value>
std::string wanted(const std::map<std::string, Value>*) {
  return message("an object, each value {}", type_text<Value>());
}
template <class Value>
std::string wanted(const std::optional<Value>*) {
  return message("{}, or null", type_text<Value>());
}
template <class... Values>
std::string wanted(const std::variant<Values...>*) {
  std::string text;
  ((text += (text.empty() ? "" : " or ") + type_text<Values>()), ...);
  return text;
}

/// Doubles below it that are whole are exact.
constexpr double kLargestWhole = 9e15;

/// type_text() for an error about `json`. For a number too large for read() it names the limit, since the number may look like an integer.
template <class Value>
std::string type_text_for(const Json& json) {
  const double number = json.is_number() ? json.get<double>() : 0.0;
  const bool is_large = std::abs(number) >= kLargestWhole && (json.is_number_float() || json.is_number_unsigned());
  return std::is_same_v<Value, int64_t> && is_large ? "an integer in digits, below 2^63" : type_text<Value>();
}

// read(json, into): false if the type does not fit; `into` may then hold part of it and is not used.
inline bool read(const Json& json, bool& into) {
  if (!json.is_boolean()) return false;
  into = json.get<bool>();
  return true;
}
inline bool read(const Json& json, int64_t& into) {
  if (json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
  if (json.is_number_float()) {
    const auto value = json.get<double>();
    if (!(std::abs(value) < kLargestWhole) || static_cast<double>(static_cast<int64_t>(value)) != value) return false;
    into = static_cast<int64_t>(value);
    return true;
  }
  if (!json.is_number_integer()) return false;
  into = json.get<int64_t>();
  return true;
}
inline bool read(const Json& json, double& into) {
  if (!json.is_number()) return false;
  into = json.get<double>();
  return true;
}
inline bool read(const Json& json, std::string& into) {
  if (!json.is_string()) return false;
  into = json.get<std::string>();
  return true;
}
inline bool read(const Json& json, FreeForm& into) {
  into.json = json.dump();
  return true;
}
template <class Value>
bool read(const Json& json, std::vector<Value>& into);
template <class Value>
bool read(const Json& json, std::map<std::string, Value>& into);
template <class Value>
bool read(const Json& json, std::optional<Value>& into);
template <class... Values>
bool read(const Json& json, std::variant<Values...>& into);

inline bool read(const Json& json, NamesOrPattern& into) {
  into = NamesOrPattern();
  if (json.is_null()) return true;
  if (json.is_string()) {
    into.pattern = json.get<std::string>();
    return true;
  }
  return json.is_array() && read(json, into.names);
}
template <class Value>
bool read(const Json& json, std::vector<Value>& into) {
  into.clear();
  if (!json.is_array()) {
    Value one{};
    if (!read(json, one)) return false;
    into.push_back(std::move(one));
    return true;
  }
  for (const Json& entry : json) {
    Value value{};
    if (!read(entry, value)) return false;
    into.push_back(std::move(value));
  }
  return true;
}
template <class Value>
bool read(const Json& json, std::map<std::string, Value>& into) {
  into.clear();
  if (!json.is_object()) return false;
  for (const auto& [key, entry] : json.items()) {
    Value value{};
    if (!read(entry, value)) return false;
    into.emplace(key, std::move(value));
  }
  return true;
}
template <class Value>
bool read(const Json& json, std::optional<Value>& into) {
  into.reset();
  return json.is_null() || read(json, into.emplace());
}
template <class... Values>
bool read(const Json& json, std::variant<Values...>& into) {
  const auto try_as = [&]<class Value>(Value value) {
    if (!read(json, value)) return false;
    into = std::move(value);
    return true;
  };
  return (try_as(Values{}) || ...);
}

template <class Value>
Json write(const Value& value) {
  return Json(value);
}
inline Json write(const FreeForm& value) { return parse_json(value.json, "an option"); }
inline Json write(const NamesOrPattern& value) {
  return value.pattern ? Json(*value.pattern) : value.names.empty() ? Json(nullptr) : Json(value.names);
}
template <class Value>
Json write(const std::map<std::string, Value>& value) {
  Json json = Json::object();
  for (const auto& [key, entry] : value) json[key] = entry;
  return json;
}
template <class Value>
Json write(const std::optional<Value>& value) {
  return value ? write(*value) : Json(nullptr);
}
template <class... Values>
Json write(const std::variant<Values...>& value) {
  return std::visit([](const auto& held) { return write(held); }, value);
}

/// The field's own spelling of a key; the key itself if it is no alias.
template <HasFieldTable Config>
std::string_view canonical_name(std::string_view key) {
  if constexpr (requires { Config::aliases(); }) {
    for (const Alias& alias : Config::aliases()) {
      if (alias.alias == key) return alias.name;
    }
  }
  return key;
}

}  // namespace detail

/// @returns an object with every field, in the order of the table; unset fields are null.
template <HasFieldTable Config>
[[nodiscard]] Json to_json(const Config& config) {
  Json json = Json::object();
  for_each_field<Config>([&](const auto& field) { json[std::string(field.name)] = detail::write(config.*field.member); });
  return json;
}

/// Lays the keys of `json` over `config`. Older spellings are understood where the config has aliases(). All or nothing: on an
/// error `config` is unchanged.
/// @param where  Names the source in errors: a path, or the command line.
/// @throws ValueError for an unknown key or one given twice, TypeError for a value of another type or no object at all.
template <HasFieldTable Config>
void from_json(const Json& json, Config& config, std::string_view where) {
  QLORAPP_CHECK_TYPE(json.is_object(), "[{}] must be an object of options; got {}.", where, json.type_name());
  Config result = config;
  std::map<std::string_view, std::string> given;  // field → the spelling that was used
  for (const auto& [key, value] : json.items()) {
    const std::string_view name = detail::canonical_name<Config>(key);
    const auto [earlier, first_time] = given.emplace(name, key);
    QLORAPP_CHECK_VALUE(first_time, "[{}] '{}' and '{}' are the same option. Give one of them.", where, earlier->second, key);
    bool known = false;
    for_each_field<Config>([&](const auto& field) {
      if (field.name != name) return;
      known = true;
      auto& member = result.*field.member;
      QLORAPP_CHECK_TYPE(detail::read(value, member), "[{}] '{}' must be {}; got {} {}.", where, key,
                         detail::type_text_for<std::remove_cvref_t<decltype(member)>>(value), value.type_name(),
                         printable(value.dump(-1, ' ', true, Json::error_handler_t::replace), 60));
    });
    if constexpr (requires { Config::aliases(); }) {
      for (const Alias& alias : Config::aliases()) {
        if (alias.older && alias.alias == key) say_older_name(where, alias.alias, alias.name);
      }
    }
    if (!known) {
      constexpr auto names = field_names<Config>();
      throw ValueError(message("[{}] unknown option {}.{}", where, printable(key), did_you_mean(key, names)));
    }
  }
  config = std::move(result);
}

}  // namespace qlorapp::format
