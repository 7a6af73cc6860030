// SPDX-License-Identifier: Apache-2.0
/// The gated MLP of a block:
///
///     y = (activation(n·W_gateᵀ) ∘ n·W_upᵀ)·W_downᵀ (+ biases, + LoRA)
///
/// The product of the gate is never kept: backward forms it again. A recompute stops before down_proj.
#pragma once

#include "nn/block/block_part.hpp"

namespace qlorapp {

class GatedMlpPart final : public BlockPart {
 public:
  explicit GatedMlpPart(const BlockData& data);

  [[nodiscard]] at::Tensor forward(Wide n, const Call& call, at::Tensor into) const override;
  [[nodiscard]] Pending backward(const Wide& dy, at::Tensor& dn, const BackwardCall& call) const override;
  [[nodiscard]] bool is_tokenwise() const override { return true; }

 private:
  enum Kept : size_t { kGateUp, kCount };  ///< (M, 2·I) and columns behind it.

  [[nodiscard]] size_t kept() const override { return kCount; }
  [[nodiscard]] Wide backward_down(const Wide& dy, const BackwardCall& call) const;

  const BlockData& data_;
};

}  // namespace qlorapp
