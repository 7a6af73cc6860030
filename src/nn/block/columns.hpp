// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// Columns [begin, begin + width) of a (M, N) buffer.
inline at::Tensor columns(const at::Tensor& buffer, int64_t begin, int64_t width) { return buffer.narrow(1, begin, width); }

}  // namespace qlorapp
