// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_config.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/nearest_name.hpp"
#include "format/file_reader.hpp"
#include "json_fields.hpp"
#include "model_config_keys.hpp"

namespace qlorapp::format {
namespace {

constexpr const char* kOriginalLength = "original_max_position_embeddings";
constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr const char *kFull = "full_attention", *kSliding = "sliding_attention";

/// Bounds far beyond any model, so that products of two sizes stay within 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 24, kMaxLayers = 10'000, kMaxHeads = int64_t{1} << 16,
                  kMaxVocabulary = int64_t{1} << 31, kMaxPositions = int64_t{1} << 40;

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
  std::string known;
  for (const Family& family : families()) {
    known += message("{}{}", known.empty() ? "" : ", ", family.architecture);
    const bool named = !architectures || (type && architectures->empty()) || names_family(*architectures, family);
    if ((architectures || type) && named && type.value_or(std::string(family.model_type)) == family.model_type) return family;
  }
  const std::string got = architectures && !architectures->empty() ? listed(*architectures) : printable(type.value_or("none"));
  const bool tells_both = type && architectures && !architectures->empty();
  std::vector<std::string_view> names;
  for (const Family& family : families()) names.push_back(family.architecture);
  const std::string first = architectures && !architectures->empty() ? architectures->front() : "";
  throw FormatError(
      message("[{}] architectures must name one of {}; got {}{}.{} Python's AutoModelForCausalLM trains other architectures in "
              "transformers' code, over linear layers in four bits.",
              fields.where(), known, got, tells_both ? " with model_type " + printable(*type) : "", did_you_mean(first, names)));
}

/// Merges the two shapes that transformers wrote over time; where both are there they must agree.
RopeSettings rope_of(JsonFields& fields, double default_theta, int64_t max_positions) {
  RopeSettings rope;
  const Json* scaling = fields.value("rope_scaling");
  const Json* parameters = fields.value("rope_parameters");
  const auto outer_theta = fields.number("rope_theta");
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters) {
    fields.fail("rope_scaling", "must not contradict rope_parameters", *scaling, "Keep one of them.");
  }
  const Json* settings = parameters != nullptr ? parameters : scaling;
  static const Json kNone = Json::object();
  JsonFields inner(settings != nullptr ? *settings : kNone, fields.where(),
                   parameters != nullptr ? "rope_parameters." : "rope_scaling.");
  const auto inner_theta = inner.number("rope_theta");
  if (outer_theta && inner_theta && *outer_theta != *inner_theta) {
    fields.fail("rope_theta", "must not contradict the rope settings", Json(*outer_theta), "Keep one of them.");
  }
  rope.theta = inner_theta ? *inner_theta : outer_theta.value_or(default_theta);
  if (!(rope.theta > 0)) fields.fail("rope_theta", "must be above 0", Json(rope.theta));

  const auto new_type = inner.text("rope_type"), old_type = inner.text("type");
  if (new_type && old_type && *new_type != *old_type)
    inner.fail("type", "must not contradict rope_type", Json(*old_type), "Keep one of them.");
  const std::string type = new_type ? *new_type : old_type.value_or("default");
  if (type == "llama3") {
    rope.type = RopeSettings::Type::kLlama3;
    rope.factor = inner.required_number("factor");
    rope.low_freq_factor = inner.required_number("low_freq_factor");
    rope.high_freq_factor = inner.required_number("high_freq_factor");
    const auto outside = fields.integer(kOriginalLength, 1, kMaxPositions),
               inside = inner.integer(kOriginalLength, 1, kMaxPositions);
    rope.original_max_position_embeddings = outside ? *outside : inside.value_or(max_positions);  // transformers' order
    if (!(rope.factor >= 1)) inner.fail("factor", "must be at least 1", Json(rope.factor));
    if (!(rope.low_freq_factor > 0)) inner.fail("low_freq_factor", "must be above 0", Json(rope.low_freq_factor));
    if (!(rope.high_freq_factor > rope.low_freq_factor))
      inner.fail("high_freq_factor", "must be above low_freq_factor", Json(rope.high_freq_factor));
  } else if (type == "linear" && inner.required_number("factor") == 1) {
    rope.type = RopeSettings::Type::kDefault;  // positions are divided by one
  } else if (type != "default") {
    inner.fail("rope_type", "must be default or llama3", Json(type), "Use a model with one of these rotary embeddings.");
  }
  if (inner.number("partial_rotary_factor").value_or(1.0) != 1.0) {
    inner.fail("partial_rotary_factor", "must be 1: rotary embeddings rotate the whole head",
               settings->at("partial_rotary_factor"));
  }
  const auto unknown = inner.remaining();
  if (!unknown.empty())
    inner.fail(unknown.front(), message("must be absent with rope type {}", type), settings->at(unknown.front()));
  return rope;
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
  const auto found = [&](auto value) {
    if (field.required) value = fields.required(field.key, std::move(value));
    return value;
  };
  if (const auto* const integer = std::get_if<int64_t ModelConfig::*>(&field.member)) {
    const auto value = found(fields.integer(field.key, static_cast<int64_t>(field.least), static_cast<int64_t>(field.most)));
    if (value) config.** integer = *value;
  } else if (const auto* const number = std::get_if<double ModelConfig::*>(&field.member)) {
    const auto value = found(fields.number(field.key));
    if (value && !(*value > field.least && *value < field.most))
      fields.fail(field.key, message("must be between {} and {}", field.least, field.most), Json(*value));
    if (value) config.** number = *value;
  } else if (const auto value = found(fields.boolean(field.key))) {
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

/// By layer_types, or else by the family's rule; empty if every layer attends to all earlier positions.
std::vector<LayerOptions> layers_of(const ModelConfig& config, JsonFields& fields) {
  const int64_t window = fields.integer("sliding_window", 0, kMaxPositions).value_or(0);
  const bool uses = fields.boolean("use_sliding_window").value_or(config.family->window_rule == WindowRule::kAll);
  const int64_t first = config.family->window_rule == WindowRule::kAll
                            ? 0
                            : fields.integer("max_window_layers", 0, kMaxLayers).value_or(config.num_hidden_layers);
  const auto types = fields.texts("layer_types");
  if (types && std::ssize(*types) != config.num_hidden_layers) {
    fields.fail("layer_types", message("must have an entry for each of the {} layers", config.num_hidden_layers),
                Json(types->size()));
  }
  std::vector<LayerOptions> layers(static_cast<size_t>(config.num_hidden_layers));
  bool slides = false;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string type = types ? (*types)[static_cast<size_t>(i)] : uses && window > 0 && i >= first ? kSliding : kFull;
    if (type != kFull && type != kSliding) fields.fail("layer_types", message("must be {} or {}", kFull, kSliding), Json(type));
    if (type == kFull) continue;
    if (window == 0 || !uses) fields.fail("layer_types", "needs a sliding_window that is in use", Json(type));
    layers[static_cast<size_t>(i)].window = window;
    slides = true;
  }
  return slides ? layers : std::vector<LayerOptions>{};
}

}  // namespace

std::span<const ConfigField> config_fields() {
  static constexpr std::array<ConfigField, 12> kFields{{
      {"hidden_size", &ModelConfig::hidden_size, 1, kMaxWidth, true, "width of the residual stream"},
      {"intermediate_size", &ModelConfig::intermediate_size, 1, kMaxWidth, true, "width of the MLP"},
      {"num_hidden_layers", &ModelConfig::num_hidden_layers, 1, kMaxLayers, true, "blocks"},
      {"num_attention_heads", &ModelConfig::num_attention_heads, 1, kMaxHeads, true, "query heads"},
      {"num_key_value_heads", &ModelConfig::num_key_value_heads, 1, kMaxHeads, false,
       "key and value heads; absent: as many as query heads"},
      {"head_dim", &ModelConfig::head_dim, 1, kMaxWidth, false, "width of a head; absent: hidden_size / num_attention_heads"},
      {"vocab_size", &ModelConfig::vocab_size, 1, kMaxVocabulary, true, "rows of the embedding table"},
      {"max_position_embeddings", &ModelConfig::max_position_embeddings, 1, kMaxPositions, false,
       "positions of the pretraining; computes nothing, except as the length that llama3 scales from"},
      {"rms_norm_eps", &ModelConfig::rms_norm_eps, 0, 1, false, "added to the mean square before its root"},
      {"tie_word_embeddings", &ModelConfig::tie_word_embeddings, 0, 1, false, "the head is the embedding table"},
      {"attention_bias", &ModelConfig::attention_bias, 0, 1, false, "q, k, v and o have biases"},
      {"mlp_bias", &ModelConfig::mlp_bias, 0, 1, false, "gate, up and down have biases"},
  }};
  return kFields;
}

ModelConfig parse_model_config(std::string_view text, std::string_view where) {
  Json json = parse_json(text, where, {.max_bytes = kMaxConfigBytes, .max_depth = 16});
  ModelConfig config;
  double default_theta = 0;
  if (json.is_object()) {
    JsonFields named(json, std::string(where));
    config.family = &family_of(named);
    const Json defaults = parse_json(config.family->defaults, config.family->model_type);
    for (const auto& [key, value] : defaults.items()) {
      const auto found = json.find(key);
      // By null: no window, and as many heads as there are queries.
      const bool says_none = (key == "sliding_window" || key == "num_key_value_heads") && found != json.end();
      if (key == "rope_theta") default_theta = value.get<double>();  // a file says it in one of three places
      else if (!says_none && (found == json.end() || found->is_null())) json[key] = value;
    }
  }
  JsonFields fields(json, std::string(where));
  family_of(fields);  // its keys are read
  for (const ConfigField& field : config_fields()) read(config, fields, field);
  settle_heads(config, fields);
  config.rope = rope_of(fields, default_theta, config.max_position_embeddings);
  if (config.family->window_rule != WindowRule::kNone) config.layers = layers_of(config, fields);
  config.bos_token_id = token_id(fields, "bos_token_id", config.vocab_size);
  config.pad_token_id = token_id(fields, "pad_token_id", config.vocab_size);
  config.eos_token_ids = eos_of(fields, config.vocab_size);
  config.dtype = dtype_of(fields);
  if (const Json* quantization = fields.value("quantization_config"))
    config.quantization = parse_quantization_config(*quantization, where);
  judge_other_keys(fields, *config.family);
  return config;
}

ModelConfig load_model_config(const std::string& folder) {
  const FileReader file = FileReader::open_inside(folder, "config.json");
  return parse_model_config(file.read_all(kMaxConfigBytes), file.path());
}

}  // namespace qlorapp::format
