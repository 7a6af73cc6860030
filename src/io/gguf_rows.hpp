// SPDX-License-Identifier: Apache-2.0
/// The rows of a tensor of a GGUF file, out of a parameter of the model or a low-rank factor of it.
#pragma once

#include <ATen/core/Tensor.h>

#include "format/gguf_model.hpp"

namespace qlorapp {

/// In the part's order. @param values  (rows of the parameter, any).
[[nodiscard]] inline at::Tensor rows_of(const format::GgufPart& part, const at::Tensor& values) {
  at::Tensor rows = values;
  if (part.first_row > 0 || rows.size(0) != part.shape[0]) rows = rows.narrow(0, part.first_row, part.shape[0]);
  if (part.heads == 0) return rows;
  const int64_t half = part.shape[0] / part.heads / 2;
  return rows.reshape({part.heads, 2, half, -1}).transpose(1, 2).reshape(rows.sizes());
}

/// The other way, for a part that is a whole parameter.
[[nodiscard]] inline at::Tensor rows_back(const format::GgufPart& part, const at::Tensor& rows) {
  if (part.heads == 0) return rows;
  const int64_t half = part.shape[0] / part.heads / 2;
  return rows.reshape({part.heads, half, 2, -1}).transpose(1, 2).reshape(rows.sizes());
}

}  // namespace qlorapp
