// SPDX-License-Identifier: Apache-2.0
#include "wrappers.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"
#include "json/json_fields.hpp"
#include "model_config_keys.hpp"

namespace qlorapp::format {
namespace {

/// Defaults of transformers' Qwen2VLTextConfig, Qwen2_5_VLTextConfig and Qwen3VLTextConfig.
constexpr std::string_view kQwen2Text =
    R"({"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80})";
constexpr std::string_view kQwen3Text = R"({"rope_theta": 500000.0, "max_position_embeddings": 128000})";

constexpr auto kWrappers = std::to_array<Wrapper>({
    // Gemma 3 4B to 27B, MedGemma.
    {.architecture = "Gemma3ForConditionalGeneration", .model_type = "gemma3", .text_type = "gemma3_text"},
    // Mistral Small 3.1 and later, Magistral and Devstral with eyes; Ministral 3.
    {.architecture = "Mistral3ForConditionalGeneration", .model_type = "mistral3", .text_type = "mistral"},
    // LLaVA 1.5, Pixtral 12B.
    {.architecture = "LlavaForConditionalGeneration", .model_type = "llava", .text_type = "llama"},
    {.architecture = "Qwen2VLForConditionalGeneration",
     .model_type = "qwen2_vl",
     .text_type = "qwen2",
     .own_text_type = "qwen2_vl_text",
     .ties_tables = false,
     .defaults = kQwen2Text},
    {.architecture = "Qwen2_5_VLForConditionalGeneration",
     .model_type = "qwen2_5_vl",
     .text_type = "qwen2",
     .own_text_type = "qwen2_5_vl_text",
     .ties_tables = false,
     .defaults = kQwen2Text},
    {.architecture = "Qwen3VLForConditionalGeneration",
     .model_type = "qwen3_vl",
     .text_type = "qwen3",
     .own_text_type = "qwen3_vl_text",
     .ties_tables = false,
     .defaults = kQwen3Text},
});

/// As transformers chooses: by model_type, for the class that generates text and for its body.
const Wrapper* wrapper_of(const Json& config) {
  const Json type = config.value("model_type", Json()), names = config.value("architectures", Json());
  const bool named = names.is_array() && !names.empty();
  for (const Wrapper& wrapper : kWrappers) {
    const std::string_view whole = wrapper.architecture;
    const std::string body = message("{}Model", whole.substr(0, whole.find("ForConditionalGeneration")));
    const bool names_it = named && std::any_of(names.begin(), names.end(), [&](const Json& n) { return n == whole || n == body; });
    if (type.is_null() ? names_it : type == wrapper.model_type && (!named || names_it)) return &wrapper;
  }
  return nullptr;
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

std::span<const Wrapper> wrappers() { return kWrappers; }

TextPart text_part(Json config, std::string where) {
  const Wrapper* const wrapper = config.is_object() ? wrapper_of(config) : nullptr;
  if (wrapper == nullptr) return {nullptr, std::move(config), std::move(where)};
  const bool nested = is_set(config, "text_config");
  Json text = nested ? config["text_config"] : config;  // Qwen's first files have the keys of the text beside the others
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
  if (!nested || !is_set(text, "model_type") || text["model_type"] == wrapper->own_text_type)
    text["model_type"] = wrapper->text_type;
  // Three axes of positions are one where there are no images.
  for (const char* rope : {"rope_scaling", "rope_parameters"}) {
    if (wrapper->own_text_type.empty() || !text.contains(rope) || !text[rope].is_object()) continue;
    for (const char* key : {"type", "rope_type"}) {
      if (text[rope].value(key, Json()) == "mrope") text[rope][key] = "default";
    }
  }
  return {wrapper, std::move(text), std::move(where)};
}

}  // namespace qlorapp::format
