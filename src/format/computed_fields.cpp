// SPDX-License-Identifier: Apache-2.0
// The fields of a config that affect results.
#include <nlohmann/json.hpp>

#include "qlorapp/format/model_config.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {
namespace {

using Type = RopeSettings::Type;

template <class Value>
std::string text(const Value& value) {
  return Json(value).dump();
}

/// All that a rope's type reads.
Json as_json(const RopeSettings& rope) {
  return {{"type", to_string(rope.type)},
          {"theta", rope.theta},
          {"width", rope.width},
          {"factor", rope.factor},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"beta_fast", rope.beta_fast},
          {"beta_slow", rope.beta_slow},
          {"truncate", rope.truncate},
          {"short_factor", rope.short_factor},
          {"long_factor", rope.long_factor},
          {"original_max_position_embeddings", rope.original_max_position_embeddings},
          {"attention_factor", rope.attention_factor},
          {"query_beta", rope.query_beta}};
}

}  // namespace

std::vector<std::pair<std::string, std::string>> computed_fields(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::string>> all{{"model_type", text(std::string(config.family->model_type))}};
  static const ModelConfig kDefaults;
  for (const ConfigField& field : config_fields()) {
    const auto value_in = [&](const ModelConfig& of) {
      return std::visit([&](auto member) { return text(of.*member); }, field.member);
    };
    const bool is_set = value_in(config) != value_in(kDefaults);
    const bool counts = field.record == ConfigField::Record::kAlways || (field.record == ConfigField::Record::kIfSet && is_set);
    if (counts) all.emplace_back(field.key, value_in(config));
  }
  const RopeSettings& rope = config.ropes.front();
  const bool scaled = rope.type == Type::kLlama3;
  const auto if_scaled = [&](const auto& value) { return scaled ? text(value) : std::string("null"); };
  all.insert(all.end(), {{"rope_type", text(to_string(rope.type))},
                         {"rope_theta", text(rope.theta)},
                         {"rope_factor", if_scaled(rope.factor)},
                         {"rope_low_freq_factor", if_scaled(rope.low_freq_factor)},
                         {"rope_high_freq_factor", if_scaled(rope.high_freq_factor)},
                         {"rope_original_max_position_embeddings", if_scaled(rope.original_max_position_embeddings)}});
  const bool is_simple = config.ropes.size() == 1 && rope.width == config.head_dim && (scaled || rope.type == Type::kDefault);
  if (!is_simple) {  // which the first version's records lack
    Json ropes = Json::array();
    for (const RopeSettings& one : config.ropes) ropes.push_back(as_json(one));
    all.emplace_back("ropes", ropes.dump());
  }
  if (!config.layers.empty()) {
    Json windows = Json::array(), of_layer = Json::array();
    for (const LayerOptions& layer : config.layers) {
      windows.push_back(layer.window);
      of_layer.push_back(layer.rope);
    }
    all.emplace_back("windows", windows.dump());
    if (config.ropes.size() > 1) all.emplace_back("rope_of_layers", of_layer.dump());
  }
  return all;
}

std::vector<std::string> computed_keys() {
  std::vector<std::string> keys{
      "hidden_act",        "hidden_activation",       "rope_parameters",         "rope_scaling",
      "rope_theta",        "rope_local_base_freq",    "partial_rotary_factor",   "original_max_position_embeddings",
      "no_rope_layers",    "no_rope_layer_interval",  "position_embedding_type", "layer_types",
      "layers_block_type", "sliding_window",          "sliding_window_pattern",  "use_sliding_window",
      "max_window_layers", "shared_intermediate_size"};
  for (const ConfigField& field : config_fields()) {
    if (field.record != ConfigField::Record::kNever) keys.emplace_back(field.key);
  }
  return keys;
}

}  // namespace qlorapp::format
