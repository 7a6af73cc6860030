// SPDX-License-Identifier: Apache-2.0
/// Options of a command: Hugging Face names, dashes or underscores, `--config file.json` below what stands on the line.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/field_table.hpp"
#include "qlorapp/format/config_json.hpp"

namespace qlorapp::cli {

/// Thrown by parse() when help was asked for and printed.
struct HelpShown {};

namespace detail {

using format::Json;

/// The JSON value that a text on the command line means for a field of this type. A text that does not fit stays a string, so
/// that the field table's own type error names the option.
Json value_of(const std::string& text, const bool*);
Json value_of(const std::string& text, const int64_t*);
Json value_of(const std::string& text, const double*);
Json value_of(const std::string& text, const std::string*);
Json value_of(const std::string& text, const NamesOrPattern*);
Json value_of(const std::string& text, const std::variant<bool, std::string>*);
template <class Value>
Json value_of(const std::string& text, const std::map<std::string, Value>*) {
  return format::parse_json(text, "the command line");
}
std::vector<std::string> split_at_commas(const std::string& text);
/// The list that a text like ["a", "b"] is, if it is one.
std::optional<Json> json_list(const std::string& text);
template <class Value>
Json value_of(const std::string& text, const std::vector<Value>*) {
  if (std::optional<Json> written = json_list(text)) return *std::move(written);
  Json list = Json::array();
  for (const std::string& part : split_at_commas(text)) list.push_back(value_of(part, static_cast<const Value*>(nullptr)));
  return list;
}
template <class Value>
Json value_of(const std::string& text, const std::optional<Value>*) {
  if (text == "none" || text == "None" || text == "null") return nullptr;
  return value_of(text, static_cast<const Value*>(nullptr));
}

}  // namespace detail

class CommandLine {
 public:
  /// @param name  "train".  @param summary  what --help says first.
  CommandLine(std::string name, std::string summary) : name_(std::move(name)), summary_(std::move(summary)) {}

  /// An option of the command itself; its default is the value it has now.
  template <class Value>
  void option(std::string name, Value& into, std::string doc, bool required = false) {
    add(
        name, doc, std::is_same_v<Value, bool>, required,
        [name, &into](const format::Json& json) {
          QLORAPP_CHECK_VALUE(format::detail::read(json, into), "[", name, "] must be ", format::detail::type_text<Value>(),
                              "; got ", json.dump(), ".");
        },
        [](const std::string& text) { return detail::value_of(text, static_cast<const Value*>(nullptr)); });
  }

  /// Every field of a config with a field table, under its own name and its aliases.
  template <class Config>
  void fields(Config& config) {
    for_each_field<Config>([&](const auto& field) {
      using Value = std::remove_cvref_t<decltype(config.*field.member)>;
      const std::string field_name(field.name);
      std::string doc(field.doc);
      if (!field.reason.empty()) {
        doc += concat(doc.empty() ? "" : " ", field.status == FieldStatus::kRefused ? "(refused: " : "(no effect: ", field.reason,
                      ")");
      }
      add(
          field_name, doc, std::is_same_v<Value, bool>, false,
          [&config, field_name, this](const format::Json& json) {
            format::Json all = format::to_json(config);
            all[field_name] = json;
            format::from_json(all, config, name_);
          },
          [](const std::string& text) { return detail::value_of(text, static_cast<const Value*>(nullptr)); });
    });
    for (const Alias& alias : Config::aliases()) aliases_.emplace_back(alias.alias, alias.name);
  }

  /// Sets what was given. @throws ValueError naming the option: unknown (with the nearest name), twice, without a value, of
  /// another type, missing; FormatError for the config file. HelpShown.
  void parse(const std::vector<std::string>& arguments);
  /// Whether an option was given, on the line or in the config file.
  [[nodiscard]] bool given(std::string_view name) const { return given_.contains(std::string(name)); }

 private:
  struct Option {
    std::string name, doc;
    bool is_switch = false, required = false;
    std::function<void(const format::Json&)> set;
    std::function<format::Json(const std::string&)> parse_text;
  };
  void add(const std::string& name, const std::string& doc, bool is_switch, bool required,
           std::function<void(const format::Json&)> set, std::function<format::Json(const std::string&)> parse_text);
  [[nodiscard]] Option& find(std::string_view name);
  void print_help() const;

  std::string name_, summary_;
  std::deque<Option> options_;
  std::vector<std::pair<std::string, std::string>> aliases_;
  std::map<std::string, format::Json> given_;
};

}  // namespace qlorapp::cli
