// SPDX-License-Identifier: Apache-2.0
/// Causal attention of a block, over an optional cache:
///
///     q, k, v = n·Wᵀ (+ bias, + LoRA)      norm of each head (where the family has one) and RoPE on q and k
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
    at::Tensor q, k, v;  ///< (M, H, d), (M, H_kv, d) twice; views.
  };

  [[nodiscard]] size_t kept() const override { return kCount; }
  /// As attention sees them. Turns q and k in place (`turn`), or forms those of normed heads.
  [[nodiscard]] Heads heads_of(const at::Tensor& qkv, bool turn, const StepContext& context) const;
  [[nodiscard]] bool norms_heads() const { return data_.shape.norm_at(format::Site::kQuery).has_value(); }
  [[nodiscard]] double scale() const;

  const BlockData& data_;
};

}  // namespace qlorapp
