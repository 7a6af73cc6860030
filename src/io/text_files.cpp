// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/text_files.hpp"

#include <algorithm>
#include <array>
#include <iterator>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "json/python_json.hpp"
#include "model_files.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kTemplate = "chat_template.jinja", kMoreTemplates = "additional_chat_templates",
                           kConfig = "tokenizer_config.json";
constexpr std::array<std::string_view, 6> kTokenizers{"tokenizer.json",          "tokenizer.model", "spiece.model",
                                                      "sentencepiece.bpe.model", "vocab.json",      "vocab.txt"};
constexpr std::array<std::string_view, 4> kBeside{"special_tokens_map.json", "added_tokens.json", "merges.txt", "tekken.json"};
constexpr std::array<std::string_view, 2> kTemplates{kTemplate, "chat_template.json"};

bool is_in(std::string_view name, const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); }

bool is_template(std::string_view name) { return is_in(name, kTemplates) || name.starts_with(kMoreTemplates); }

/// The names of a folder's files of text, sorted.
std::vector<std::string> names_of(const std::string& folder) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (TextFiles::is_one(name) && files::is_regular_file(files::path_in(folder, name))) names.push_back(name);
  };
  for (const std::string& name : files::names_in(folder)) {
    if (name != kMoreTemplates) {
      add(name);
      continue;
    }
    if (!files::is_folder(files::path_in(folder, name))) continue;
    for (const std::string& inner : files::names_in(files::path_in(folder, name))) {
      const std::string more = message("{}/{}", name, inner);
      if (files::is_plain_file(folder, more)) add(more);  // links of a cache lead elsewhere from here
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// tokenizer_config.json without its template; the very text if it has none.
std::string without_template(const std::string& text, const std::string& path) {
  format::Json json = format::parse_json(text, path, {.allow_nonfinite = true, .allow_big_integers = true});
  if (!json.is_object() || json.erase("chat_template") == 0) return text;
  return format::dump_python_json(json, {.indent = 2, .sort_keys = true, .ensure_ascii = false}) + "\n";
}

}  // namespace

TextFiles::TextFiles(const std::string& folder, const std::optional<std::string>& chat_template) {
  for (const std::string& name : names_of(folder)) {
    if (chat_template && is_template(name)) continue;
    const std::string path = files::path_in(folder, name);
    std::string bytes = read_text(path);
    if (chat_template && name == kConfig) bytes = without_template(bytes, path);
    files_.emplace_back(name, std::move(bytes));
  }
  if (!chat_template) return;
  files_.emplace_back(kTemplate, *chat_template);
  std::sort(files_.begin(), files_.end());
}

bool TextFiles::is_one(std::string_view name) {
  if (name.starts_with(kMoreTemplates) && name.size() > kMoreTemplates.size() && name[kMoreTemplates.size()] == '/')
    return name.ends_with(".jinja") && name.find('/', kMoreTemplates.size() + 1) == std::string_view::npos;
  return name == kConfig || is_in(name, kTokenizers) || is_in(name, kBeside) || is_in(name, kTemplates) ||
         (name.ends_with(".tiktoken") && name.find('/') == std::string_view::npos);
}

bool TextFiles::has_tokenizer(const std::string& folder) {
  return std::any_of(kTokenizers.begin(), kTokenizers.end(),
                     [&](std::string_view name) { return files::exists(files::path_in(folder, name)); });
}

void TextFiles::write(const std::string& folder) const {
  for (const auto& [name, bytes] : files_) {
    if (name.starts_with(kMoreTemplates)) files::make_folders("output", files::path_in(folder, kMoreTemplates));
    files::write_file_atomically(files::path_in(folder, name), bytes);
  }
}

std::vector<std::string> TextFiles::others_in(const std::string& folder, bool vocabularies) const {
  std::vector<std::string> others = names_of(folder);
  std::erase_if(others, [&](const std::string& name) {
    const bool says_something = is_template(name) || name == kConfig || name == kBeside[0] || name == kBeside[1];
    return (!vocabularies && !says_something) ||
           std::any_of(files_.begin(), files_.end(), [&](const auto& file) { return file.first == name; });
  });
  return others;
}

std::vector<std::string> TextFiles::other_than(const std::string& folder) const {
  std::vector<std::string> others = others_in(folder);
  for (const auto& [name, bytes] : files_) {
    const std::string path = files::path_in(folder, name);
    if (!files::is_regular_file(path) || read_text(path) != bytes) others.push_back(name);
  }
  std::sort(others.begin(), others.end());
  return others;
}

}  // namespace qlorapp
