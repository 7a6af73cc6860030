// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>

#include "config_file.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "core/printable.hpp"
#include "other_names.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::cli {
namespace {

/// Whether a word can be one of several names or numbers; an expression or JSON is alone.
bool is_name(std::string_view word) { return word.find_first_of("*+?()[]{}|^$\\\"") == std::string_view::npos; }

}  // namespace

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

/// "a,b" and ["a", "b"] are lists of names; other text with a character that only expressions have is one expression;
/// "all-linear" is a word.
Json value_of(const std::string& text, const NamesOrPattern*) {
  if (std::optional<Json> list = json_list(text)) return *std::move(list);
  if (text == "all-linear" || !is_name(text)) return text;
  return split_at_commas(text);
}
/// JSON where it is some, nothing for none, else a word.
Json value_of(const std::string& text, const FreeForm*) {
  if (text == "none" || text == "None" || text == "null") return nullptr;
  return text.starts_with('{') || text.starts_with('[') ? format::parse_json(text, "the command line") : Json(text);
}
Json value_of(const std::string& text, const std::variant<bool, std::string>*) {
  return text == "true" || text == "false" ? Json(text == "true") : Json(text);
}

std::string default_text(const Json& value) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump() == "{}" ? "" : value.dump();
  std::string text;
  for (const Json& entry : value) text += (text.empty() ? "" : ",") + default_text(entry);
  return text;
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
    const size_t first = text.find_first_not_of(" \t\n", begin);
    if (first < end) parts.push_back(text.substr(first, text.find_last_not_of(" \t\n", end - 1) + 1 - first));
    begin = end + 1;
  }
  return parts;
}

}  // namespace detail

bool CommandLine::is_alias(std::string_view name) const {
  return std::any_of(aliases_.begin(), aliases_.end(), [&](const Alias& alias) { return alias.alias == name; });
}

CommandOption* CommandLine::find_known(std::string_view name) {
  for (const Alias& alias : aliases_) {
    if (alias.alias == name) return find_known(alias.name);
  }
  for (CommandOption& option : options_) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

CommandOption& CommandLine::find(std::string_view name) {
  for (const Alias& alias : aliases_) {
    if (alias.alias == name && alias.older) format::say_older_name(name_, alias.alias, alias.name);
  }
  if (CommandOption* const option = find_known(name)) return *option;
  throw ValueError(message("[{}] there is no option '--{}'.{} See qlorapp {} --help-all.", name_, name, suggestion(name), name_));
}

std::string CommandLine::suggestion(std::string_view name) {
  for (const OtherName& other : other_names()) {
    if (other.theirs != name) continue;
    if (!other.advice.empty()) return message(" {}", other.advice);
    if (find_known(other.ours) != nullptr) return message(" It is --{} here.", other.ours);
  }
  constexpr size_t kTooShort = 2;  // nearly any name is as near to one of two letters
  std::vector<std::string_view> known{"config"};
  for (const CommandOption& option : options_) {
    if (option.name.size() > kTooShort) known.push_back(option.name);
  }
  for (const Alias& alias : aliases_) known.push_back(alias.alias);
  return name.size() > kTooShort ? did_you_mean(name, known) : std::string();
}

std::set<std::string> CommandLine::given() const {
  std::set<std::string> names;
  for (const auto& [name, value] : given_) names.insert(name);
  return names;
}

bool CommandLine::has_option(std::string_view name) const {
  return std::any_of(options_.begin(), options_.end(), [&](const CommandOption& option) { return option.name == name; });
}

void CommandLine::texts(const std::string& name, std::vector<std::string>& into, std::string doc) {
  option(name, into, std::move(doc));
  CommandOption& added = options_.back();
  added.type = "TEXT";
  added.is_list = false;
  added.is_repeated = true;
  added.parse_text = [](const std::string& text) { return detail::json_list(text).value_or(format::Json::array({text})); };
}

std::string CommandLine::config_template(const std::set<std::string>& without) const {
  std::string text = message(
      "# Options of qlorapp {}, for --config. Lines behind # have the defaults: take the # away to change one. qlorapp {} "
      "--help-all has more.\n",
      name_, name_);
  for (const Group& group : groups_) {
    text += message("\n# --- {}\n", group.title);
    for (const std::string& name : group.names) {
      const auto option =
          std::find_if(options_.begin(), options_.end(), [&](const CommandOption& known) { return known.name == name; });
      if (option == options_.end() || without.contains(name)) continue;
      const std::string& known = option->default_text;
      const bool is_word = known == "no" || (known.empty() && option->type == "TEXT");  // YAML readers make a boolean or null of it
      const std::string value = option->required ? message("\"{}\"", option->type)
                                : is_word        ? message("\"{}\"", known)
                                : known.empty()  ? "null"
                                                 : known;
      text += message("## {}\n{}{}: {}\n", option->doc, option->required ? "" : "# ", name, value);
    }
  }
  return text;
}

void CommandLine::unused(std::span<const UnusedOption> options) {
  for (const UnusedOption& unused : options) {
    if (has_option(unused.name)) continue;  // this command uses it
    CommandOption option;
    option.name = unused.name;
    option.type = "VALUE";
    option.is_field = option.may_be_alone = true;
    option.is_unused = true;
    option.is_refused = unused.refused;
    option.reason = unused.reason;
    option.parse_text = [](const std::string& text) -> format::Json {
      if (text == "none" || text == "None") return format::Json("none");
      format::Json value = format::Json::parse(text, nullptr, /*allow_exceptions=*/false);
      if (!value.is_discarded()) return value;
      return text == "True" ? format::Json(true) : text == "False" ? format::Json(false) : format::Json(text);
    };
    option.set = [this, unused](const format::Json& value) {
      const bool off = value.is_null() || value == false || value == 0 || value == "" || value == "none" || value.empty();
      if (off || (!unused.neutral.empty() && value == format::Json::parse(unused.neutral))) return;
      QLORAPP_CHECK_VALUE(!unused.refused, "[{}] --{} is not supported: {}", name_, unused.name, unused.reason);
      log_warning(message("[{}] --{} has no effect: {}", name_, unused.name, unused.reason));
    };
    options_.push_back(std::move(option));
  }
}

std::map<std::string, format::Json> CommandLine::read_line(const std::vector<std::string>& words) {
  std::map<std::string, format::Json> values;
  std::map<std::string, std::string> spelled;
  std::string before;  // the option whose value was read last
  for (size_t i = 0; i < words.size(); ++i) {
    QLORAPP_CHECK_VALUE(words[i].starts_with("--"), "[{}] '{}' is not an option{}; options begin with --. See qlorapp {} --help.",
                        name_, words[i], before.empty() ? "" : message(", and --{} has one value", before), name_);
    const size_t equals = words[i].find('=');
    const std::string name = words[i].substr(2, equals == std::string::npos ? std::string::npos : equals - 2);
    const CommandOption& option = find(name);
    std::string text;
    if (equals != std::string::npos) {
      text = words[i].substr(equals + 1);
    } else if (i + 1 < words.size() && !words[i + 1].starts_with("--")) {
      text = words[++i];
      if (option.is_list) {
        for (const char* between = text.ends_with(',') ? "" : ","; i + 1 < words.size() && !words[i + 1].starts_with("--");
             between = ",") {
          QLORAPP_CHECK_VALUE(is_name(text) && is_name(words[i + 1]),
                              "[{}] --{} must be names or numbers, or one expression; got '{}' after '{}'.", name_, name,
                              words[i + 1], text);
          text += between + words[++i];
        }
      }
    } else {
      const bool alone = option.is_switch || option.may_be_alone || option.name == "resume_from_checkpoint";
      QLORAPP_CHECK_VALUE(alone, "[{}] --{} needs a value.{}", name_, name,
                          i + 1 < words.size() ? message(" One that begins with -- is written --{}=VALUE.", name) : "");
      text = "true";
    }
    before = name;
    const auto [earlier, first_time] = spelled.emplace(option.name, name);
    if (!first_time && option.is_repeated) {
      for (const format::Json& one : option.parse_text(text)) values[option.name].push_back(one);
      continue;
    }
    QLORAPP_CHECK_VALUE(first_time || earlier->second != name, "[{}] --{} is given twice.", name_, name);
    QLORAPP_CHECK_VALUE(first_time, "[{}] --{} and --{} are the same option. Give one of them.", name_, earlier->second, name);
    try {
      values.emplace(option.name, option.parse_text(text));
    } catch (const FormatError& error) {
      throw ValueError(message("[{}] --{} must be JSON; got '{}': {}", name_, name, text, error.what()));
    }
  }
  return values;
}

std::map<std::string, format::Json> CommandLine::read_config(const std::string& file) {
  const std::vector<ConfigEntry> entries = read_config_file(file, name_);
  std::map<std::string, format::Json> values;
  std::map<std::string, std::string> spelled;
  for (const ConfigEntry& entry : entries) {
    if (entry.key.starts_with("//")) continue;  // a comment
    if (find_known(entry.key) == nullptr) refuse_keys(entries, entry);
    const CommandOption& option = find(entry.key);
    const auto [earlier, first_time] = spelled.emplace(option.name, entry.key);
    QLORAPP_CHECK_VALUE(first_time, "[{}] {}: '{}' and '{}' are the same option. Give one of them.", name_, file, earlier->second,
                        entry.key);
    values.emplace(option.name, entry.value_for(option));
  }
  return values;
}

void CommandLine::refuse_keys(const std::vector<ConfigEntry>& entries, const ConfigEntry& first) {
  std::string others;
  for (const ConfigEntry& entry : entries) {
    if (&entry == &first || find_known(entry.key) != nullptr) continue;
    others += (others.empty() ? "" : ", ") + printable(entry.key, 60);
  }
  try {
    static_cast<void>(find(first.key));
  } catch (const ValueError& error) {
    throw ValueError(message("{} It stands in {}.{}", error.what(), first.place,
                             others.empty() ? std::string() : message(" Other keys there that are no options: {}.", others)));
  }
}

void CommandLine::parse(const std::vector<std::string>& arguments) {
  // CLI11 splits the line; names are looked up here, because a misspelled one is to be answered with its neighbor.
  CLI::App app;
  app.set_help_flag();
  bool help = false, help_all = false;
  std::string config_file;
  app.add_flag("--help", help);
  app.add_flag("--help_all", help_all);
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
    throw ValueError(message("[{}] {}. See qlorapp {} --help.", name_, error.what(), name_));
  }
  if (help || help_all) {
    print_help(help_all);
    throw HelpShown{};
  }

  std::map<std::string, format::Json> on_line = read_line(app.remaining());
  if (!config_file.empty()) given_ = read_config(config_file);
  for (auto& [name, value] : on_line) given_[name] = std::move(value);
  for (const auto& [name, value] : given_) find_known(name)->set(value);
  for (const CommandOption& option : options_) {
    QLORAPP_CHECK_VALUE(!option.required || given(option.name), "[{}] --{} is required: {}.", name_, option.name, option.doc);
  }
}

}  // namespace qlorapp::cli
