// SPDX-License-Identifier: Apache-2.0
/// Products with a dense weight (N, K), as linear.hpp's with a four-bit one. Not differentiable.
///
/// Few rows of x in 16 bits on a CPU, as in decoding, take a kernel that reads the weight once, in streams (cpu/few_rows_kernel.hpp); the rest
/// is ATen's GEMM.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// y (M, N) = [y +] x (M, K) · Wᵀ. On Meta nothing happens.
/// @param y  its last dimension contiguous; may be a column slice of a wider tensor.
void dense_linear_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, bool accumulate = false);

/// x (…, K) · Wᵀ. With a gradient to keep it is at::linear.
[[nodiscard]] at::Tensor dense_linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace qlorapp::ops
