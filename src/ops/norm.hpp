// SPDX-License-Identifier: Apache-2.0
/// RMS normalization with a frozen weight, alone or after the residual addition.
///
///     y = round(round(x · rstd) · weight),   rstd = 1 / sqrt(mean(x²) + eps)       kRoundTwice: LlamaRMSNorm
///     y = round(x · rstd · weight)                                                   kRoundOnce: Olmo2RMSNorm
///     y = round(x · rstd · (1 + weight))                                             kOnePlus: Gemma3RMSNorm
///
/// Statistics in float32, `round` to x's dtype: the rounding points of transformers' classes. A float64 x is computed in
/// float64 throughout, so that gradcheck can be used. x is (…, D), any leading dimensions; rows may lie apart, elements of a
/// row together (else it is copied). weight is (D) in x's dtype on x's device. rstd is float32 (float64 for float64), of x's
/// leading shape; a backward pass needs it and x.
///
/// Gradients go to x only: under autograd a weight that requires one is refused. Nothing here synchronizes.
/// Throws ValueError or TypeError on shapes, dtypes or devices that do not fit.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/family.hpp"

namespace qlorapp::ops {

using format::NormRule;

/// (y, rstd). y contiguous, shape and dtype of x.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                                            NormRule rule = NormRule::kRoundTwice);

/// (sum, y, rstd) with sum = x + residual in x's dtype and y = rms_norm(sum): the residual stream and the next layer's input.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            NormRule rule = NormRule::kRoundTwice);

/// The same into y and rstd (sum, y and rstd). Rows of y may lie any distance apart: the first columns of a wider GEMM input.
/// Outside autograd.
void rms_norm_out(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& y, at::Tensor& rstd,
                  NormRule rule = NormRule::kRoundTwice);
void add_rms_norm_out(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps, at::Tensor& sum,
                      at::Tensor& y, at::Tensor& rstd, NormRule rule = NormRule::kRoundTwice);

/// dx = rstd·(g − x̂·mean(g·x̂)) with g = round(dy·weight), unrounded where y is rounded once, x̂ = x·rstd; float32, rounded once. After add_rms_norm, x is its sum.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                             NormRule rule = NormRule::kRoundTwice);

/// dx += rms_norm_backward(…), each rounded to x's dtype: dx holds the gradient that comes along the residual. dy becomes y of
/// the forward pass, bit for bit: what backward keeps no copy of, from the x that this pass reads anyway. Outside autograd. dx
/// and dy must be contiguous over their last dimension, and share no memory with each other or x.
void rms_norm_backward_(at::Tensor& dx, at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                        NormRule rule = NormRule::kRoundTwice);

}  // namespace qlorapp::ops
