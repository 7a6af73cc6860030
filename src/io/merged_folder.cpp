// SPDX-License-Identifier: Apache-2.0
#include "merged_folder.hpp"

#include <cerrno>
#include <cstdio>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "json/python_json.hpp"
#include "model_files.hpp"
#include "qlorapp/format/quantization_config.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

constexpr const char *kText = "text_config", *kTied = "tie_word_embeddings", *kVocabulary = "vocab_size";

format::Json read_config(const std::string& path) {
  format::Json json = format::parse_json(read_text(path), path, {.allow_nonfinite = true});
  QLORAPP_CHECK_FORMAT(json.is_object(), "[{}] the file must be a JSON object. Check the file.", path);
  return json;
}

/// Of the model, or else of the text model that it wraps.
const format::Json* find(const format::Json& json, const char* key) {
  if (json.contains(key) && !json[key].is_null()) return &json[key];
  if (!json.contains(kText) || !json[kText].is_object() || !json[kText].contains(key)) return nullptr;
  return json[kText][key].is_null() ? nullptr : &json[kText][key];
}

std::optional<format::Dtype> weight_dtype(const format::Json& json) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const format::Json* value = find(json, key);
    if (value == nullptr || !value->is_string()) continue;
    std::string_view name = value->get_ref<const std::string&>();
    if (name.starts_with("torch.")) name.remove_prefix(6);
    if (const auto dtype = format::weight_dtype_from_torch_name(name)) return dtype;
  }
  return std::nullopt;
}

std::string merged_config(const std::string& base, const MergedConfig& config) {
  format::Json json = read_config(files::path_in(base, "config.json"));
  json.erase("quantization_config");
  if (json.contains("torch_dtype")) json["torch_dtype"] = config.dtype;
  if (json.contains("dtype") || !json.contains("torch_dtype")) json["dtype"] = config.dtype;
  if (config.separates_head) json[kTied] = false;
  const bool wraps = json.contains(kText) && json[kText].is_object();
  if (config.vocab_size && (json.contains(kVocabulary) || !wraps)) json[kVocabulary] = *config.vocab_size;
  if (wraps) {
    format::Json& text = json[kText];
    text.erase("quantization_config");
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (text.contains(key) && !text[key].is_null()) text[key] = config.dtype;
    }
    if (config.separates_head && text.contains(kTied)) text[kTied] = false;
    if (config.vocab_size) text[kVocabulary] = *config.vocab_size;
  }
  return format::dump_python_json(json, format::kConfigStyle) + "\n";
}

}  // namespace

BaseConfig read_base_config(const std::string& folder) {
  BaseConfig config;
  config.path = files::path_in(folder, "config.json");
  const format::Json json = read_config(config.path);
  if (const format::Json* quantization = find(json, "quantization_config"))
    static_cast<void>(format::parse_quantization_config(*quantization, config.path));
  config.dtype = weight_dtype(json);
  if (const format::Json* tied = find(json, kTied); tied != nullptr && tied->is_boolean())
    config.tie_word_embeddings = tied->get<bool>();
  if (const format::Json* rows = find(json, kVocabulary); rows != nullptr && rows->is_number_integer())
    config.vocab_size = rows->get<int64_t>();
  return config;
}

void write_files_beside_weights(const std::string& base, const std::string& adapter, const std::string& output,
                                const MergedConfig& config) {
  copy_model_files(base, output);
  const TextFiles text(adapter);  // what the adapter was trained with
  text.write(output);
  if (TextFiles::has_tokenizer(adapter)) {
    for (const std::string& name : text.others_in(output, /*vocabularies=*/false)) {
      const std::string path = files::path_in(output, name);
      if (std::remove(path.c_str()) != 0) throw IoError(message("[merge] cannot remove {}.", path), errno);
    }
  }
  files::write_file_atomically(files::path_in(output, "config.json"), merged_config(base, config));
}

}  // namespace qlorapp
