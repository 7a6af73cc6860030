// SPDX-License-Identifier: Apache-2.0
// A tensor as rows, on any device: (…, n) becomes (rows, n) with contiguous elements and any distance between rows.
#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/reshape.h>

namespace qlorapp::ops {

/// A view when the layout allows one, else a copy.
inline at::Tensor as_rows(const at::Tensor& x) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

/// For a tensor that the kernel writes: always a view.
inline at::Tensor as_written_rows(std::string_view op, std::string_view name, const at::Tensor& x) {
  const at::Tensor rows = as_rows(x);
  TORCH_CHECK_VALUE(rows.is_alias_of(x) && (rows.size(0) <= 1 || rows.stride(0) >= rows.size(1)), "[", op, "] ", name,
                    " must have contiguous rows at even distances, because it is written; got sizes ", x.sizes(), " and strides ",
                    x.strides(), ". Pass a contiguous tensor.");
  return rows;
}

}  // namespace qlorapp::ops
