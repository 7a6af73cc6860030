// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/nearest_name.hpp"
#include "files/file_reader.hpp"
#include "json/json_fields.hpp"
#include "layer_options.hpp"
#include "model_config_keys.hpp"
#include "wrappers.hpp"

namespace qlorapp::format {
namespace {

constexpr size_t kMaxConfigBytes = size_t{16} << 20;

/// Bounds far beyond any model, so that products of two sizes stay within 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 24, kMaxLayers = 10'000, kMaxHeads = int64_t{1} << 16,
                  kMaxVocabulary = int64_t{1} << 31;
constexpr double kMaxFactor = 1e6;

/// Whether one of the architectures is the family's, or its model without a head ("LlamaModel").
bool names_family(const std::vector<std::string>& architectures, const Family& family) {
  const std::string_view whole = family.architecture;
  const std::string body = message("{}Model", whole.substr(0, whole.find("ForCausalLM")));
  return std::any_of(architectures.begin(), architectures.end(), [&](const auto& name) { return name == whole || name == body; });
}

/// By model_type, as transformers chooses. Other architectures beside the family's have no effect.
const Family& family_of(JsonFields& fields) {
  const auto type = fields.text("model_type");
  const auto architectures = fields.texts("architectures");
  std::vector<std::string_view> names;
  for (const Family& family : families()) {
    for (const Wrapper& wrapper : family.wrappers) names.push_back(wrapper.architecture);
  }
  for (const Family& family : families()) {
    names.push_back(family.architecture);
    const bool named = !architectures || (type && architectures->empty()) || names_family(*architectures, family);
    if ((architectures || type) && named && type.value_or(std::string(family.model_type)) == family.model_type) return family;
  }
  std::string known;
  for (const std::string_view name : names) known += message("{}{}", known.empty() ? "" : ", ", name);
  const std::string got = architectures && !architectures->empty() ? listed(*architectures) : printable(type.value_or("none"));
  const bool tells_both = type && architectures && !architectures->empty();
  const std::string first = architectures && !architectures->empty() ? architectures->front() : "";
  throw UnsupportedModel(
      message("[{}] architectures must name one of {}; got {}{}.{} Python's AutoModelForCausalLM trains other architectures in "
              "transformers' code, over linear layers in four bits.",
              fields.where(), known, got, tells_both ? " with model_type " + printable(*type) : "", did_you_mean(first, names)));
}

std::optional<Dtype> dtype_of(JsonFields& fields) {
  std::optional<Dtype> dtype;
  for (const std::string_view key : {"torch_dtype", "dtype"}) {
    auto name = fields.text(key);
    if (!name || *name == "auto") continue;
    if (name->starts_with("torch.")) name->erase(0, 6);
    const auto found = weight_dtype_from_torch_name(*name);
    if (!found) fields.fail(key, "must be float32, float16 or bfloat16", Json(*name), "Convert the model.");
    if (dtype && *dtype != *found) fields.fail(key, "must not contradict torch_dtype", Json(*name), "Keep one of them.");
    dtype = found;
  }
  return dtype;
}

/// transformers writes no id as null; Llama's first checkpoints wrote -1.
std::optional<int64_t> token_id(JsonFields& fields, std::string_view key, int64_t vocabulary) {
  const auto id = fields.integer(key, -1, vocabulary - 1);
  return id == -1 ? std::nullopt : id;
}

std::vector<int64_t> eos_of(JsonFields& fields, int64_t vocabulary) {
  const Json* value = fields.value("eos_token_id");
  if (value == nullptr || !value->is_array()) {
    const auto id = token_id(fields, "eos_token_id", vocabulary);
    return id ? std::vector<int64_t>{*id} : std::vector<int64_t>{};
  }
  std::vector<int64_t> ids;
  for (const Json& id : *value) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocabulary) {
      fields.fail("eos_token_id", message("must hold ids from 0 to {}", vocabulary - 1), *value);
    }
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

void read(ModelConfig& config, JsonFields& fields, const ConfigField& field) {
  const std::string_view key = field.key == "intermediate_size" ? config.family->width_key : field.key;
  const auto found = [&](auto value) {
    if (field.required) value = fields.required(key, std::move(value));
    return value;
  };
  if (const auto* const integer = std::get_if<int64_t ModelConfig::*>(&field.member)) {
    const auto value = found(fields.integer(key, static_cast<int64_t>(field.least), static_cast<int64_t>(field.most)));
    if (value) config.** integer = *value;
  } else if (const auto* const number = std::get_if<double ModelConfig::*>(&field.member)) {
    const auto value = found(fields.number(key));
    if (value && !(*value > field.least && *value < field.most))
      fields.fail(key, message("must be between {} and {}", field.least, field.most), Json(*value));
    if (value) config.** number = *value;
  } else if (const auto value = found(fields.boolean(key))) {
    config.*std::get<bool ModelConfig::*>(field.member) = *value;
  }
}

/// Derives the counts and widths of heads that a file leaves out, and checks them against each other.
void settle_heads(ModelConfig& config, JsonFields& fields) {
  if (config.num_key_value_heads == 0) config.num_key_value_heads = config.num_attention_heads;
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    fields.fail("num_key_value_heads", message("must divide num_attention_heads, {}", config.num_attention_heads),
                Json(config.num_key_value_heads));
  }
  if (config.head_dim == 0 && config.hidden_size % config.num_attention_heads != 0) {
    fields.fail("num_attention_heads", message("must divide hidden_size, {}, where head_dim is absent", config.hidden_size),
                Json(config.num_attention_heads));
  }
  if (config.head_dim == 0) config.head_dim = config.hidden_size / config.num_attention_heads;
  if (config.head_dim % 2 != 0)
    fields.fail("head_dim", "must be even, because rotary embeddings rotate pairs", Json(config.head_dim));
  if (config.num_attention_heads * config.head_dim > kMaxWidth) {
    fields.fail("head_dim", message("times num_attention_heads must be at most {}", kMaxWidth), Json(config.head_dim));
  }
}

}  // namespace

std::span<const ConfigField> config_fields() {
  using enum ConfigField::Record;
  using M = ModelConfig;
  static constexpr auto kFields = std::to_array<ConfigField>({
      {"hidden_size", &M::hidden_size, 1, kMaxWidth, true, "width of the residual stream"},
      {"intermediate_size", &M::intermediate_size, 1, kMaxWidth, true, "width of the MLP"},
      {"num_hidden_layers", &M::num_hidden_layers, 1, kMaxLayers, true, "blocks"},
      {"num_attention_heads", &M::num_attention_heads, 1, kMaxHeads, true, "query heads"},
      {"num_key_value_heads", &M::num_key_value_heads, 1, kMaxHeads, false, "key and value heads; absent: as many as query heads"},
      {"head_dim", &M::head_dim, 1, kMaxWidth, false, "width of a head; absent: hidden_size / num_attention_heads"},
      {"vocab_size", &M::vocab_size, 1, kMaxVocabulary, true, "rows of the embedding table"},
      {"max_position_embeddings", &M::max_position_embeddings, 1, kMaxPositions, false,
       "positions of the pretraining; computes nothing, except as the length that a rope type scales from", kNever},
      {"rms_norm_eps", &M::rms_norm_eps, 0, 1, false, "added to the mean square before its root"},
      {"tie_word_embeddings", &M::tie_word_embeddings, 0, 1, false, "the head is the embedding table"},
      {"attention_bias", &M::attention_bias, 0, 1, false, "the attention's linear layers have biases, o_proj by the family's row",
       kIfSet},
      {"attention_out_bias", &M::attention_out_bias, 0, 1, false, "o_proj has a bias", kIfSet},
      {"mlp_bias", &M::mlp_bias, 0, 1, false, "gate, up and down have biases", kIfSet},
      {"use_bias", &M::use_bias, 0, 1, false, "all linear layers have biases", kIfSet},
      {"query_pre_attn_scalar", &M::query_pre_attn_scalar, 0, kMaxFactor, false,
       "scores are divided by its root, not by head_dim's", kIfSet},
      {"attention_multiplier", &M::attention_multiplier, 0, kMaxFactor, false,
       "scores are multiplied by it, not by 1 / sqrt(head_dim)", kIfSet},
      {"embedding_multiplier", &M::embedding_multiplier, 0, kMaxFactor, false, "factor of the embeddings", kIfSet},
      {"residual_multiplier", &M::residual_multiplier, 0, kMaxFactor, false, "factor of what a part adds to the residual stream",
       kIfSet},
      {"logits_scaling", &M::logits_scaling, 0, kMaxFactor, false, "divisor of the logits", kIfSet},
      {"final_logit_softcapping", &M::final_logit_softcapping, 0, kMaxFactor, false, "logits become cap * tanh(logits / cap)",
       kIfSet},
  });
  return kFields;
}

ModelConfig parse_model_config(std::string_view text, std::string_view file) {
  auto [wrapper, json, where] =
      text_part(parse_json(text, file, {.max_bytes = kMaxConfigBytes, .max_depth = 16}), std::string(file));
  ModelConfig config;
  config.wrapper = wrapper;
  double default_theta = 0;
  if (json.is_object()) {
    JsonFields named(json, where);
    config.family = &family_of(named);
    Json defaults = parse_json(config.family->defaults, config.family->model_type);
    if (wrapper != nullptr) defaults.update(parse_json(wrapper->defaults, wrapper->model_type));
    for (const auto& [key, value] : defaults.items()) {
      const auto found = json.find(key);
      // By null: no window, and as many heads as there are queries.
      const bool says_none = (key == "sliding_window" || key == "num_key_value_heads") && found != json.end();
      if (key == "rope_parameters" && json.contains("rope_scaling")) continue;  // of an older file
      if (key == "rope_theta") default_theta = value.get<double>();             // a file says it in one of three places
      else if (!says_none && (found == json.end() || found->is_null())) json[key] = value;
    }
  }
  JsonFields fields(json, where);
  family_of(fields);  // its keys are read
  for (const ConfigField& field : config_fields()) read(config, fields, field);
  settle_heads(config, fields);
  settle_layers(config, fields, default_theta);
  config.bos_token_id = token_id(fields, "bos_token_id", config.vocab_size);
  config.pad_token_id = token_id(fields, "pad_token_id", config.vocab_size);
  config.eos_token_ids = eos_of(fields, config.vocab_size);
  config.dtype = dtype_of(fields);
  if (const Json* quantization = fields.value("quantization_config"))
    config.quantization = parse_quantization_config(*quantization, where);
  judge_other_keys(fields, *config.family);
  return config;
}

std::string ModelConfig::body() const { return wrapper == nullptr ? "model." : message("model.{}.", wrapper->text); }

double ModelConfig::attention_scale() const {
  if (attention_multiplier > 0) return attention_multiplier;
  return 1.0 / std::sqrt(query_pre_attn_scalar > 0 ? query_pre_attn_scalar : static_cast<double>(head_dim));
}

double ModelConfig::embedding_factor() const {
  return embedding_multiplier * (family->scales_embedding ? std::sqrt(static_cast<double>(hidden_size)) : 1.0);
}

ModelConfig load_model_config(const std::string& folder) {
  const files::FileReader file = files::FileReader::open_inside(folder, "config.json");
  return parse_model_config(file.read_all(kMaxConfigBytes), file.path());
}

}  // namespace qlorapp::format
