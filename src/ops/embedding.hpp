// SPDX-License-Identifier: Apache-2.0
/// Rows of a frozen embedding table.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// @param weight  (V, D), floating; rows may lie apart. On the device of tokens, or in pinned host memory, which a GPU reads row by row.
/// @param tokens  (M) int64, in [0, V).
/// @returns (M, D), contiguous, dtype of weight, on the device of tokens. Not differentiable. Does not synchronize.
/// @throws c10::IndexError for a token outside the table on the CPU; on a GPU its row is NaN.
[[nodiscard]] at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens);

}  // namespace qlorapp::ops
