// SPDX-License-Identifier: Apache-2.0
#include "special_tokens.hpp"

#include <algorithm>
#include <string>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "json_reading.hpp"

namespace qlorapp {
namespace {

using nlohmann::json;
constexpr size_t kLargestTokenFile = 64 << 20;

json read_if_there(const std::string& folder, const char* name) {
  if (!files::has_entry(folder, name)) return json::object();
  const std::string path = files::path_in(folder, name);
  json file = parse_json(read_file_inside(path, kLargestTokenFile), path);
  QLORAPP_CHECK_FORMAT(file.is_object(), "[{}] must be a JSON object; got {}. Check the file.", path, kind_of(file));
  return file;
}

/// The token that `file[key]` names, if it names one.
std::optional<TokenId> named(const json& file, const char* key, const std::string& path, const Tokenizer& tokenizer) {
  const auto entry = file.find(key);
  if (entry == file.end() || entry->is_null()) return std::nullopt;
  const json* text = &*entry;
  if (text->is_object() && text->contains("content")) text = &(*text)["content"];
  QLORAPP_CHECK_FORMAT(text->is_string(), "[{}] '{}' must be a string; got {}. Check the file.", path, key, kind_of(*text));
  const auto id = tokenizer.token_to_id(text->get_ref<const std::string&>());
  QLORAPP_CHECK_FORMAT(id.has_value(),
                       "[{}] '{}' must be a token of tokenizer.json; '{}' is not. Copy both files from the same model.", path, key,
                       text->get<std::string>());
  return id;
}

/// The ids under `key`, a number or a list of numbers; those without a token are left out.
std::vector<TokenId> numbered(const json& file, const char* key, const Tokenizer& tokenizer) {
  std::vector<TokenId> out;
  const auto add = [&](const json& value) {
    if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() >= tokenizer.id_limit()) return;
    if (tokenizer.id_to_token(value.get<TokenId>())) out.push_back(value.get<TokenId>());
  };
  const auto entry = file.find(key);
  if (entry == file.end()) return out;
  if (entry->is_array()) {
    for (const json& value : *entry) add(value);
  } else {
    add(*entry);
  }
  return out;
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& folder) {
  TokenizerConfig out;
  out.path = files::path_in(folder, "tokenizer_config.json");
  out.values = read_if_there(folder, "tokenizer_config.json");
  out.map = json::object();
  if (out.values.contains("added_tokens_decoder")) return out;
  out.map_path = files::path_in(folder, "special_tokens_map.json");
  out.map = read_if_there(folder, "special_tokens_map.json");
  out.values.update(out.map);
  return out;
}

SpecialTokens read_special_tokens(const std::string& folder, const std::string& model_folder, const Tokenizer& tokenizer) {
  const TokenizerConfig config = read_tokenizer_config(folder);
  const json model = read_if_there(model_folder, "config.json");
  const json generation = read_if_there(model_folder, "generation_config.json");
  const auto pick = [&](const char* name, const char* number) {
    if (const auto id = named(config.values, name, config.file_of(name), tokenizer)) return id;
    for (const json* file : {&generation, &model}) {
      if (const auto ids = numbered(*file, number, tokenizer); !ids.empty()) return std::optional(ids.front());
    }
    return std::optional<TokenId>();
  };
  SpecialTokens out{pick("bos_token", "bos_token_id"), pick("eos_token", "eos_token_id"), pick("pad_token", "pad_token_id"), {}};
  out.split = config.values.value("split_special_tokens", json(false)) == true;
  const auto add = [&](TokenId id) {
    if (std::find(out.all_eos.begin(), out.all_eos.end(), id) == out.all_eos.end()) out.all_eos.push_back(id);
  };
  if (out.eos) add(*out.eos);
  for (const json* file : {&generation, &model}) {
    for (const TokenId id : numbered(*file, "eos_token_id", tokenizer)) add(id);
  }
  return out;
}

}  // namespace qlorapp
