// SPDX-License-Identifier: Apache-2.0
/// Options of a command: Hugging Face names, dashes or underscores, `--config FILE` (JSON or YAML), which the line overrides.
/// Keys of the file that begin with // are comments.
///
/// `--help` shows the options of the groups, or the command's own if there are no groups; `--help-all` shows every accepted
/// name. Types and defaults come from the values.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "format/config_json.hpp"
#include "qlorapp/core/field_table.hpp"
#include "unused_options.hpp"

namespace qlorapp::cli {

/// Thrown by parse() when help was asked for and printed.
struct HelpShown {};

struct ConfigEntry;  // config_file.hpp

namespace detail {

using format::Json;

/// The JSON value that a text on the command line means for a field of this type. A text that does not fit stays a string, so
/// that the field table's own type error names the option.
Json value_of(const std::string& text, const bool*);
Json value_of(const std::string& text, const int64_t*);
Json value_of(const std::string& text, const double*);
Json value_of(const std::string& text, const std::string*);
Json value_of(const std::string& text, const NamesOrPattern*);
Json value_of(const std::string& text, const FreeForm*);
Json value_of(const std::string& text, const std::variant<bool, std::string>*);
template <class Value>
Json value_of(const std::string& text, const std::map<std::string, Value>*) {
  return format::parse_json(text, "the command line");
}

/// A type as help spells it.
inline std::string type_word(const bool*) { return "BOOL"; }
inline std::string type_word(const int64_t*) { return "INT"; }
inline std::string type_word(const double*) { return "NUMBER"; }
inline std::string type_word(const std::string*) { return "TEXT"; }
inline std::string type_word(const NamesOrPattern*) { return "NAMES"; }
inline std::string type_word(const FreeForm*) { return "JSON"; }
inline std::string type_word(const std::variant<bool, std::string>*) { return "TEXT"; }
template <class Value>
std::string type_word(const std::map<std::string, Value>*) {
  return "JSON";
}
template <class Value>
std::string type_word(const std::vector<Value>*) {
  return "LIST";
}
template <class Value>
std::string type_word(const std::optional<Value>*) {
  return type_word(static_cast<const Value*>(nullptr));
}
/// A default as one types it; empty for what is unset.
std::string default_text(const Json& value);

/// An optional switch is one too: alone it means true.
template <class Value>
constexpr bool is_switch = std::is_same_v<Value, bool> || std::is_same_v<Value, std::optional<bool>>;

/// Whether several words on the command line may be its value, as TRL's parser reads them.
inline bool is_list(const NamesOrPattern*) { return true; }
template <class Value>
bool is_list(const Value*) {
  return false;
}
template <class Value>
bool is_list(const std::vector<Value>*) {
  return true;
}
template <class Value>
bool is_list(const std::optional<std::vector<Value>>*) {
  return true;
}

/// The parts, without the spaces around them. Empty ones are left out.
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

/// One name that a command understands.
struct CommandOption {
  std::string name, doc, type, default_text;
  bool is_switch = false, required = false;
  bool is_field = false;      ///< Of a field table.
  bool is_list = false;       ///< Words that follow belong to it, up to the next option.
  bool may_be_alone = false;  ///< On the line without a value, which then is true.
  bool is_repeated = false;   ///< May stand on the line several times; each adds to the list.
  bool is_unused = false, is_refused = false;
  std::string reason = {};  ///< Why it is.
  std::function<void(const format::Json&)> set;
  std::function<format::Json(const std::string&)> parse_text;
};

class CommandLine {
 public:
  /// @param name  "train".  @param needs  what the usage line shows: "--model DIR --data FILE".
  CommandLine(std::string name, std::string needs, std::string summary)
      : name_(std::move(name)), needs_(std::move(needs)), summary_(std::move(summary)) {}

  /// An option of the command itself; its default is the value it has now.
  template <class Value>
  void option(std::string name, Value& into, std::string doc, bool required = false) {
    CommandOption added = described(name, into);
    added.doc = std::move(doc);
    added.required = required;
    added.set = [name, &into](const format::Json& json) {
      QLORAPP_CHECK_VALUE(format::detail::read(json, into), "[{}] must be {}; got {}.", name,
                          format::detail::type_text_for<Value>(json), json.dump());
    };
    options_.push_back(std::move(added));
  }

  /// Texts, commas and all: the option is given once for each, or with a list of JSON.
  void texts(const std::string& name, std::vector<std::string>& into, std::string doc);

  /// Every field of a config with a field table, under its own name and its aliases. The defaults are the values it has now. A field
  /// whose name is an alias already (see alias()), or an option, is left out.
  template <class Config>
  void fields(Config& config) {
    for_each_field<Config>([&](const auto& field) {
      const std::string field_name(field.name);
      if (is_alias(field_name) || has_option(field_name)) return;
      CommandOption added = described(field_name, config.*field.member);
      added.doc = field.doc;
      added.is_field = true;
      added.set = [&config, field_name, this](const format::Json& json) {
        format::Json all = format::to_json(config);
        all[field_name] = json;
        format::from_json(all, config, name_);
      };
      options_.push_back(std::move(added));
    });
    for (const Alias& alias : Config::aliases()) aliases_.push_back(alias);
  }

  /// Another name of an option. Call it before fields() for the name of a field that the command has an option of its own for.
  void alias(std::string_view other, std::string_view name) { aliases_.push_back({other, name}); }

  /// A heading of help with these options below it.
  void group(std::string title, std::vector<std::string> names) { groups_.push_back({std::move(title), std::move(names)}); }
  /// Names that are understood and not used: parse() refuses those that are to be refused, and warns about the others. Options of the command
  /// are left out.
  void unused(std::span<const UnusedOption> options);

  /// Sets what was given. @throws ValueError naming the option: unknown (with the nearest name), twice, without a value, of
  /// another type, missing; FormatError for the config file. HelpShown.
  void parse(const std::vector<std::string>& arguments);
  /// A file for --config: the required options, and every other one of the groups behind "# " with its default.
  /// @param without  options whose default is that they are not given.
  [[nodiscard]] std::string config_template(const std::set<std::string>& without) const;
  /// Whether an option was given, on the line or in the config file.
  [[nodiscard]] bool given(std::string_view name) const { return given_.contains(std::string(name)); }
  /// The names of all that were given.
  [[nodiscard]] std::set<std::string> given() const;

 private:
  struct Group {
    std::string title;
    std::vector<std::string> names;
  };
  template <class Value>
  static CommandOption described(const std::string& name, const Value& value) {
    CommandOption option;
    option.name = name;
    option.type = detail::type_word(&value);
    option.default_text = detail::default_text(format::detail::write(value));
    option.is_switch = detail::is_switch<Value>;
    option.is_list = detail::is_list(&value);
    option.parse_text = [](const std::string& text) { return detail::value_of(text, static_cast<const Value*>(nullptr)); };
    return option;
  }
  [[nodiscard]] bool is_alias(std::string_view name) const;
  [[nodiscard]] bool has_option(std::string_view name) const;
  /// The option of this name or alias; nullptr if there is none.
  [[nodiscard]] CommandOption* find_known(std::string_view name);
  /// The same; warns about an older name. @throws ValueError with the nearest name.
  [[nodiscard]] CommandOption& find(std::string_view name);
  /// " It is --learning_rate here.", " Did you mean …?" or nothing.
  [[nodiscard]] std::string suggestion(std::string_view name);
  /// Values given on the line, by option; `spelled` collects the names used.
  [[nodiscard]] std::map<std::string, format::Json> read_line(const std::vector<std::string>& words);
  [[nodiscard]] std::map<std::string, format::Json> read_config(const std::string& file);
  /// @throws ValueError for `first`, which is no option, naming its place and the other keys that are none.
  void refuse_keys(const std::vector<ConfigEntry>& entries, const ConfigEntry& first);
  /// @param all  options without effect and refused ones too, with whole texts.
  void print_help(bool all);

  std::string name_, needs_, summary_;
  std::deque<CommandOption> options_;
  std::vector<Alias> aliases_;
  std::vector<Group> groups_;
  std::map<std::string, format::Json> given_;
};

}  // namespace qlorapp::cli
