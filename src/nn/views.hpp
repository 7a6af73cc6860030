// SPDX-License-Identifier: Apache-2.0
/// Parts of matrices: a call of the dispatcher each, where narrow() has three and t() too. A step makes hundreds.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// Columns [begin, begin + width) of (M, N).
inline at::Tensor columns(const at::Tensor& matrix, int64_t begin, int64_t width) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(0 <= begin && begin + width <= matrix.size(1));
  return matrix.as_strided({matrix.size(0), width}, matrix.strides(), matrix.storage_offset() + begin * matrix.stride(1));
}

/// Rows [begin, begin + count) of (M, N).
inline at::Tensor rows(const at::Tensor& matrix, int64_t begin, int64_t count) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(0 <= begin && begin + count <= matrix.size(0));
  return matrix.as_strided({count, matrix.size(1)}, matrix.strides(), matrix.storage_offset() + begin * matrix.stride(0));
}

/// (M, N) as (N, M).
inline at::Tensor transposed(const at::Tensor& matrix) {
  return matrix.as_strided({matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)}, matrix.storage_offset());
}

}  // namespace qlorapp
