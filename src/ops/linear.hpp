// SPDX-License-Identifier: Apache-2.0
/// Typed calls of the linear operators over a four-bit weight W (out, in), through the dispatcher.
///
///     linear_4bit      y = x · Wᵀ       x (…, in)  → (…, out)        differentiable in x
///     transpose        y = x · W        x (…, out) → (…, in)         which is the gradient of the former
///
/// W has the dtype of x: each value is round_to_dtype(fp32 code * fp32 scale). It never exists as a whole where a device can
/// avoid that: the CPU dequantizes a panel that stays in its caches right before the panel's GEMM, and multiplies up to 16 rows of
/// x with the packed weight itself. Autograd saves the packed tensors only, so a layer costs no dense weight between forward and
/// backward.
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

/// Few rows of x on a GPU, all layers that read it in one launch: y (M, Σ heights) = x · Wᵀ + scaling · (x · Aᵀ) · Bᵀ + bias, x · Aᵀ and the sum rounded.
/// @param packed, …  of each weight, (height, in) one below the other, all of one kind; the nested lists empty without double quantization.
/// @param bias  (Σ heights).  @param a  (Σ r, in) contiguous, of all layers.  @param b  of each (height, r); r of 0: it has no adapter.
/// @pre has_linear_4bit_group().
void linear_4bit_group_(at::Tensor& y, const at::Tensor& x, at::TensorList packed, at::TensorList absmax,
                        at::TensorList nested_absmax, at::TensorList nested_offset, at::IntArrayRef heights, int64_t block_size,
                        int64_t nested_block_size, QuantType quant_type, const std::optional<at::Tensor>& bias,
                        const std::optional<at::Tensor>& a, at::TensorList b, at::ArrayRef<double> scaling);
/// Whether there is such a launch for x of this dtype: sm_90 and newer, 16 bits, up to 128 rows, columns a multiple of 256, blocks of 64.
[[nodiscard]] bool has_linear_4bit_group(at::Device device, at::ScalarType dtype, int64_t rows, int64_t columns, int64_t block_size,
                                         int64_t nested_block_size);
}  // namespace qlorapp::ops
