// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_config.hpp"

#include <algorithm>
#include <array>

#include "format/file_reader.hpp"
#include "json_fields.hpp"
#include "model_config_keys.hpp"

namespace qlorapp::format {
namespace {

constexpr const char* kOriginalLength = "original_max_position_embeddings";
constexpr size_t kMaxConfigBytes = size_t{16} << 20;

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
  throw FormatError(message("[{}] architectures must name one of {}; got {}{}. Use a model of a known architecture.",
                            fields.where(), known, got, tells_both ? " with model_type " + printable(*type) : ""));
}

/// Merges the two shapes that transformers wrote over time; where both are there they must agree.
RopeSettings rope_of(JsonFields& fields, const Family& family, int64_t max_positions) {
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
  rope.theta = inner_theta ? *inner_theta : outer_theta.value_or(family.rope_theta);
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

}  // namespace

ModelConfig parse_model_config(std::string_view text, std::string_view where) {
  const Json json = parse_json(text, where, {.max_bytes = kMaxConfigBytes, .max_depth = 16});
  JsonFields fields(json, std::string(where));
  ModelConfig config;
  config.family = &family_of(fields);
  const Family& family = *config.family;
  config.hidden_size = fields.required_integer("hidden_size", 1, kMaxWidth);
  config.intermediate_size = fields.required_integer("intermediate_size", 1, kMaxWidth);
  config.num_hidden_layers = fields.required_integer("num_hidden_layers", 1, kMaxLayers);
  config.num_attention_heads = fields.required_integer("num_attention_heads", 1, kMaxHeads);
  config.num_key_value_heads = fields.integer("num_key_value_heads", 1, kMaxHeads).value_or(config.num_attention_heads);
  config.vocab_size = fields.required_integer("vocab_size", 1, kMaxVocabulary);
  config.max_position_embeddings =
      fields.integer("max_position_embeddings", 1, kMaxPositions).value_or(family.max_position_embeddings);
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    fields.fail("num_key_value_heads", message("must divide num_attention_heads, {}", config.num_attention_heads),
                Json(config.num_key_value_heads));
  }
  const auto head_dim = fields.integer("head_dim", 1, kMaxWidth);
  if (!head_dim && config.hidden_size % config.num_attention_heads != 0) {
    fields.fail("num_attention_heads", message("must divide hidden_size, {}, where head_dim is absent", config.hidden_size),
                Json(config.num_attention_heads));
  }
  config.head_dim = head_dim.value_or(config.hidden_size / config.num_attention_heads);
  if (config.head_dim % 2 != 0)
    fields.fail("head_dim", "must be even, because rotary embeddings rotate pairs", Json(config.head_dim));
  if (config.num_attention_heads * config.head_dim > kMaxWidth) {
    fields.fail("head_dim", message("times num_attention_heads must be at most {}", kMaxWidth), Json(config.head_dim));
  }
  config.rms_norm_eps = fields.number("rms_norm_eps").value_or(family.rms_norm_eps);
  if (!(config.rms_norm_eps > 0 && config.rms_norm_eps < 1))
    fields.fail("rms_norm_eps", "must be between 0 and 1", Json(config.rms_norm_eps));
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings").value_or(family.tie_word_embeddings);
  config.rope = rope_of(fields, family, config.max_position_embeddings);
  config.bos_token_id = token_id(fields, "bos_token_id", config.vocab_size);
  config.pad_token_id = token_id(fields, "pad_token_id", config.vocab_size);
  config.eos_token_ids = eos_of(fields, config.vocab_size);
  config.dtype = dtype_of(fields);
  if (const Json* quantization = fields.value("quantization_config"))
    config.quantization = parse_quantization_config(*quantization, where);
  judge_other_keys(fields, family);
  return config;
}

ModelConfig load_model_config(const std::string& folder) {
  const FileReader file = FileReader::open_inside(folder, "config.json");
  return parse_model_config(file.read_all(kMaxConfigBytes), file.path());
}

}  // namespace qlorapp::format
