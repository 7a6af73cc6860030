// SPDX-License-Identifier: Apache-2.0
#include "text_copy.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "json/python_json.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::cli {
namespace {

using files::path_in;

constexpr int64_t kLargestFile = int64_t{256} << 20;  // no tokenizer is larger
constexpr std::string_view kConfig = "tokenizer_config.json";

/// By the names that transformers' tokenizers give their files.
bool belongs_to_text(std::string_view name) {
  constexpr std::array<std::string_view, 8> kEndings{".json", ".model",    ".vocab",     ".spm",
                                                     ".bpe",  ".tiktoken", "merges.txt", "vocab.txt"};
  return name.starts_with("tokenizer.") ||
         (!name.ends_with(".index.json") &&
          std::any_of(kEndings.begin(), kEndings.end(), [&](std::string_view ending) { return name.ends_with(ending); }));
}

/// The key names files, and one of them lies elsewhere.
bool leads_out(std::string_view key, const format::Json& value) {
  const auto is_path = [](const format::Json& name) {
    return name.is_string() && !files::is_name_inside(name.get_ref<const std::string&>());
  };
  if (!key.ends_with("_file") && !key.ends_with("_files")) return false;
  return is_path(value) || (value.is_structured() && std::any_of(value.begin(), value.end(), is_path));
}

std::string without_paths(const std::string& text, const std::string& path) {
  format::Json config = format::parse_json(text, path, {.allow_nonfinite = true, .allow_big_integers = true});
  if (!config.is_object()) return text;
  std::vector<std::string> paths;
  for (const auto& [key, value] : config.items()) {
    if (leads_out(key, value)) paths.push_back(key);
  }
  for (const std::string& key : paths) config.erase(key);
  return paths.empty() ? text : format::dump_python_json(config, {.indent = 2}) + "\n";
}

void copy(const std::string& folder, const std::string& name, const std::string& to) {
  const files::FileReader file = files::FileReader::open_inside(folder, name);
  if (file.size() > kLargestFile) return;
  const std::string text = file.read_all(static_cast<size_t>(kLargestFile));
  const std::string path = path_in(to, name);
  std::ofstream out(path, std::ios::binary);
  out << (name == kConfig ? without_paths(text, file.path()) : text);
  if (!out.flush()) throw IoError(message("[transformers] cannot write {}: {}. Set TMPDIR.", path, std::strerror(ENOSPC)), ENOSPC);
}

}  // namespace

TextCopy::TextCopy(const std::string& folder) : copy_("transformers") {
  for (const std::string& name : files::names_in(folder)) {
    if (belongs_to_text(name)) copy(folder, name, path());
  }
}

}  // namespace qlorapp::cli
