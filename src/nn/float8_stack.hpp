// SPDX-License-Identifier: Apache-2.0
/// Projections that read the same input, their frozen weights multiplied in eight bits (ops/float8.hpp), their adapters in 16:
///
///     forward    u = x·[A₁; A₂]ᵀ                    y  = round₈(x)·round₈(W)ᵀ + u·[s₁B₁ 0; 0 s₂B₂]ᵀ
///     backward   v = dy·[s₁B₁ 0; 0 s₂B₂]           dx = round₈(dy)·round₈(W) + v·[A₁; A₂]
///
/// Both operands of an eight-bit product lie along the sum, so that backward takes a transposed copy of the weights. Formed anew by
/// every product, nothing is kept; the adapters' gradients are ProjectionStack's. What is rounded away differs between forward and
/// backward: this is not the gradient of what was computed, as in every eight-bit training recipe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"
#include "nn/projection_stack.hpp"

namespace qlorapp {

/// What the products of a stack read beside its weights.
struct Float8Scales {
  at::Tensor weight;  ///< () float32: the stack's largest absmax / 448.
  at::Tensor ones;    ///< float32, as long as the longest side of any stack.
};

class Float8Stack {
 public:
  /// @param weights, adapters  as ProjectionStack's; the weights are four-bit and of one kind.
  Float8Stack(std::span<const FrozenWeight> weights, std::span<const std::optional<LoraAdapter>> adapters,
              const Float8Scales& scales);

  /// Why a stack of these weights cannot be multiplied so; empty if it can.
  [[nodiscard]] static std::string obstacle(std::span<const FrozenWeight> weights);
  /// () float32 on their device. Does not synchronize.
  [[nodiscard]] static at::Tensor weight_scale(std::span<const FrozenWeight> weights);

  /// @param y  (M, N).  @param x  (M, K), rows may be apart. @returns u, (M, ranks); undefined without adapters.
  at::Tensor forward(at::Tensor& y, const at::Tensor& x) const;
  /// u alone.
  [[nodiscard]] at::Tensor input_product(const at::Tensor& x) const;
  /// v into the spare columns of dy, and dx unless it is null.
  void backward_input(at::Tensor* dx, const Wide& dy) const;

 private:
  struct Adapters {
    at::Tensor a, b;  ///< (R, K), (N, R) in 16 bits, b scaled.
  };
  [[nodiscard]] Adapters adapters_as(const at::TensorOptions& options) const;
  [[nodiscard]] at::Tensor weights_in_float8(bool transpose) const;

  std::span<const FrozenWeight> weights_;
  std::span<const std::optional<LoraAdapter>> adapters_;
  const Float8Scales& scales_;
  int64_t in_ = 0, out_ = 0, rank_ = 0;
};

}  // namespace qlorapp
