// SPDX-License-Identifier: Apache-2.0
// Text of --help and --help-all: groups of options, with type and default, in 120 columns.
#include <algorithm>
#include <cstdio>
#include <set>

#include "command_line.hpp"

namespace qlorapp::cli {
namespace {

constexpr size_t kColumns = 120;
constexpr size_t kDocColumn = 40;
/// Lines of an option in --help. --help-all has the rest.
constexpr size_t kShortLines = 2;

/// @param first  columns of the first line.
std::vector<std::string> wrapped(const std::string& text, size_t first, size_t width) {
  std::vector<std::string> lines{""};
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const size_t room = lines.size() == 1 ? first : width;
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > room) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return lines;
}

std::string head_of(const CommandOption& option) {
  return message("  --{} {}{}{}", option.name, option.type, option.default_text.empty() ? "" : "=", option.default_text);
}

std::string text_of(const CommandOption& option, const std::vector<Alias>& aliases) {
  std::string text = option.required ? "required: " + option.doc : option.doc;
  if (option.is_unused) text = option.reason;
  std::string others;
  for (const Alias& alias : aliases) {
    if (alias.name == option.name && !alias.older && !alias.alias.starts_with('_'))
      others += message("{}--{}", others.empty() ? "" : ", ", alias.alias);
  }
  return others.empty() ? text : message("{} (also {})", text, others);
}

void print_option(const CommandOption& option, const std::vector<Alias>& aliases, bool whole) {
  std::string head = head_of(option);
  const size_t indent = std::max(kDocColumn, head.size() + 2);
  std::vector<std::string> lines = wrapped(text_of(option, aliases), kColumns - indent, kColumns - kDocColumn);
  if (!whole && lines.size() > kShortLines) {
    lines.resize(kShortLines);
    std::string& last = lines.back();
    while (last.size() + 2 > kColumns - kDocColumn) last.resize(last.rfind(' '));
    last += " …";
  }
  head.resize(indent, ' ');
  std::printf("%s%s\n", head.c_str(), lines[0].c_str());
  for (size_t i = 1; i < lines.size(); ++i) std::printf("%s%s\n", std::string(kDocColumn, ' ').c_str(), lines[i].c_str());
}

}  // namespace

void CommandLine::print_help(bool all) {
  std::printf("usage: qlorapp %s %s [options]\n%s\n", name_.c_str(), needs_.c_str(), summary_.c_str());
  std::printf("--name VALUE or --name=VALUE; a BOOL alone is true. --config FILE holds options (JSON, or YAML by its name).\n");
  std::set<std::string> shown;
  const auto print = [&](const std::string& title, const std::vector<const CommandOption*>& options) {
    if (options.empty()) return;
    std::printf("\n%s\n", title.c_str());
    for (const CommandOption* option : options) {
      shown.insert(option->name);
      print_option(*option, aliases_, all || groups_.empty());
    }
  };
  for (const Group& group : groups_) {
    std::vector<const CommandOption*> options;
    for (const std::string& name : group.names) {
      const CommandOption* const option = find_known(name);
      if (option == nullptr) throw Error(message("[{}] a help group must name options; got '{}'.", name_, name));
      options.push_back(option);
    }
    print(group.title, options);
  }
  const auto rest = [&](auto&& chosen) {
    std::vector<const CommandOption*> options;
    for (const CommandOption& option : options_) {
      if (!shown.contains(option.name) && chosen(option)) options.push_back(&option);
    }
    return options;
  };
  if (groups_.empty()) print("Options", rest([](const CommandOption& option) { return !option.is_field; }));
  if (all) {
    print("Less used", rest([](const CommandOption& option) { return !option.is_unused; }));
    print("Accepted without effect", rest([](const CommandOption& option) { return option.is_unused && !option.is_refused; }));
    print("Refused", rest([](const CommandOption& option) { return option.is_refused; }));
  } else if (const size_t more = rest([](const CommandOption&) { return true; }).size(); more > 0) {
    std::printf("\n%zu more names (less used, without effect, refused with a reason): qlorapp %s --help-all\n", more,
                name_.c_str());
  }
}

}  // namespace qlorapp::cli
