// SPDX-License-Identifier: Apache-2.0
/// config.json of a language model: the settings that build it.
///
/// Families are rows of one table, not classes. A key that changes the mathematics and is not supported is refused by name, as is one
/// that misspells a key that is read; a key that is known to change nothing is ignored; an unknown key is logged once; a key that
/// starts with '_' is private to transformers and ignored; a key that names code (auto_map, trust_remote_code) is refused. Both shapes of the rotary settings
/// are read: transformers 4's `rope_theta` and `rope_scaling`, and 5's `rope_parameters`.
///
/// Source: transformers 5.23 `LlamaConfig`, `modeling_rope_utils`.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "qlorapp/format/dtype.hpp"
#include "qlorapp/format/family.hpp"
#include "qlorapp/format/quantization_config.hpp"

namespace qlorapp::format {

struct RopeSettings {
  enum class Type { kDefault, kLlama3 };
  Type type = Type::kDefault;
  double theta = 10000.0;
  /// kLlama3 only. Waves longer than original / low_freq_factor are slowed by `factor`, shorter than original /
  /// high_freq_factor are kept, those between are blended.
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;
};

/// Options of one layer.
struct LayerOptions {
  int64_t window = 0;  ///< A query sees the last so many keys, its own among them; 0: all.

  friend bool operator==(const LayerOptions&, const LayerOptions&) = default;
};

struct ModelConfig {
  const Family* family = nullptr;
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
  bool attention_bias = false, mlp_bias = false;
  RopeSettings rope;
  std::vector<LayerOptions> layers;  ///< Of each layer; empty: all have the defaults.
  std::optional<int64_t> bos_token_id, pad_token_id;
  std::vector<int64_t> eos_token_ids;              ///< Any of them ends a text.
  std::optional<Dtype> dtype;                      ///< Of the stored weights: F32, F16 or BF16.
  std::optional<QuantizationConfig> quantization;  ///< The checkpoint's linear layers are stored in four bits.

  [[nodiscard]] LayerOptions layer(int64_t index) const {
    return layers.empty() ? LayerOptions{} : layers[static_cast<size_t>(index)];
  }
};

/// A scalar key of config.json.
struct ConfigField {
  std::string_view key;
  std::variant<int64_t ModelConfig::*, double ModelConfig::*, bool ModelConfig::*> member;
  double least = 0, most = 1;  ///< Of a number; one that is not an integer lies between them.
  bool required = false;       ///< By every family; else one of the config, of the family's defaults, or derived from others.
  std::string_view doc;
};

/// The table: reading, bounds, docs and computed_fields() loop over it.
[[nodiscard]] std::span<const ConfigField> config_fields();

/// The keys of config.json that determine the result, those that are no scalars among them.
[[nodiscard]] std::vector<std::string> computed_keys();

/// @param where  Names the text in messages.  @throws FormatError naming the key.
[[nodiscard]] ModelConfig parse_model_config(std::string_view json, std::string_view where);

/// Reads folder/config.json. @throws IoError, FormatError.
[[nodiscard]] ModelConfig load_model_config(const std::string& folder);

/// Every field that enters the computation, by its name in config.json (those of the rope settings: "rope_…"), with its value as JSON.
/// Fields that a rope type does not read are null. Two configs that agree in them compute the same from the same weights.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> computed_fields(const ModelConfig& config);

/// The angle by which each pair of a head's elements turns from one position to the next: head_dim / 2 values,
///     default   f_i = theta^(-2i / head_dim)
///     llama3    λ_i = 2π / f_i;  f_i, f_i / factor, or between them (see RopeSettings)
/// computed in float32 in the order of transformers' operations. theta^x is rounded from double here; torch's vectorized power
/// is off by up to one ulp. So most values are transformers' bits, the others within 2 ulp, and within 2 * factor ulp between
/// the two wavelengths of llama3, where the blend subtracts nearly equal numbers.
[[nodiscard]] std::vector<float> rope_inverse_frequencies(const ModelConfig& config);

}  // namespace qlorapp::format
