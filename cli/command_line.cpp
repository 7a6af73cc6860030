// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/nearest_name.hpp"

namespace qlorapp::cli {
namespace detail {

Json value_of(const std::string& text, const bool*) {
  for (const char* yes : {"true", "True", "1", "yes", "on"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "False", "0", "no", "off"}) {
    if (text == no) return false;
  }
  return text;
}

template <class Number>
Json number_of(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() ? Json(value) : Json(text);
}
Json value_of(const std::string& text, const int64_t*) {
  const Json whole = number_of<int64_t>(text);
  return whole.is_number() ? whole : number_of<double>(text);  // 1e3 is a whole number too
}
Json value_of(const std::string& text, const double*) { return number_of<double>(text); }
Json value_of(const std::string& text, const std::string*) { return text; }

/// "a,b" and ["a", "b"] are lists of names; what else holds a character that only expressions have is one expression;
/// "all-linear" is a word.
Json value_of(const std::string& text, const NamesOrPattern*) {
  if (std::optional<Json> list = json_list(text)) return *std::move(list);
  if (text == "all-linear" || text.find_first_of("*+?()[]{}|^$\\") != std::string::npos) return text;
  return split_at_commas(text);
}
Json value_of(const std::string& text, const std::variant<bool, std::string>*) {
  return text == "true" || text == "false" ? Json(text == "true") : Json(text);
}

std::optional<Json> json_list(const std::string& text) {
  if (!text.starts_with('[')) return std::nullopt;
  try {
    Json list = format::parse_json(text, "the command line");
    if (list.is_array()) return list;
  } catch (const FormatError&) {  // an expression may begin with a bracket too: [qv]_proj
  }
  return std::nullopt;
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace detail

void CommandLine::add(const std::string& name, const std::string& doc, bool is_switch, bool required,
                      std::function<void(const format::Json&)> set, std::function<format::Json(const std::string&)> parse_text) {
  options_.push_back({name, doc, is_switch, required, std::move(set), std::move(parse_text)});
}

CommandLine::Option& CommandLine::find(std::string_view name) {
  for (const auto& [alias, full] : aliases_) {
    if (alias == name) return find(full);
  }
  std::vector<std::string_view> known{"config"};
  for (Option& option : options_) {
    if (option.name == name) return option;
    known.push_back(option.name);
  }
  throw ValueError(
      concat("[", name_, "] there is no option '--", name, "'.", did_you_mean(name, known), " See qlorapp ", name_, " --help."));
}

void CommandLine::print_help() const {
  std::printf("usage: qlorapp %s [--config FILE.json] [options]\n%s\n\n", name_.c_str(), summary_.c_str());
  for (const bool required : {true, false}) {
    for (const Option& option : options_) {
      if (option.required != required) continue;
      std::printf("  --%-32s %s%s\n", option.name.c_str(), option.doc.c_str(), required ? " (required)" : "");
    }
  }
}

void CommandLine::parse(const std::vector<std::string>& arguments) {
  // CLI11 splits the line; names are looked up here, because a misspelt one is to be answered with its neighbor.
  CLI::App app;
  app.set_help_flag();
  bool help = false;
  std::string config_file;
  app.add_flag("--help", help);
  app.add_option("--config", config_file);
  app.allow_extras();
  std::vector<std::string> reversed;
  for (const std::string& argument : arguments) {
    std::string spelled = argument == "-h" ? "--help" : argument;  // no short options: "-hello" may be a prompt
    if (spelled.starts_with("--")) {                               // dashes and underscores are the same in a name, not in a value
      const size_t end = std::min(spelled.find('='), spelled.size());
      std::replace(spelled.begin() + 2, spelled.begin() + static_cast<std::ptrdiff_t>(end), '-', '_');
    }
    reversed.insert(reversed.begin(), std::move(spelled));
  }
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    throw ValueError(concat("[", name_, "] ", error.what(), ". See qlorapp ", name_, " --help."));
  }
  if (help) {
    print_help();
    throw HelpShown{};
  }

  std::map<std::string, format::Json> on_line;
  const std::vector<std::string> rest = app.remaining();
  for (size_t i = 0; i < rest.size(); ++i) {
    QLORAPP_CHECK_VALUE(rest[i].starts_with("--"), "[", name_, "] '", rest[i],
                        "' is no option; options begin with --. See qlorapp ", name_, " --help.");
    const size_t equals = rest[i].find('=');
    const std::string name = rest[i].substr(2, equals == std::string::npos ? std::string::npos : equals - 2);
    const Option& option = find(name);
    std::string text;
    if (equals != std::string::npos) {
      text = rest[i].substr(equals + 1);
    } else if (i + 1 < rest.size() && !rest[i + 1].starts_with("--")) {
      text = rest[++i];
    } else {
      const bool alone = option.is_switch || option.name == "resume_from_checkpoint";
      QLORAPP_CHECK_VALUE(alone, "[", name_, "] --", name, " needs a value.");
      text = "true";
    }
    format::Json value;
    try {
      value = option.parse_text(text);
    } catch (const FormatError& error) {
      throw ValueError(concat("[", name_, "] --", name, " must be JSON; got '", text, "': ", error.what()));
    }
    QLORAPP_CHECK_VALUE(on_line.emplace(option.name, std::move(value)).second, "[", name_, "] --", option.name, " is given twice.");
  }
  if (!config_file.empty()) {
    const format::Json json = format::read_json_file(config_file);
    QLORAPP_CHECK_FORMAT(json.is_object(), "[", name_, "] ", config_file, " must hold an object of options.");
    for (const auto& [key, value] : json.items()) given_[find(key).name] = value;
  }
  for (auto& [name, value] : on_line) given_[name] = std::move(value);
  for (const auto& [name, value] : given_) find(name).set(value);
  for (const Option& option : options_) {
    QLORAPP_CHECK_VALUE(!option.required || given(option.name), "[", name_, "] --", option.name, " is needed: ", option.doc, ".");
  }
}

}  // namespace qlorapp::cli
