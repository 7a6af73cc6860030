// SPDX-License-Identifier: Apache-2.0
/// Projections that read the same input, multiplied as one: their dequantized weights stand below each other in a workspace, with
/// the adapters beside and under them, so that base and low-rank update are ONE product each way.
///
///     workspace  [ W₁  s₁B₁  0    ]      forward    u = x·[A₁; A₂]ᵀ          y  = [x | u] · workspace[:N, :]ᵀ
///     (N+P, K+P) [ W₂  0     s₂B₂ ]      backward   v = dy·[s₁B₁ 0; 0 s₂B₂]   dx = [dy | v] · workspace[:, :K]
///                [ A₁             ]
///                [ A₂             ]      P = the ranks' sum, rounded up to kRankStep; other entries are zero
///
/// u and v are written into spare columns behind x and dy, whose buffers are therefore Wide. This is how a GPU runs a block: one
/// dequantization, one large product and one skinny one, instead of those of each projection and an extra pass over y and dx.
/// The formulas are lora_projection.hpp's; sums run in another order, and base and update are rounded once together instead of one
/// after the other. Dropout needs an input of its own for A and takes the separate way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"
#include "nn/views.hpp"

namespace qlorapp {

/// A (M, width) matrix in rows that may be longer: the spare columns take the low-rank product.
struct Wide {
  at::Tensor buffer;  ///< (M, width + spare).
  int64_t width = 0;

  [[nodiscard]] at::Tensor values() const { return columns(buffer, 0, width); }
  [[nodiscard]] int64_t spare() const { return buffer.size(1) - width; }
};

/// A few projections of one block; owns nothing, lives for one call.
class ProjectionStack {
 public:
  /// The padding is zero. Measured on an H200, 8B, r = 16: steps of 64 beat steps of 16 by 1 to 3 % (cuBLAS' tiles), 1B equal.
  static constexpr int64_t kRankStep = 64;
  /// P of a sum of ranks.
  [[nodiscard]] static constexpr int64_t padded(int64_t rank) { return (rank + kRankStep - 1) / kRankStep * kRankStep; }

  /// @param weights, adapters  of the projections from top to bottom, all with the same in_features.
  ProjectionStack(std::span<const FrozenWeight> weights, std::span<const std::optional<LoraAdapter>> adapters);

  [[nodiscard]] int64_t in_features() const { return in_; }
  [[nodiscard]] int64_t out_features() const { return out_; }
  [[nodiscard]] int64_t rank() const { return rank_; }
  /// P: spare columns that x needs in forward and dy in backward. 0 without adapters.
  [[nodiscard]] int64_t spare() const { return spare_; }

  /// Dequantizes and puts the adapters beside. @returns (N + P, K + P) in `dtype`.
  [[nodiscard]] at::Tensor workspace(at::ScalarType dtype) const;

  /// y = x·Wᵀ + s·u·Bᵀ + bias. @param y  (M, N).  @param x  (M, K) with spare() columns or with none; then u goes into a tensor of its own.
  /// @param bias  (N), or undefined. It is added within the product.
  /// @returns u, (M, P), a view of x's spare columns where it has them; undefined without adapters.
  at::Tensor forward(at::Tensor& y, const Wide& x, const at::Tensor& workspace, const at::Tensor& bias = {}) const;
  /// u alone, (M, rank): what a recompute that stops before the projection still needs.
  [[nodiscard]] at::Tensor input_product(const at::Tensor& x, const at::Tensor& workspace) const;
  /// v into the spare columns of dy, and dx = dy·W + v·A unless dx is null.
  /// @param dy  (M, N) with at least spare() spare columns.
  void backward_input(at::Tensor* dx, const Wide& dy, const at::Tensor& workspace) const;
  /// dA += vᵀ·x, dB += s·dyᵀ·u.
  /// @param dy  after backward_input.  @param x  (M, K).  @param u  each projection's part of what forward returned.
  void backward_adapters(const Wide& dy, const at::Tensor& x, std::span<const at::Tensor> u,
                         std::span<const LoraGradients> gradients) const;

 private:
  std::span<const FrozenWeight> weights_;
  std::span<const std::optional<LoraAdapter>> adapters_;
  int64_t in_ = 0, out_ = 0, rank_ = 0, spare_ = 0;
};

}  // namespace qlorapp
