// SPDX-License-Identifier: Apache-2.0
#include "layer_options.hpp"
#include "model_config_keys.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace qlorapp::format {
namespace {

using Type = RopeSettings::Type;

constexpr const char* kOriginalLength = "original_max_position_embeddings";
constexpr const char *kFull = "full_attention", *kSliding = "sliding_attention";

/// Values that stand beside the settings of one rope, or come from the family.
struct Outside {
  std::optional<double> theta;    ///< Of the file.
  double default_theta = 0;       ///< Of the family.
  double partial = 1;             ///< partial_rotary_factor of file or family.
  std::optional<int64_t> length;  ///< original_max_position_embeddings, which goes before that of the settings.
};

double above_zero(JsonFields& inner, std::string_view key, double value) {
  if (!(value > 0)) inner.fail(key, "must be above 0", Json(value));
  return value;
}

void read_llama3(RopeSettings& rope, JsonFields& inner) {
  rope.low_freq_factor = above_zero(inner, "low_freq_factor", inner.required_number("low_freq_factor"));
  rope.high_freq_factor = inner.required_number("high_freq_factor");
  if (!(rope.high_freq_factor > rope.low_freq_factor))
    inner.fail("high_freq_factor", "must be above low_freq_factor", Json(rope.high_freq_factor));
}

/// 0.1 · mscale · ln(scale) + 1.
double yarn_attention(double scale, double mscale) { return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0; }

void read_yarn(RopeSettings& rope, JsonFields& inner) {
  // transformers takes its default for 0, too.
  const auto or_default = [](std::optional<double> value, double other) { return value.value_or(0) == 0 ? other : *value; };
  rope.beta_fast = above_zero(inner, "beta_fast", or_default(inner.number("beta_fast"), 32.0));
  rope.beta_slow = above_zero(inner, "beta_slow", or_default(inner.number("beta_slow"), 1.0));
  rope.truncate = inner.boolean("truncate").value_or(true);
  if (!(rope.theta > 1)) inner.fail("rope_theta", "must be above 1 with rope type yarn", Json(rope.theta));
  const double mscale = inner.number("mscale").value_or(0), all = inner.number("mscale_all_dim").value_or(0);
  const double usual = mscale != 0 && all != 0 ? yarn_attention(rope.factor, mscale) / yarn_attention(rope.factor, all)
                                               : yarn_attention(rope.factor, 1);
  rope.attention_factor = above_zero(inner, "attention_factor", inner.number("attention_factor").value_or(usual));
  rope.query_beta = inner.number("llama_4_scaling_beta").value_or(0);
  if (rope.query_beta < 0) inner.fail("llama_4_scaling_beta", "must be at least 0", Json(rope.query_beta));
  static_cast<void>(inner.number("max_position_embeddings"));  // Ministral 3 repeats it here
}

std::vector<double> divisors(const RopeSettings& rope, JsonFields& inner, std::string_view key) {
  static const Json kAbsent;
  const Json* const found = inner.value(key);
  const Json& list = found == nullptr ? kAbsent : *found;
  std::vector<double> all;
  for (const Json& value : list) {
    if (list.is_array() && value.is_number() && value.get<double>() > 0) all.push_back(value.get<double>());
  }
  if (!list.is_array() || all.size() != list.size() || std::ssize(all) != rope.width / 2) {
    inner.fail(key, message("must be {} numbers above 0, one for each pair of elements that turns", rope.width / 2), list);
  }
  return all;
}

void read_longrope(RopeSettings& rope, JsonFields& inner) {
  rope.short_factor = divisors(rope, inner, "short_factor");
  rope.long_factor = divisors(rope, inner, "long_factor");
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double usual = rope.factor <= 1 || original <= 1 ? 1.0 : std::sqrt(1 + std::log(rope.factor) / std::log(original));
  rope.attention_factor = above_zero(inner, "attention_factor", inner.number("attention_factor").value_or(usual));
}

Type type_of(JsonFields& inner, const ModelConfig& config) {
  const auto new_type = inner.text("rope_type"), old_type = inner.text("type");
  if (new_type && old_type && *new_type != *old_type)
    inner.fail("type", "must not contradict rope_type", Json(*old_type), "Keep one of them.");
  const std::string name = new_type ? *new_type : old_type.value_or("default");
  const auto names = config.family->longrope_names;
  if (std::find(names.begin(), names.end(), name) != names.end()) return Type::kLongRope;
  for (const Type type : {Type::kDefault, Type::kLinear, Type::kDynamic, Type::kLlama3, Type::kYarn, Type::kLongRope}) {
    if (name == to_string(type)) return type;
  }
  refuse(inner, *config.family, "rope_type", "must be default, linear, dynamic, llama3, yarn or longrope", Json(name));
}

/// @param settings  one rope_parameters or rope_scaling; null: of the type default.
RopeSettings rope_of(const Json* settings, const std::string& prefix, const Outside& outside, const ModelConfig& config,
                     JsonFields& fields) {
  static const Json kNone = Json::object();
  JsonFields inner(settings != nullptr ? *settings : kNone, fields.where(), prefix);
  RopeSettings rope;
  const auto inner_theta = inner.number("rope_theta");
  if (outside.theta && inner_theta && *outside.theta != *inner_theta) {
    fields.fail("rope_theta", "must not contradict the rope settings", Json(*outside.theta), "Keep one of them.");
  }
  rope.theta = inner_theta ? *inner_theta : outside.theta.value_or(outside.default_theta);
  if (!(rope.theta > 0)) fields.fail("rope_theta", "must be above 0", Json(rope.theta));
  const double partial = inner.number("partial_rotary_factor").value_or(outside.partial);
  if (partial != 1 && !accepts(*config.family, "partial_rotary_factor"))
    inner.fail("partial_rotary_factor", "must be 1: rotary embeddings rotate the whole head", Json(partial));
  if (!(partial > 0 && partial <= 1)) inner.fail("partial_rotary_factor", "must be above 0 and at most 1", Json(partial));
  rope.width = static_cast<int64_t>(static_cast<double>(config.head_dim) * partial);
  if (rope.width % 2 != 0 || rope.width == 0) {
    inner.fail("partial_rotary_factor", message("times head_dim, {}, must be an even number", config.head_dim), Json(partial));
  }
  rope.type = type_of(inner, config);
  if (rope.type == Type::kDynamic) {
    rope.original_max_position_embeddings = config.max_position_embeddings;
    static_cast<void>(inner.integer(kOriginalLength, 1, kMaxPositions));   // transformers does not read it either
    if (const auto alpha = inner.number("alpha"); alpha && *alpha != 0) {  // Hunyuan: a fixed stretch of theta, at every length
      rope.theta *=
          std::pow(above_zero(inner, "alpha", *alpha), static_cast<double>(rope.width) / static_cast<double>(rope.width - 2));
      rope.type = Type::kDefault;
      for (const char* unread : {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
        static_cast<void>(inner.number(unread));
    }
  } else if (rope.type != Type::kDefault && rope.type != Type::kLinear) {
    const auto inside = inner.integer(kOriginalLength, 1, kMaxPositions);
    rope.original_max_position_embeddings = outside.length ? *outside.length : inside.value_or(config.max_position_embeddings);
  }
  if (rope.type != Type::kDefault) {
    const bool can_derive = rope.type == Type::kYarn || rope.type == Type::kLongRope;
    const auto factor = inner.number("factor");
    const double lengths = static_cast<double>(config.max_position_embeddings) /
                           static_cast<double>(std::max<int64_t>(rope.original_max_position_embeddings, 1));
    rope.factor = factor || !can_derive ? inner.required_number("factor") : lengths;
    if (!(rope.factor >= 1) && rope.type != Type::kLongRope) inner.fail("factor", "must be at least 1", Json(rope.factor));
  }
  if (rope.type == Type::kLinear && rope.factor == 1) rope.type = Type::kDefault;  // positions are divided by one
  if (rope.type == Type::kLlama3) read_llama3(rope, inner);
  if (rope.type == Type::kYarn) read_yarn(rope, inner);
  if (rope.type == Type::kLongRope) read_longrope(rope, inner);
  // Vision-language models number three axes; those of text are one.
  if (rope.type == Type::kDefault) {
    static_cast<void>(inner.value("mrope_section"));
    static_cast<void>(inner.value("mrope_interleaved"));
  }
  const auto unknown = inner.remaining();
  if (!unknown.empty())
    inner.fail(unknown.front(), message("must be absent with rope type {}", to_string(rope.type)), settings->at(unknown.front()));
  return rope;
}

/// One rope, or one for full and one for sliding layers. Merges the two shapes that transformers wrote over time; where both are there they
/// must agree.
std::vector<RopeSettings> ropes_of(const ModelConfig& config, JsonFields& fields, double default_theta) {
  const Json* scaling = fields.value("rope_scaling");
  const Json* parameters = fields.value("rope_parameters");
  const bool by_type = config.family->rope_rule == RopeRule::kByLayerType;
  const bool is_nested =
      parameters != nullptr && parameters->is_object() && (parameters->contains(kFull) || parameters->contains(kSliding));
  if (scaling != nullptr && parameters != nullptr && !by_type && *scaling != *parameters) {
    fields.fail("rope_scaling", "must not contradict rope_parameters", *scaling, "Keep one of them.");
  }
  Outside outside{
      .theta = fields.number("rope_theta"),
      .default_theta = default_theta,
      .partial = accepts(*config.family, "partial_rotary_factor") ? fields.number("partial_rotary_factor").value_or(1) : 1,
      .length = fields.integer(kOriginalLength, 1, kMaxPositions)};
  if (!by_type) {
    const Json* settings = parameters != nullptr ? parameters : scaling;
    if (is_nested && accepts(*config.family, "layer_types")) {  // equal for every layer, where the family has one rule for all
      const Json* const one = parameters->contains(kFull) ? &parameters->at(kFull) : &parameters->at(kSliding);
      for (const auto& [key, value] : parameters->items()) {
        if (value != *one) fields.fail("rope_parameters", "must be the same for each type of layer", *parameters);
      }
      settings = one->is_null() ? nullptr : one;
    }
    return {rope_of(settings, parameters != nullptr ? "rope_parameters." : "rope_scaling.", outside, config, fields)};
  }
  // Full layers have the scaling and the theta of older files, sliding ones a theta of their own.
  const auto own = [&](const char* type) -> const Json* {
    if (parameters == nullptr) return nullptr;
    const auto found = parameters->find(type);
    return found == parameters->end() || found->is_null() ? nullptr : &*found;
  };
  const auto prefix = [&](const char* type) {
    return parameters == nullptr ? std::string("rope_scaling.") : message("rope_parameters.{}.", type);
  };
  if (parameters != nullptr && parameters->is_object()) {
    for (const auto& [key, value] : parameters->items()) {
      if (key != kFull && key != kSliding)
        fields.fail("rope_parameters", message("must have the keys {} and {} alone", kFull, kSliding), Json(key));
    }
  }
  const RopeSettings full = rope_of(parameters == nullptr ? scaling : own(kFull), prefix(kFull), outside, config, fields);
  outside.theta = fields.number("rope_local_base_freq");
  if (own(kSliding) != nullptr && own(kSliding)->contains("rope_theta")) outside.theta.reset();
  return {full, rope_of(own(kSliding), prefix(kSliding), outside, config, fields)};
}

/// no_rope_layers, an entry for each layer: 1 where positions turn heads; or by the interval of those where they do not.
std::vector<bool> turning_layers(const ModelConfig& config, JsonFields& fields) {
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  const int64_t interval = fields.integer("no_rope_layer_interval", 1, kMaxPositions).value_or(kMaxPositions);
  std::vector<bool> turns(layers);
  const Json* const list = fields.value("no_rope_layers");
  if (list == nullptr || (list->is_array() && list->empty())) {
    for (size_t i = 0; i < layers; ++i) turns[i] = (static_cast<int64_t>(i) + 1) % interval != 0;
    return turns;
  }
  const auto is_flag = [](const Json& value) { return value.is_boolean() || value == 0 || value == 1; };
  if (!list->is_array() || list->size() != layers || !std::all_of(list->begin(), list->end(), is_flag)) {
    fields.fail("no_rope_layers",
                message("must have an entry for each of the {} layers, 1 where heads turn and 0 where they do not", layers), *list);
  }
  for (size_t i = 0; i < layers; ++i) turns[i] = (*list)[i] == 1 || (*list)[i] == true;
  return turns;
}

/// By layer_types, or else by the family's rule: the window of each layer, 0 for none.
std::vector<int64_t> windows_of(const ModelConfig& config, JsonFields& fields, const std::vector<bool>& turns) {
  const WindowRule rule = config.family->window_rule;
  const int64_t window = fields.integer("sliding_window", 0, kMaxPositions).value_or(0);
  const bool by_choice = rule == WindowRule::kFromMaxWindowLayers || rule == WindowRule::kNoRopeLayers;
  const bool uses = fields.boolean("use_sliding_window").value_or(!by_choice);
  const int64_t first = fields.integer("max_window_layers", 0, kMaxPositions).value_or(config.num_hidden_layers);
  // EXAONE 4 writes a pattern as text, "LLLG", beside layer_types.
  const Json* const pattern = fields.value("sliding_window_pattern");
  const int64_t every = pattern != nullptr && pattern->is_number_integer()
                            ? fields.integer("sliding_window_pattern", 0, kMaxPositions).value_or(0)
                            : 0;
  const auto slides = [&](int64_t i) {
    if (window == 0 || !uses) return false;
    if (rule == WindowRule::kFromMaxWindowLayers) return i >= first;
    if (rule == WindowRule::kNoRopeLayers) return !turns[static_cast<size_t>(i)];
    return rule == WindowRule::kAll || (every > 0 && (i + 1) % every != 0);
  };
  const auto types = fields.texts(fields.value("layer_types") == nullptr ? "layers_block_type" : "layer_types");
  if (types && std::ssize(*types) != config.num_hidden_layers) {
    fields.fail("layer_types", message("must have an entry for each of the {} layers", config.num_hidden_layers),
                Json(types->size()));
  }
  std::vector<int64_t> windows(static_cast<size_t>(config.num_hidden_layers));
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string type = types ? (*types)[static_cast<size_t>(i)] : slides(i) ? kSliding : kFull;
    if (type != kFull && type != kSliding && type != "attention")
      refuse(fields, *config.family, "layer_types", message("must be {} or {}", kFull, kSliding), Json(type));
    if (types && !accepts(*config.family, "layer_types") && (type == kSliding) != slides(i)) {
      refuse(fields, *config.family, "layer_types",
             message("must be {} in layer {}, as every layer has the same window,", slides(i) ? kSliding : kFull, i), Json(type));
    }
    if (type != kSliding) continue;
    if (window == 0 || !uses) fields.fail("layer_types", "needs a sliding_window that is in use", Json(type));
    windows[static_cast<size_t>(i)] = window;
  }
  return windows;
}

}  // namespace

void settle_layers(ModelConfig& config, JsonFields& fields, double default_theta) {
  const Family& family = *config.family;
  config.ropes = ropes_of(config, fields, default_theta);
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  std::vector<bool> turns(layers, true);
  if (family.rope_rule == RopeRule::kNoRopeLayers) turns = turning_layers(config, fields);
  std::vector<int64_t> windows(layers);
  if (family.window_rule != WindowRule::kNone) windows = windows_of(config, fields, turns);
  if (family.rope_rule == RopeRule::kIfNamed) {
    const auto name = fields.text("position_embedding_type");
    if (name && *name != "rope" && *name != "nope")
      fields.fail("position_embedding_type", "must be rope, nope or null", Json(*name));
    turns.assign(layers, name == "rope");
  }
  if (family.rope_rule == RopeRule::kSlidingOnly && fields.integer("sliding_window", 0, kMaxPositions).value_or(0) > 0) {
    for (size_t i = 0; i < layers; ++i) turns[i] = windows[i] > 0;
  }
  if (family.turns_before_norm || std::find(turns.begin(), turns.end(), false) != turns.end()) {
    RopeSettings none{.type = Type::kNone, .width = config.head_dim, .short_factor = {}, .long_factor = {}};
    config.ropes.push_back(std::move(none));
  }
  config.layers.resize(layers);
  for (size_t i = 0; i < layers; ++i) {
    const bool is_other = family.rope_rule == RopeRule::kByLayerType ? windows[i] > 0 : !turns[i];
    config.layers[i] = {windows[i], is_other ? size_t{1} : size_t{0}};
  }
  if (std::all_of(config.layers.begin(), config.layers.end(), [](const LayerOptions& layer) { return layer == LayerOptions{}; }))
    config.layers.clear();
}

}  // namespace qlorapp::format
