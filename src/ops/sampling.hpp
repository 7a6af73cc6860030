// SPDX-License-Identifier: Apache-2.0
/// The next token's choice on a GPU, one launch each (cuda/sampling.hpp). Ask computes_on_gpu: a CPU has its own way (nn/sampling.cpp).
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// Scores that top_k (0: off), then top_p (1: off), then min_p (0: off) exclude become −inf.
/// @param scores  (R, V) float32, contiguous. Does not synchronize.
void keep_likely_tokens_(at::Tensor& scores, int64_t top_k, double top_p, double min_p);

/// By inverse cumulative probability.
/// @param scores  (R, V) float32, contiguous.  @param draws  (R) float64 in [0, 1), on the same device.
/// @returns (R) int64. Does not synchronize.
[[nodiscard]] at::Tensor draw_tokens(const at::Tensor& scores, const at::Tensor& draws);

}  // namespace qlorapp::ops
