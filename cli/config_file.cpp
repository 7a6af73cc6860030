// SPDX-License-Identifier: Apache-2.0
#include "config_file.hpp"

#include <algorithm>
#include <cctype>
#include <utility>

#include "command_line.hpp"
#include "core/check.hpp"
#include "files/file_reader.hpp"
#include "files/json_file.hpp"

namespace qlorapp::cli {
namespace {

using format::Json;
using format::YamlNode;

/// Options whose values have no declared types.
bool is_untyped(const CommandOption& option) { return option.type == "JSON" || option.type == "VALUE"; }

/// YAML's spellings of true and false, in lower case; other text as it is.
std::string switch_text(const std::string& text) {
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"true", "false", "yes", "no", "on", "off"}) {
    if (lower == word) return lower;
  }
  return text;
}

Json scalar_for(const YamlNode& node, const CommandOption& option) {
  if (node.is_null()) return nullptr;
  const bool quoted = node.kind == YamlNode::Kind::kQuoted;
  const Json value = option.parse_text(option.is_switch && !quoted ? switch_text(node.text) : node.text);
  const bool is_text = value.is_string() || value.is_structured();
  // In quotes it is text; numbers are decimal, as readers of YAML disagree on the others.
  if (!is_text && (quoted || (value.is_number() && !format::is_yaml_number(node.text)))) return node.text;
  return value;
}

/// An entry of a list, which the command line writes as a list of one.
Json entry_for(const YamlNode& node, const CommandOption& option, const std::string& where) {
  if (!node.is_scalar()) return format::untyped_json(node, where);
  const Json value = scalar_for(node, option);
  if (!value.is_array()) return value;
  return value.size() == 1 && !value.front().is_string() ? value.front() : Json(node.text);
}

}  // namespace

Json ConfigEntry::value_for(const CommandOption& option) const {
  if (!is_yaml) return value;
  if (node.is_scalar()) return scalar_for(node, option);
  if (is_untyped(option) || node.kind == YamlNode::Kind::kMapping) return format::untyped_json(node, file);
  Json list = Json::array();
  for (const YamlNode& item : node.items) list.push_back(entry_for(item, option, file));
  return list;
}

std::vector<ConfigEntry> read_config_file(const std::string& file, const std::string& command) {
  std::vector<ConfigEntry> entries;
  if (!file.ends_with(".yaml") && !file.ends_with(".yml")) {
    const Json json = files::read_json_file(file);
    QLORAPP_CHECK_FORMAT(json.is_object(), "[{}] {} must hold an object of options.", command, file);
    for (const auto& [key, value] : json.items())
      entries.push_back({.key = key, .file = file, .place = file, .value = value, .node = {}});
    return entries;
  }
  constexpr size_t kMost = size_t{128} << 20;  // parse_yaml has its own limit and names it
  YamlNode root = format::parse_yaml(files::FileReader(file).read_all(kMost), file);
  if (root.is_null()) return entries;
  QLORAPP_CHECK_FORMAT(root.kind == YamlNode::Kind::kMapping, "[{}] {} must hold a mapping of options, option: value.", command,
                       file);
  for (size_t i = 0; i < root.keys.size(); ++i) {
    const std::string place = message("{}, line {}", file, root.keys[i].line);
    entries.push_back(
        {.key = root.keys[i].text, .file = file, .place = place, .value = {}, .node = std::move(root.items[i]), .is_yaml = true});
  }
  return entries;
}

}  // namespace qlorapp::cli
