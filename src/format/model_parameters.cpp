// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numbers>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "qlorapp/format/json.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {
namespace {

std::string block_name(int64_t layer) { return message("model.layers.{}.", layer); }

}  // namespace

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

std::vector<ModelParameter> linear_layers(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t queries = config.num_attention_heads * config.head_dim, keys = config.num_key_value_heads * config.head_dim;
  std::vector<ModelParameter> layers;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string block = block_name(layer);
    layers.push_back({block + "self_attn.q_proj", {queries, hidden}});
    layers.push_back({block + "self_attn.k_proj", {keys, hidden}});
    layers.push_back({block + "self_attn.v_proj", {keys, hidden}});
    layers.push_back({block + "self_attn.o_proj", {hidden, queries}});
    layers.push_back({block + "mlp.gate_proj", {inner, hidden}});
    layers.push_back({block + "mlp.up_proj", {inner, hidden}});
    layers.push_back({block + "mlp.down_proj", {hidden, inner}});
  }
  return layers;
}

std::vector<ModelParameter> dense_parameters(const ModelConfig& config) {
  std::vector<ModelParameter> parameters{{"model.embed_tokens.weight", {config.vocab_size, config.hidden_size}}};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    parameters.push_back({block_name(layer) + "input_layernorm.weight", {config.hidden_size}});
    parameters.push_back({block_name(layer) + "post_attention_layernorm.weight", {config.hidden_size}});
  }
  parameters.push_back({"model.norm.weight", {config.hidden_size}});
  if (!config.tie_word_embeddings) parameters.push_back({"lm_head.weight", {config.vocab_size, config.hidden_size}});
  return parameters;
}

int64_t parameter_count(const ModelConfig& config) {
  int64_t count = 0;  // the bounds keep each product below 2^55
  const auto add = [&](const std::vector<ModelParameter>& parameters) {
    for (const ModelParameter& parameter : parameters) {
      int64_t numel = 1;
      for (const int64_t size : parameter.shape) numel *= size;
      QLORAPP_CHECK_VALUE(!__builtin_add_overflow(count, numel, &count),
                          "[model] the number of parameters must be below 2^63; it is not.");
    }
  };
  add(linear_layers(config));
  add(dense_parameters(config));
  return count;
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
