// SPDX-License-Identifier: Apache-2.0
#include "gguf_model.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kAdvice = "Use the merged checkpoint with another server.";

[[noreturn]] void refuse(const ModelConfig& config, const std::string& rule) {
  throw UnsupportedModel(message("[export] {}: llama.cpp {}. {}", config.family->architecture, rule, kAdvice));
}

std::string_view name_of(const ModelConfig& config, Site site) {
  switch (site) {
    case Site::kBeforeAttention:
      return "attn_norm";
    case Site::kAfterAttention:
      return "post_attention_norm";
    case Site::kBeforeMlp:
      return config.family->gguf.mlp_norm;
    case Site::kAfterMlp:
      return "post_ffw_norm";
    case Site::kQuery:
      return "attn_q_norm";
    case Site::kKey:
      return "attn_k_norm";
  }
  throw Error("[export] a norm without a place");
}

/// Of the i-th of `count` layers of a group.
std::string_view name_of(Group group, size_t i, size_t count) {
  switch (group) {
    case Group::kQkv:
      return count == 1 ? "attn_qkv" : i == 0 ? "attn_q" : i == 1 ? "attn_k" : "attn_v";
    case Group::kO:
      return "attn_output";
    case Group::kGateUp:
      return count == 1 || i == 1 ? "ffn_up" : "ffn_gate";
    case Group::kDown:
      return "ffn_down";
  }
  throw Error("[export] a layer without a group");
}

/// Which of its group's layers it is, and of how many.
std::pair<size_t, size_t> place_in_group(const Family& family, const LinearRow& row) {
  size_t index = 0, count = 0;
  for (const LinearRow& other : family.linears) {
    if (other.group != row.group) continue;
    if (other.path == row.path) index = count;
    ++count;
  }
  return {index, count};
}

/// Parts of linear layers and their biases: `row` is the parameter's row of the family.
void add_linear(const ModelConfig& config, const Parameter& parameter, const LinearRow& row, std::vector<GgufPart>& parts) {
  const Family& family = *config.family;
  const auto [index, count] = place_in_group(family, row);
  const bool is_bias = parameter.role == Role::kBias;
  const std::string_view suffix = is_bias ? "bias" : "weight";
  if (is_bias && std::ranges::find(family.gguf.biases, row.group) == family.gguf.biases.end())
    refuse(config, message("has no bias for {}", row.path));
  GgufPart part{message("blk.{}.{}.{}", parameter.layer, gguf_name(family, row), suffix), parameter.name(), parameter.shape};
  part.role = parameter.role;
  part.layer = parameter.layer;
  const bool turns = row.group == Group::kQkv && index < 2;
  if (turns && family.gguf.turns_neighbors && !family.interleaved) part.heads = parameter.shape[0] / config.head_dim;
  if (row.group == Group::kGateUp && count == 1 && family.gguf.splits_gate_up) {
    part.shape[0] /= 2;
    GgufPart gate = part;
    gate.name = message("blk.{}.ffn_gate.{}", parameter.layer, suffix);
    part.first_row = part.shape[0];
    parts.push_back(std::move(gate));
  }
  parts.push_back(std::move(part));
}

/// The rope of layers that see all keys, or else of any that turn heads.
const RopeSettings& main_rope(const ModelConfig& config) {
  const RopeSettings* found = &config.ropes[config.layer(0).rope];
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const RopeSettings& rope = config.ropes[config.layer(i).rope];
    if (rope.type == RopeSettings::Type::kNone) continue;
    if (config.layer(i).window == 0) return rope;
    if (found->type == RopeSettings::Type::kNone) found = &rope;
  }
  return *found;
}

/// What frequencies are divided by, where that is not the same for all: llama3 and longrope.
std::vector<float> divisors_of(const RopeSettings& rope) {
  RopeSettings plain = rope;
  plain.type = RopeSettings::Type::kDefault;
  const std::vector<float> usual = rope_inverse_frequencies(plain), own = rope_inverse_frequencies(rope);
  std::vector<float> divisors(usual.size());
  for (size_t i = 0; i < usual.size(); ++i) divisors[i] = usual[i] / own[i];
  return divisors;
}

void add_rope(const ModelConfig& config, std::vector<GgufPart>& parts) {
  const RopeSettings& rope = main_rope(config);
  const auto add = [&](std::string name, std::vector<float> values) {
    GgufPart part{std::move(name), "", {std::ssize(values)}};
    part.values = std::move(values);
    part.role = Role::kNorm;
    parts.push_back(std::move(part));
  };
  if (rope.type == RopeSettings::Type::kLlama3) add("rope_freqs.weight", divisors_of(rope));
  // Angles of 0: llama.cpp turns the heads of all layers.
  if (rope.type == RopeSettings::Type::kNone)
    add("rope_freqs.weight", std::vector<float>(static_cast<size_t>(config.head_dim) / 2, 1e30f));
  if (rope.type == RopeSettings::Type::kLongRope) {
    add("rope_factors_long.weight", {rope.long_factor.begin(), rope.long_factor.end()});
    add("rope_factors_short.weight", {rope.short_factor.begin(), rope.short_factor.end()});
  }
}

/// Of layers with a window, all but each n-th: n. None: no layer has one.
std::optional<int64_t> window_period(const ModelConfig& config) {
  std::vector<bool> has(static_cast<size_t>(config.num_hidden_layers));
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) has[static_cast<size_t>(i)] = config.layer(i).window > 0;
  if (std::ranges::find(has, true) == has.end()) return std::nullopt;
  const auto fits = [&](int64_t period) {
    for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
      if (has[static_cast<size_t>(i)] != (i % period < period - 1)) return false;
    }
    return true;
  };
  for (int64_t period = 2; period <= config.num_hidden_layers + 1; ++period) {
    if (fits(period)) return period;
  }
  refuse(config, "computes windows in all layers but each n-th; layer_types has another order");
}

int64_t largest_window(const ModelConfig& config) {
  int64_t window = 0;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) window = std::max(window, config.layer(i).window);
  return window;
}

/// What scores are to be multiplied by on top of llama.cpp's own scale.
double scale_beyond(const ModelConfig& config) {
  const GgufRow& row = config.family->gguf;
  if (row.has_multipliers) return 1;  // a key says it
  const bool wide = row.wide_scale_depth > 0 && config.num_hidden_layers == row.wide_scale_depth;
  const int64_t width = wide ? config.hidden_size / config.num_attention_heads : config.head_dim;
  return config.attention_scale() * std::sqrt(static_cast<double>(width));
}

bool is_one(double factor) { return std::fabs(factor - 1) < 1e-6; }

/// As far as llama.cpp computes the same.
int64_t context_length(const ModelConfig& config) {
  int64_t length = config.max_position_embeddings;
  const RopeSettings& rope = main_rope(config);
  if (rope.type == RopeSettings::Type::kDynamic) length = std::min(length, rope.original_max_position_embeddings);
  const int64_t window = largest_window(config);
  if (window > 0 && !config.family->gguf.has_windows) length = std::min(length, window);
  if (length < config.max_position_embeddings) {
    log_warning(message(
        "[export] context_length is {} in the file, not {}: llama.cpp computes this family without {}, which changes nothing "
        "up to there.",
        length, config.max_position_embeddings, window == length ? "sliding windows" : "dynamic rope scaling"));
  }
  return length;
}

/// Which layers turn nothing, by llama.cpp's rule; all of them is a key.
void check_layers_without_rope(const ModelConfig& config) {
  const GgufRow& row = config.family->gguf;
  const auto is_none = [&](int64_t i) { return config.ropes[config.layer(i).rope].type == RopeSettings::Type::kNone; };
  if (row.has_multipliers && is_none(0)) return;
  const bool by_windows = config.family->rope_rule == RopeRule::kSlidingOnly && largest_window(config) > 0;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const bool expected = row.no_rope_step > 0 ? (i + 1) % row.no_rope_step == 0 : by_windows && config.layer(i).window == 0;
    if (is_none(i) != expected)
      refuse(config, message("does not turn the heads of layer {} as this config does (no_rope_layers)", i));
  }
}

class Keys {
 public:
  Keys(std::string_view architecture, GgufMetadata& out) : architecture_(architecture), out_(out) {}
  void add(std::string_view key, GgufValue value) { out_.emplace_back(message("{}.{}", architecture_, key), std::move(value)); }
  void number(std::string_view key, int64_t value) { add(key, static_cast<uint32_t>(value)); }
  void real(std::string_view key, double value) { add(key, static_cast<float>(value)); }

 private:
  std::string_view architecture_;
  GgufMetadata& out_;
};

void add_rope_keys(const ModelConfig& config, Keys& keys) {
  const RopeSettings& rope = main_rope(config);
  keys.number("rope.dimension_count", rope.width > 0 ? rope.width : config.head_dim);
  keys.real("rope.freq_base", rope.theta);
  switch (rope.type) {
    case RopeSettings::Type::kDefault:
    case RopeSettings::Type::kLlama3:
    case RopeSettings::Type::kDynamic:
      return;
    case RopeSettings::Type::kLinear:
      keys.add("rope.scaling.type", std::string("linear"));
      keys.real("rope.scaling.factor", rope.factor);
      return;
    case RopeSettings::Type::kYarn:
      if (!rope.truncate) refuse(config, "computes rope type yarn with truncate=true alone");
      keys.add("rope.scaling.type", std::string("yarn"));
      keys.real("rope.scaling.factor", rope.factor);
      keys.number("rope.scaling.original_context_length", rope.original_max_position_embeddings);
      keys.real("rope.scaling.yarn_beta_fast", rope.beta_fast);
      keys.real("rope.scaling.yarn_beta_slow", rope.beta_slow);
      keys.real("rope.scaling.attn_factor", rope.attention_factor / (0.1 * std::log(rope.factor) + 1));  // on top of its own
      return;
    case RopeSettings::Type::kLongRope:
      keys.number("rope.scaling.original_context_length", rope.original_max_position_embeddings);
      keys.real("rope.scaling.attn_factor", rope.attention_factor);
      return;
    case RopeSettings::Type::kNone:
      return;
  }
}

}  // namespace

std::string_view gguf_name(const Family& family, const LinearRow& row) {
  const auto [index, count] = place_in_group(family, row);
  return name_of(row.group, index, count);
}

std::vector<GgufPart> gguf_parts(const ModelConfig& config) {
  const Family& family = *config.family;
  if (family.gguf.architecture.empty()) refuse(config, "does not compute this family");
  std::vector<GgufPart> parts;
  const bool one_plus = family.norm_rule == NormRule::kOnePlus;
  for (const Parameter& parameter : parameters(config)) {
    GgufPart part{"", parameter.name(), parameter.shape};
    part.role = parameter.role;
    part.layer = parameter.layer;
    switch (parameter.role) {
      case Role::kEmbedding:
        part.name = "token_embd.weight";
        break;
      case Role::kHead:
        part.name = "output.weight";
        break;
      case Role::kNorm:
        part.adds_one = one_plus;
        if (parameter.layer >= 0 && family.norms[parameter.slot].site == Site::kQuery && !is_one(scale_beyond(config)))
          part.factor = scale_beyond(config);
        part.name = parameter.layer < 0
                        ? std::string("output_norm.weight")
                        : message("blk.{}.{}.weight", parameter.layer, name_of(config, family.norms[parameter.slot].site));
        break;
      case Role::kBias:
      case Role::kLinear:
        for (const LinearRow& row : family.linears) {
          if (parameter.module.ends_with(message(".{}", row.path))) add_linear(config, parameter, row, parts);
        }
        continue;
    }
    parts.push_back(std::move(part));
  }
  add_rope(config, parts);
  return parts;
}

GgufMetadata gguf_hyperparameters(const ModelConfig& config) {
  const GgufRow& row = config.family->gguf;
  if (row.architecture.empty()) refuse(config, "does not compute this family");
  GgufMetadata out;
  Keys keys(row.architecture, out);
  keys.number("vocab_size", config.vocab_size);
  keys.number("context_length", context_length(config));
  keys.number("embedding_length", config.hidden_size);
  keys.number("block_count", config.num_hidden_layers);
  keys.number("feed_forward_length", config.intermediate_size);
  keys.number("attention.head_count", config.num_attention_heads);
  keys.number("attention.head_count_kv", config.num_key_value_heads);
  keys.number("attention.key_length", config.head_dim);
  keys.number("attention.value_length", config.head_dim);
  keys.real("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  add_rope_keys(config, keys);
  if (row.has_multipliers) {
    keys.real("attention.scale", config.attention_scale());
    keys.real("embedding_scale", config.embedding_multiplier);
    keys.real("residual_scale", config.residual_multiplier);
    keys.real("logit_scale", config.logits_scaling);
  }
  const bool has_query_norm = std::ranges::any_of(config.family->norms, [](const auto& norm) { return norm.site == Site::kQuery; });
  if (!has_query_norm && !is_one(scale_beyond(config)))
    refuse(config, message("scales scores by {:.6g}; the config has {:.6g}", config.attention_scale() / scale_beyond(config),
                           config.attention_scale()));
  if (config.final_logit_softcapping > 0) keys.real("final_logit_softcapping", config.final_logit_softcapping);
  check_layers_without_rope(config);
  if (row.has_windows) {
    if (const auto period = window_period(config)) {
      if (row.windowed_depth > 0 && config.num_hidden_layers != row.windowed_depth)
        refuse(config, message("computes sliding windows in models of {} layers alone; this one has {}", row.windowed_depth,
                               config.num_hidden_layers));
      keys.number("attention.sliding_window", largest_window(config));
      keys.number("attention.sliding_window_pattern", *period);
    }
  }
  if (main_rope(config).query_beta > 0) keys.real("attention.temperature_scale", main_rope(config).query_beta);
  return out;
}

}  // namespace qlorapp::format
