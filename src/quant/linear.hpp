// SPDX-License-Identifier: Apache-2.0
/// Products with a QuantizedTensor: the operators of ops/linear.hpp for the value type that layers hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "qlorapp/quant/quantized_tensor.hpp"

namespace qlorapp {

/// y = x · Wᵀ, or x · W with `transpose`. Differentiable in x; saves the packed tensors only.
/// @param x       (…, in), with `transpose` (…, out); float32, float16, bfloat16 or float64.
/// @param weight  (out, in).
/// @returns (…, out), with `transpose` (…, in), in the dtype of x.
[[nodiscard]] at::Tensor linear_4bit(const at::Tensor& x, const QuantizedTensor& weight, bool transpose = false);

/// The same written into y, or added to it. For hand-written forward and backward: no derivative, no allocation in fp32 beyond
/// one panel that is reused.
/// @param y  the result's shape and the dtype of x; its last dimension contiguous. May be columns of a wider tensor.
void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const QuantizedTensor& weight, bool transpose = false,
                     bool accumulate = false);

}  // namespace qlorapp
