// SPDX-License-Identifier: Apache-2.0
#include "nn/block/block_shape.hpp"

#include <algorithm>
#include <cmath>

#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {

BlockShape BlockShape::of(const format::ModelConfig& config, int64_t index) {
  const format::Family& family = *config.family;
  BlockShape shape{.hidden = config.hidden_size,
                   .intermediate = config.intermediate_size,
                   .heads = config.num_attention_heads,
                   .kv_heads = config.num_key_value_heads,
                   .head_dim = config.head_dim,
                   .rms_norm_eps = config.rms_norm_eps,
                   .norms = {},
                   .linears = {},
                   .biases = format::bias_slots(config),
                   .norm_rule = family.norm_rule,
                   .activation = family.activation,
                   .attention_scale = config.attention_scale(),
                   .residual_factor = config.residual_multiplier,
                   .interleaved = family.interleaved,
                   .turns_before_norm = family.turns_before_norm,
                   .layer = config.layer(index)};
  for (const format::NormRow& row : family.norms) shape.norms.push_back(row.site);
  for (const format::LinearRow& row : family.linears) shape.linears.push_back(row.group);
  return shape;
}

double BlockShape::score_scale() const {
  return attention_scale > 0 ? attention_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

std::optional<size_t> BlockShape::norm_at(format::Site site) const {
  const auto found = std::find(norms.begin(), norms.end(), site);
  if (found == norms.end()) return std::nullopt;
  return static_cast<size_t>(found - norms.begin());
}

}  // namespace qlorapp
