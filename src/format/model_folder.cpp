// SPDX-License-Identifier: Apache-2.0
#include "format/model_folder.hpp"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/folder.hpp"
#include "format/ggml_blocks.hpp"
#include "format/quant_state.hpp"
#include "json/python_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kBody = "model.";

/// "model.layers.0.…" for "layers.0.…", and for a wrapper "model.language_model.layers.0.…" for "language_model.model.layers.0.…",
/// "language_model.layers.0.…" and "model.layers.0.…".
std::string name_in_memory(const ModelConfig& config, std::string_view name) {
  const auto drop = [&](std::string_view prefix) {
    const bool found = name.starts_with(prefix);
    if (found) name.remove_prefix(prefix.size());
    return found;
  };
  const std::string body = config.body();
  if (name.starts_with(body) || name.starts_with("lm_head.")) return std::string(name);
  if (config.wrapper == nullptr) return message("{}{}", kBody, name);
  const std::string text = message("{}.", config.wrapper->text);
  if (drop(text)) {
    if (name.starts_with("lm_head.")) return std::string(name);
    drop(kBody);
    return body + std::string(name);
  }
  drop(kBody);
  const bool of_text = name.starts_with("layers.") || name.starts_with("embed_tokens.") || name.starts_with("norm.");
  return (of_text ? body : std::string(kBody)) + std::string(name);
}

void complete_names(ModelFolder& model) {
  TensorFiles& files = model.tensors;
  const std::string table = embedding_module(model.config) + ".weight";
  if (model.config.wrapper == nullptr && (files.find(table) != nullptr || files.find(table.substr(kBody.size())) == nullptr))
    return;
  files.rename([&](const std::string& name) { return name_in_memory(model.config, name); });
}

void find_other_parts(ModelFolder& model) {
  if (model.config.wrapper == nullptr) return;
  const std::string body = model.config.body();
  for (const TensorLocation& location : model.tensors.tensors()) {
    const std::string_view name = location.tensor->name;
    if (!name.starts_with(kBody) || name.starts_with(body)) continue;
    const std::string part(name.substr(0, name.find('.', kBody.size())));
    if (model.other_parts.empty() || model.other_parts.back() != part) model.other_parts.push_back(part);
  }
}

void settle_tables(ModelFolder& model) {
  TensorFiles& files = model.tensors;
  const TensorLocation* const head = files.find(kHeadTable);
  if (!model.config.tie_word_embeddings || head == nullptr) return;
  const std::string table = embedding_module(model.config) + ".weight";
  if (files.find(table) == nullptr) return files.rename([&](const std::string& name) { return name == kHeadTable ? table : name; });
  if (!has_two_tables(files, model.config)) return;
  model.config.tie_word_embeddings = false;
  log_warning_once(
      message("[{}] config.json says tie_word_embeddings, but {} and {} differ. Both are used, as in transformers. Set "
              "tie_word_embeddings to false in config.json: other programs may drop one of them.",
              head->file->path(), table, kHeadTable));
}

/// The number in "model.layers.<number>.…"; -1 for another name.
int64_t layer_of(const ModelConfig& config, std::string_view name) {
  const std::string layers = config.body() + "layers.";
  if (!name.starts_with(layers)) return -1;
  name.remove_prefix(layers.size());
  int64_t layer = -1;
  const auto [stop, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc{} && stop != name.data() + name.size() && *stop == '.' ? layer : -1;
}

[[noreturn]] void refuse(const ModelFolder& model, const std::vector<TensorLocation>& unknown) {
  const std::string file = unknown.front().file->path(), name = printable(unknown.front().tensor->name);
  const int64_t layers = model.config.num_hidden_layers;
  int64_t last = -1;
  for (const TensorLocation& location : unknown) last = std::max(last, layer_of(model.config, location.tensor->name));
  if (last >= layers) {
    throw FormatError(
        message("[load] {} holds {} tensor(s) of layers behind the {} that config.json gives the model, up to layer {}: {} is one. "
                "transformers lists them as unexpected and leaves them out. Set num_hidden_layers to the checkpoint's, {}, or "
                "use the checkpoint that belongs to this config.json.",
                file, unknown.size(), layers, last, name, last + 1));
  }
  throw FormatError(
      message("[load] {} holds {} tensor(s) that a {} model does not have, such as {}. transformers lists them as unexpected and "
              "leaves them out. Use the config.json that belongs to this checkpoint, or save the model without them.",
              file, unknown.size(), model.config.family->model_type, name));
}

void check_tensors(const ModelFolder& model) {
  std::set<std::string, std::less<>> dense, linear;
  for (const Parameter& parameter : parameters(model.config))
    (parameter.role == Role::kLinear ? linear : dense).insert(parameter.name());
  if (model.config.tie_word_embeddings) dense.emplace(kHeadTable);
  const auto is_part = [&](std::string_view name) {  // of a weight in four bits
    const size_t weight = name.find(".weight.");
    if (weight == std::string_view::npos) return false;
    const auto owner = linear.find(name.substr(0, weight + std::string_view(".weight").size()));
    return owner != linear.end() && is_quantized(model.tensors, *owner);
  };
  std::vector<TensorLocation> unknown;
  for (const TensorLocation& location : model.tensors.tensors()) {
    const std::string_view name = location.tensor->name;
    if (dense.contains(name) || linear.contains(name) || is_part(name) || model.is_other(name) ||
        name.ends_with("rotary_emb.inv_freq"))
      continue;
    unknown.push_back(location);
  }
  if (!unknown.empty()) refuse(model, unknown);
}

}  // namespace

bool ModelFolder::is_other(std::string_view name) const {
  return std::any_of(other_parts.begin(), other_parts.end(),
                     [&](const std::string& part) { return name.starts_with(part) && name.substr(part.size()).starts_with('.'); });
}

bool has_two_tables(const TensorFiles& files, const ModelConfig& config) {
  const TensorLocation *const embedding = files.find(embedding_module(config) + ".weight"), *const head = files.find(kHeadTable);
  if (embedding == nullptr || head == nullptr) return false;
  if (embedding->tensor->dtype != head->tensor->dtype || embedding->tensor->shape != head->tensor->shape) return true;
  constexpr int64_t kPiece = int64_t{4} << 20;
  std::vector<std::byte> left, right;
  for (int64_t at = 0; at < embedding->tensor->nbytes; at += kPiece) {
    const auto size = static_cast<size_t>(std::min(kPiece, embedding->tensor->nbytes - at));
    left.resize(size);
    right.resize(size);
    embedding->file->read(*embedding->tensor, at, left);
    head->file->read(*head->tensor, at, right);
    if (left != right) return true;
  }
  return false;
}

ModelFolder open_model_folder(const std::string& folder) {
  ModelFolder model{load_model_config(folder), TensorFiles(folder), {}};
  complete_names(model);
  find_other_parts(model);
  settle_tables(model);
  check_tensors(model);
  for (const Parameter& linear : parameters(model.config, Role::kLinear)) {
    if (const StoredBlocks* const stored = model.tensors.blocks_of(linear.name()))
      model.config.blocks.emplace(linear.name(), *quant_type_of(stored->type));
  }
  return model;
}

ModelConfig settled_config(const std::string& folder) {
  if (!TensorFiles::are_in(folder)) return load_model_config(folder);
  return open_model_folder(folder).config;
}

std::string with_tables_of(const ModelConfig& config, std::string text, const std::string& path) {
  Json json = parse_json(text, path, {.allow_nonfinite = true});
  const auto found = json.find("tie_word_embeddings");
  const bool usual = config.wrapper != nullptr ? config.wrapper->ties_tables
                                               : parse_json(config.family->defaults, path).value("tie_word_embeddings", false);
  const bool says_tied = found == json.end() ? usual : *found == true;
  if (config.tie_word_embeddings || !says_tied) return text;
  json["tie_word_embeddings"] = false;
  return dump_python_json(json, kConfigStyle) + "\n";
}

}  // namespace qlorapp::format
