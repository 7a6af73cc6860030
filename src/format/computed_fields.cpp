// SPDX-License-Identifier: Apache-2.0
// The fields of a config that affect results, and the rotary frequencies that it gives.
#include <cmath>
#include <numbers>

#include <nlohmann/json.hpp>

#include "qlorapp/format/json.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {

namespace {

/// Keys that runs did not record before the engine computed them: absent and false are the same.
bool is_newer(std::string_view key) { return key == "attention_bias" || key == "mlp_bias"; }

}  // namespace

std::vector<std::pair<std::string, std::string>> computed_fields(const ModelConfig& config) {
  const auto text = [](const auto& value) { return Json(value).dump(); };
  std::vector<std::pair<std::string, std::string>> all{{"model_type", text(std::string(config.family->model_type))}};
  for (const ConfigField& field : config_fields()) {
    if (field.key == "max_position_embeddings") continue;  // unless llama3 scales from it, which its own field says
    const std::string value = std::visit([&](auto member) { return text(config.*member); }, field.member);
    if (!is_newer(field.key) || value != "false") all.emplace_back(field.key, value);
  }
  const RopeSettings& rope = config.rope;
  const bool scaled = rope.type == RopeSettings::Type::kLlama3;
  const auto if_scaled = [&](const auto& value) { return scaled ? text(value) : std::string("null"); };
  all.insert(all.end(), {{"rope_type", text(scaled ? "llama3" : "default")},
                         {"rope_theta", text(rope.theta)},
                         {"rope_factor", if_scaled(rope.factor)},
                         {"rope_low_freq_factor", if_scaled(rope.low_freq_factor)},
                         {"rope_high_freq_factor", if_scaled(rope.high_freq_factor)},
                         {"rope_original_max_position_embeddings", if_scaled(rope.original_max_position_embeddings)}});
  if (!config.layers.empty()) {
    Json windows = Json::array();
    for (const LayerOptions& layer : config.layers) windows.push_back(layer.window);
    all.emplace_back("windows", windows.dump());
  }
  return all;
}

std::vector<std::string> computed_keys() {
  std::vector<std::string> keys{"hidden_act",  "rope_parameters", "rope_scaling",       "rope_theta",
                                "layer_types", "sliding_window",  "use_sliding_window", "max_window_layers"};
  for (const ConfigField& field : config_fields()) {
    if (field.key != "max_position_embeddings") keys.emplace_back(field.key);
  }
  return keys;
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
