// SPDX-License-Identifier: Apache-2.0
/// Causal attention of a block, over an optional cache:
///
///     q, k, v = n·Wᵀ (+ bias, + LoRA)      norm (where the family has one) and RoPE on q and k, in the family's order
///     y = attention(q, k, v)·W_oᵀ (+ bias, + LoRA)
#pragma once

#include "nn/block/block_part.hpp"

namespace qlorapp {

class AttentionPart final : public BlockPart {
 public:
  explicit AttentionPart(const BlockData& data);

  [[nodiscard]] at::Tensor forward(Wide n, const Call& call, at::Tensor into) const override;
  [[nodiscard]] Pending backward(const Wide& dy, at::Tensor& dn, const BackwardCall& call) const override;
  [[nodiscard]] bool is_tokenwise() const override { return false; }
  /// The tensors of `saved` that Keep::kAttentionOnly keeps.
  [[nodiscard]] PartSaved attention_of(PartSaved saved) const;

 private:
  /// Of PartSaved::tensors: (M, (H + 2·H_kv)·d), q and k already turned, or as they were before their norms; (M, H·d) before o_proj; (H, M)
  /// log-sum-exp of the scores.
  enum Kept : size_t { kQkv, kAttended, kLse, kCount };
  struct Heads {
    at::Tensor q, k, v;         ///< (M, H, d), (M, H_kv, d) twice; views.
    at::Tensor q_rstd, k_rstd;  ///< (M) of norms over all heads of a token; else undefined.
  };

  [[nodiscard]] size_t kept() const override { return kCount; }
  /// As attention sees them: q and k turned in place (`turn`: now, else they are), where they are not normed afterwards, or formed anew.
  [[nodiscard]] Heads heads_of(const at::Tensor& qkv, bool turn, const StepContext& context) const;
  /// (M, H, d): what the step's queries see of the rows' keys, which the cache has already.
  [[nodiscard]] at::Tensor cached_attention(const Heads& heads, const CacheRows& rows, const KeyValueCache& entries,
                                            const StepContext& context) const;
  /// The way back: [dq | dk | dv] as the gradient of `qkv`. @param heads  of heads_of().
  void heads_back(const at::Tensor& packed, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& qkv,
                  const Heads& heads, const StepContext& context) const;
  [[nodiscard]] bool norms() const { return data_.shape.norm_at(format::Site::kQuery).has_value(); }
  /// All heads of a token as one.
  [[nodiscard]] bool norms_whole() const { return norms() && data_.norm(format::Site::kQuery).numel() != data_.shape.head_dim; }
  [[nodiscard]] bool turns_in_place() const { return !norms() || data_.shape.turns_before_norm; }
  [[nodiscard]] const Rotation& rotation(const StepContext& context) const { return context.rotations[data_.shape.layer.rope]; }
  /// (M, 1, 1).
  [[nodiscard]] static at::Tensor query_scale(const Rotation& rotation, const StepContext& context, at::ScalarType dtype);

  const BlockData& data_;
};

}  // namespace qlorapp
