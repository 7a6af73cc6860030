// SPDX-License-Identifier: Apache-2.0
// What of a config enters the computation.
#include <cmath>
#include <numbers>

#include <nlohmann/json.hpp>

#include "qlorapp/format/json.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {

std::vector<std::pair<std::string, std::string>> computed_fields(const ModelConfig& config) {
  const auto text = [](const auto& value) { return Json(value).dump(); };
  const RopeSettings& rope = config.rope;
  const bool scaled = rope.type == RopeSettings::Type::kLlama3;
  const auto if_scaled = [&](const auto& value) { return scaled ? text(value) : std::string("null"); };
  return {{"model_type", text(std::string(config.family->model_type))},
          {"hidden_size", text(config.hidden_size)},
          {"intermediate_size", text(config.intermediate_size)},
          {"num_hidden_layers", text(config.num_hidden_layers)},
          {"num_attention_heads", text(config.num_attention_heads)},
          {"num_key_value_heads", text(config.num_key_value_heads)},
          {"head_dim", text(config.head_dim)},
          {"vocab_size", text(config.vocab_size)},
          {"rms_norm_eps", text(config.rms_norm_eps)},
          {"tie_word_embeddings", text(config.tie_word_embeddings)},
          {"rope_type", text(scaled ? "llama3" : "default")},
          {"rope_theta", text(rope.theta)},
          {"rope_factor", if_scaled(rope.factor)},
          {"rope_low_freq_factor", if_scaled(rope.low_freq_factor)},
          {"rope_high_freq_factor", if_scaled(rope.high_freq_factor)},
          {"rope_original_max_position_embeddings", if_scaled(rope.original_max_position_embeddings)}};
}

std::vector<float> rope_inverse_frequencies(const ModelConfig& config) {
  const RopeSettings& rope = config.rope;
  const auto single = [](double value) { return static_cast<float>(value); };  // a Python float meets a float32 tensor
  const double theta = single(rope.theta);
  std::vector<float> frequencies;
  frequencies.reserve(static_cast<size_t>(config.head_dim / 2));
  for (int64_t i = 0; i < config.head_dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(config.head_dim);
    frequencies.push_back(1.0F / single(std::pow(theta, static_cast<double>(exponent))));
  }
  if (rope.type == RopeSettings::Type::kDefault) return frequencies;

  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const float long_wave = single(original / rope.low_freq_factor), short_wave = single(original / rope.high_freq_factor);
  const float factor = single(rope.factor);
  for (float& frequency : frequencies) {
    const float wave = single(2 * std::numbers::pi) / frequency;
    if (wave > long_wave) {
      frequency /= factor;
    } else if (!(wave < short_wave)) {
      const float blend =
          (single(original) / wave - single(rope.low_freq_factor)) / single(rope.high_freq_factor - rope.low_freq_factor);
      frequency = (1.0F - blend) * frequency / factor + blend * frequency;
    }
  }
  return frequencies;
}

}  // namespace qlorapp::format
