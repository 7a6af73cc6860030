// SPDX-License-Identifier: Apache-2.0
/// Products of activations with a dense weight, at the speed of the CPU's best instructions and without a whole copy of the
/// weight.
///
/// Where the CPU multiplies bfloat16 or float16 itself, ATen's GEMM is called. Elsewhere ATen's 16-bit GEMM is anything from
/// twice to several hundred times slower than its float32 one, so that panels of the weight are widened (exactly) to float32
/// right before their product; sums are then in float32 and rounded once.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops::cpu {

/// Whether this CPU has matrix or dot-product instructions for a dtype and oneDNN may use them (ONEDNN_MAX_CPU_ISA). float32
/// and float64: true.
bool multiplies_natively(at::ScalarType dtype);

/// out (M, N) = a (M, K) · b (N, K)ᵀ; all of one dtype. `out` may be strided over rows.
void multiply_transposed(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

/// out (M, N) = a (M, K) · b (K, N); all of one dtype.
void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace qlorapp::ops::cpu
