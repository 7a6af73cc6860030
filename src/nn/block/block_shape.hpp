// SPDX-License-Identifier: Apache-2.0
/// What one block consists of and how it computes: its family's row and its layer's options, resolved for one config.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// The defaults are Llama's.
struct BlockShape {
  int64_t hidden = 0;        ///< D
  int64_t intermediate = 0;  ///< I
  int64_t heads = 0;         ///< H
  int64_t kv_heads = 0;      ///< H_kv, divides H
  int64_t head_dim = 0;      ///< d, even
  double rms_norm_eps = 1e-6;
  std::vector<format::Site> norms{format::Site::kBeforeAttention, format::Site::kBeforeMlp};  ///< By slot of format::parameters().
  std::vector<format::Group> linears{format::Group::kQkv,    format::Group::kQkv,    format::Group::kQkv, format::Group::kO,
                                     format::Group::kGateUp, format::Group::kGateUp, format::Group::kDown};  ///< By slot.
  std::vector<std::optional<size_t>> biases = {};  ///< For each linear layer its bias' slot, behind the norms; empty: none has one.
  format::NormRule norm_rule = format::NormRule::kRoundTwice;
  format::Activation activation = format::Activation::kSilu;
  double attention_scale = 0;      ///< Of scores; 0: 1 / sqrt(head_dim).
  double residual_factor = 1;      ///< Of what a part adds to the residual stream.
  double stream_scale = 1;         ///< The stream is stored times this power of two.
  bool interleaved = false;        ///< Neighbors of a head turn together, not its halves.
  bool turns_before_norm = false;  ///< Of normed queries and keys. The last rotation of the context is then one that turns nothing.
  format::LayerOptions layer = {};

  /// Of a layer of the config.
  [[nodiscard]] static BlockShape of(const format::ModelConfig& config, int64_t index);

  [[nodiscard]] int64_t attention_width() const { return heads * head_dim; }
  [[nodiscard]] int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  /// Of scores.
  [[nodiscard]] double score_scale() const;
  /// The slot of the norm that acts there.
  [[nodiscard]] std::optional<size_t> norm_at(format::Site site) const;
};

}  // namespace qlorapp
