// SPDX-License-Identifier: Apache-2.0
/// Products with both operands in eight bits (torch.float8_e4m3fn: 4 exponent and 3 mantissa bits, up to 448), which Hopper and
/// newer multiply twice as fast as 16 bits.
///
/// Activations and gradients have a scale a row, found as they are rounded. Frozen weights have one scale a stack: their format is a
/// floating-point one, and numbers down to 1/28,672 of the largest keep all three mantissa bits, so that finer scales would gain
/// nothing. None is differentiable.
/// @throws ValueError, TypeError  naming the argument that breaks a rule below.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// The largest number of the format.
inline constexpr double kLargestFloat8 = 448;
/// Rows and columns of weights that become eight bits are multiples of this.
inline constexpr int64_t kFloat8WeightStep = 64;
/// A row that is nowhere as large counts as zero: 448 over it could leave float32.
inline constexpr double kSmallestFloat8Row = 1e-30;

/// Several four-bit weights of as many columns below each other, divided by weight_scale and rounded. Does not synchronize.
/// @param packed, absmax, nested_absmax, nested_offset  as in dequantize_4bit_stack_ (ops/quantize.hpp).
/// @param rows          of each weight; like `columns` multiples of 64.
/// @param weight_scale  () float32, so that no quotient is above 448.
/// @returns (sum of rows, columns), or (columns, sum of rows) with `transpose`.
[[nodiscard]] at::Tensor dequantize_4bit_float8(at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                                                at::TensorList nested_offset, at::IntArrayRef rows, int64_t columns,
                                                int64_t block_size, int64_t nested_block_size, QuantType quant_type,
                                                const at::Tensor& weight_scale, bool transpose);

/// @param x             (M, K) float32, float16 or bfloat16; rows may be apart, K a multiple of 16 and at most 32,768.
/// @param weight_scale  () float32, a factor on every scale: that of the weights this x meets.
/// @returns values (M, K) e4m3; scale (M, 1) float32, a row's largest |x| / 448, or 1 where all are zero (below 1e-30). Does not synchronize.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_rows_float8(const at::Tensor& x,
                                                                      const std::optional<at::Tensor>& weight_scale = std::nullopt);

/// y = scale ∘ (x · wᵀ), summed in float32 as the device's tensor cores do.
/// @param y      (M, N); bfloat16 on a GPU. Rows may be apart.
/// @param x      (M, K) e4m3.  @param scale  (M, 1) float32.
/// @param w      (N, K) e4m3.
/// @param ones   float32 of at least N elements, all 1: the scale of w, which a GPU's library asks for.
void float8_product_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w, const at::Tensor& ones);

}  // namespace qlorapp::ops
