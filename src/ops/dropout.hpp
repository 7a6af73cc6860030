// SPDX-License-Identifier: Apache-2.0
/// Dropout whose mask needs no memory: it is formed again wherever it is needed.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/philox.hpp"

namespace qlorapp::ops {

/// @param x  any shape, floating; read in row-major order whatever its strides.
/// @param p  probability of zeroing an element, in [0, 1).
/// @returns  x * mask / (1 - p), shape and dtype of x, contiguous; the product is rounded once. The same mask again for the same
///           key, so that the backward pass is the same call on the gradient. With key.first, what the whole tensor's call gives its rest
///           from that element on. Differentiable. Does not synchronize.
[[nodiscard]] at::Tensor seeded_dropout(const at::Tensor& x, double p, const DropoutKey& key);

}  // namespace qlorapp::ops
