// SPDX-License-Identifier: Apache-2.0
/// config.json of a language model: the settings that build it.
///
/// Families are rows of one table, not classes. A key that changes the mathematics and is not supported is refused by name, as is one
/// that misspells a key that is read; a key that is known to change nothing is ignored; an unknown key is logged once; a key that
/// starts with '_' is private to transformers and ignored; a key that names code (auto_map, trust_remote_code) is refused. Both shapes of the rotary settings
/// are read: transformers 4's `rope_theta` and `rope_scaling`, and 5's `rope_parameters`. Of a wrapper the text_config is read, and from around
/// it what holds for the whole: dtype, ids of tokens, quantization_config and tie_word_embeddings.
///
/// Source: transformers 5.23, the config class of each family.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "qlorapp/core/error.hpp"
#include "qlorapp/format/dtype.hpp"
#include "qlorapp/format/family.hpp"
#include "qlorapp/format/quantization_config.hpp"
#include "qlorapp/format/rope.hpp"

namespace qlorapp::format {

/// A config that is sound and asks for what the family's row does not compute. Python trains such a model in transformers' code.
class UnsupportedModel : public FormatError {
 public:
  using FormatError::FormatError;
};

/// Options of one layer.
struct LayerOptions {
  int64_t window = 0;  ///< A query sees the last so many keys, its own among them; 0: all.
  size_t rope = 0;     ///< Of ModelConfig::ropes, the one that turns this layer's heads.

  friend bool operator==(const LayerOptions&, const LayerOptions&) = default;
};

struct ModelConfig {
  const Family* family = nullptr;
  const Wrapper* wrapper = nullptr;  ///< That holds the model as its part for text; null: none.
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  bool attention_bias = false, attention_out_bias = false, mlp_bias = false, use_bias = false;
  double query_pre_attn_scalar = 0, attention_multiplier = 0;  ///< Of the scores; 0: absent.
  double embedding_multiplier = 1, residual_multiplier = 1, logits_scaling = 1;
  double final_logit_softcapping = 0;  ///< 0: none.
  std::vector<RopeSettings> ropes{{}};
  std::vector<LayerOptions> layers;  ///< Of each layer; empty: all have the defaults.
  std::optional<int64_t> bos_token_id, pad_token_id;
  std::vector<int64_t> eos_token_ids;              ///< Any of them ends a text.
  std::optional<Dtype> dtype;                      ///< Of the stored weights: F32, F16 or BF16.
  std::optional<QuantizationConfig> quantization;  ///< The checkpoint's linear layers are stored in four bits.
  /// Of a GGUF file: the linear layers' weights that it stores in blocks, by their names.
  std::map<std::string, QuantType> blocks = {};

  [[nodiscard]] LayerOptions layer(int64_t index) const {
    return layers.empty() ? LayerOptions{} : layers[static_cast<size_t>(index)];
  }
  /// Prefix of the names of the decoder's modules: "model.", or of a wrapper "model.language_model.".
  [[nodiscard]] std::string body() const;
  /// Of queries' products with keys: 1 / sqrt(head_dim), or as a key says.
  [[nodiscard]] double attention_scale() const;
  /// Of a token's embedding, to be rounded to the dtype of the table: embedding_multiplier, or sqrt(hidden_size) by the family's row.
  [[nodiscard]] double embedding_factor() const;
};

/// A scalar key of config.json.
struct ConfigField {
  std::string_view key;
  std::variant<int64_t ModelConfig::*, double ModelConfig::*, bool ModelConfig::*> member;
  double least = 0, most = 1;  ///< Of a number; one that is not an integer lies between them.
  bool required = false;       ///< By every family; else one of the config, of the family's defaults, or derived from others.
  std::string_view doc;
  /// Whether runs record the value for a comparison at resume: always, only where it differs from ModelConfig's (fields that were added
  /// later), or never (it computes nothing).
  enum class Record : uint8_t { kAlways, kIfSet, kNever } record = Record::kAlways;
};

/// The table: reading, bounds, docs and computed_fields() loop over it.
[[nodiscard]] std::span<const ConfigField> config_fields();

/// The keys of config.json that determine the result, those that are no scalars among them.
[[nodiscard]] std::vector<std::string> computed_keys();

/// @param where  Names the text in messages.  @throws FormatError naming the key; UnsupportedModel, which is one, naming key and family.
[[nodiscard]] ModelConfig parse_model_config(std::string_view json, std::string_view where);

/// Reads folder/config.json. @throws IoError, FormatError.
[[nodiscard]] ModelConfig load_model_config(const std::string& folder);

/// Every field that enters the computation, by its name in config.json (those of the rope settings: "rope_…"), with its value as JSON.
/// Fields that a rope type does not read are null. Two configs that agree in them compute the same from the same weights.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> computed_fields(const ModelConfig& config);

}  // namespace qlorapp::format
