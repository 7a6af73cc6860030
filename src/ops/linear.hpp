// SPDX-License-Identifier: Apache-2.0
/// Typed calls of the linear operators over a four-bit weight W (out, in), through the dispatcher.
///
///     linear_4bit      y = x · Wᵀ       x (…, in)  → (…, out)        differentiable in x
///     transpose        y = x · W        x (…, out) → (…, in)         which is the gradient of the former
///
/// W has the dtype of x: each value is round_to_dtype(fp32 code * fp32 scale). It never exists as a whole where a device can
/// avoid that: the CPU dequantizes a panel that stays in its caches right before the panel's GEMM. Autograd saves the packed
/// tensors only, so a layer costs no dense weight between forward and backward.
/// @throws ValueError, TypeError  if shapes, sizes or dtypes contradict each other. Does not synchronize.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// @param x              float32, float16, bfloat16, or float64 (for gradient checks).
/// @param packed, absmax, nested_absmax, nested_offset  as in ops/quantize.hpp; absmax is float32, or uint8 with the nested
/// two.
/// @param shape          (out, in).
[[nodiscard]] at::Tensor linear_4bit(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                                     const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                                     at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, QuantType quant_type,
                                     bool transpose = false);

/// The same into y, which has the dtype of x and the shape of the result; with `accumulate` it is added to y. Not
/// differentiable.
/// @param y  its last dimension contiguous; may be a column slice of a wider tensor.
void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                     const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                     at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, QuantType quant_type,
                     bool transpose = false, bool accumulate = false);

}  // namespace qlorapp::ops
