// SPDX-License-Identifier: Apache-2.0
/// y = x · Wᵀ or y += x · Wᵀ of few rows of x, as in decoding, without a GEMM (few_rows_kernel.hpp).
#pragma once

#include <ATen/core/Tensor.h>

#include "dequantize_4bit_kernel.hpp"

namespace qlorapp::ops::cpu {

/// With more rows a GEMM over dequantized panels is as fast.
inline constexpr int64_t kFewRows = 16;

/// @param y  (M, N) in the dtype of x, its last dimension contiguous.  @param x  (M, K), M >= 1.
/// @param weight  (rows, K).
/// @returns false, and does nothing, where no kernel takes this dtype, these columns or this kind of blocks.
[[nodiscard]] bool multiply_few_rows(const at::Tensor& y, const at::Tensor& x, const Dequantize4bit& weight, int64_t rows,
                                     bool accumulate);
/// The same of a dense weight (N, K) in 16 bits.
[[nodiscard]] bool multiply_few_rows(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, bool accumulate);

}  // namespace qlorapp::ops::cpu
