// SPDX-License-Identifier: Apache-2.0
/// A frozen weight and the low-rank update beside it, as LoraLinear and the decoder's blocks hold them.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/quant/quantized_tensor.hpp"

namespace qlorapp {

/// A frozen weight (out, in), four-bit or dense.
struct FrozenWeight {
  QuantizedTensor quantized;
  at::Tensor dense;  ///< Used when `quantized` is not defined; in the compute dtype.

  FrozenWeight() = default;
  explicit FrozenWeight(QuantizedTensor weight) : quantized(std::move(weight)) {}
  explicit FrozenWeight(at::Tensor weight) : dense(std::move(weight)) {}

  [[nodiscard]] int64_t out_features() const { return quantized.defined() ? quantized.shape[0] : dense.size(0); }
  [[nodiscard]] int64_t in_features() const { return quantized.defined() ? quantized.shape[1] : dense.size(1); }
  /// Of the stored weight: codes and scales, or the dense tensor.
  [[nodiscard]] Bytes nbytes() const;
  /// The same weight on another device. Copies only what is not there yet.
  [[nodiscard]] FrozenWeight to(at::Device device) const;
  /// y = x·Wᵀ, or y += that. y (M, out) may be a column slice of a wider buffer.
  void forward_out(at::Tensor& y, const at::Tensor& x, bool accumulate = false) const;
  /// dx = dy·W, or dx += dy·W.
  void backward_out(at::Tensor& dx, const at::Tensor& dy, bool accumulate) const;
};

struct LoraAdapter {
  at::Tensor a;                         ///< (r, in) float32.
  at::Tensor b;                         ///< (out, r) float32.
  double scaling = 1;                   ///< alpha / r, or alpha / sqrt(r) with rsLoRA.
  double dropout = 0;                   ///< Probability, in [0, 1).
  at::Tensor magnitude = {};            ///< (out) float32 with DoRA, else undefined.
  at::Tensor weight_norm_squared = {};  ///< (out) float32 with DoRA: squared_row_norms of the frozen weight.
};

/// Float weights of linear layers before they were quantized, by module name; undefined where there is none.
using WeightSource = std::function<at::Tensor(const std::string& module)>;

}  // namespace qlorapp
