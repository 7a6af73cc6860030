// SPDX-License-Identifier: Apache-2.0
#include "wrappers.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "json/json_fields.hpp"
#include "model_config_keys.hpp"

namespace qlorapp::format {
namespace {

/// As transformers chooses: by model_type, for the class that generates text and for its body.
std::pair<const Family*, const Wrapper*> wrapper_of(const Json& config) {
  const Json type = config.value("model_type", Json()), names = config.value("architectures", Json());
  const bool named = names.is_array() && !names.empty();
  for (const Family& family : families()) {
    for (const Wrapper& wrapper : family.wrappers) {
      const std::string_view whole = wrapper.architecture;
      const std::string body = message("{}Model", whole.substr(0, whole.find("ForConditionalGeneration")));
      const bool names_it =
          named && std::any_of(names.begin(), names.end(), [&](const Json& n) { return n == whole || n == body; });
      if (type.is_null() ? names_it : type == wrapper.model_type && (!named || names_it)) return {&family, &wrapper};
    }
  }
  return {};
}

bool is_set(const Json& config, const char* key) {
  const auto found = config.find(key);
  return found != config.end() && !found->is_null();
}

/// Takes from around the text what holds for the whole model.
void inherit(Json& text, const Json& whole) {
  constexpr const char* kDtypes[] = {"dtype", "torch_dtype"};
  if (is_set(whole, kDtypes[0]) || is_set(whole, kDtypes[1])) {
    for (const char* key : kDtypes) text.erase(key);
  }
  for (const char* key : {"dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "auto_map",
                          "trust_remote_code", "custom_pipelines"}) {
    if (is_set(whole, key) && !is_set(text, key)) text[key] = whole[key];
  }
}

}  // namespace

TextPart text_part(Json config, std::string where) {
  const auto [family, wrapper] = config.is_object() ? wrapper_of(config) : std::pair<const Family*, const Wrapper*>();
  if (wrapper == nullptr) return {nullptr, std::move(config), std::move(where)};
  const bool nested = is_set(config, "text_config");
  Json text = nested ? config["text_config"] : config;  // some older files have the keys of the text beside the others
  QLORAPP_CHECK_FORMAT(text.is_object(), "[{}] text_config must be a JSON object; got {}. Check the file.", where, shown(text));
  if (nested) {
    judge_keys_around_text(config, where);
    inherit(text, config);
    where += ", text_config";
  }
  const auto says = [](const Json& from, bool usual) {
    const auto found = from.find("tie_word_embeddings");
    return found != from.end() && found->is_boolean() ? found->get<bool>() : usual;
  };
  text["tie_word_embeddings"] = says(config, wrapper->ties_tables) || (!wrapper->ties_tables && says(text, false));
  for (const char* key : {"architectures", "vision_config"}) text.erase(key);
  if (!nested || !is_set(text, "model_type") || text["model_type"] == wrapper->text_type) text["model_type"] = family->model_type;
  // Three axes of positions are one where there are no images.
  for (const char* rope : {"rope_scaling", "rope_parameters"}) {
    if (wrapper->text_type.empty() || !text.contains(rope) || !text[rope].is_object()) continue;
    for (const char* key : {"type", "rope_type"}) {
      if (text[rope].value(key, Json()) == "mrope") text[rope][key] = "default";
    }
  }
  return {wrapper, std::move(text), std::move(where)};
}

}  // namespace qlorapp::format
