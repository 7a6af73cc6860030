// SPDX-License-Identifier: Apache-2.0
/// Tensors as the oracles of tests/reference take them, and how far a tensor is from an oracle's answer.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "ops/tensors.hpp"
#include "reference/layers.hpp"

namespace tiny {

namespace reference = qlorapp::reference;

/// A matrix in double, from any device.
inline reference::Matrix matrix(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "an oracle takes matrices; got ", x.sizes());
  const reference::Values values = tests::values(x.cpu());
  return reference::rows(values, x.size(1));
}

inline std::vector<int64_t> integers(const at::Tensor& x) {
  const at::Tensor plain = x.cpu().contiguous();
  return {plain.const_data_ptr<int64_t>(), plain.const_data_ptr<int64_t>() + plain.numel()};
}

/// ‖x - y‖ / ‖y‖ in double; infinite where their shapes differ.
inline double relative_error(const at::Tensor& x, const reference::Matrix& y) {
  if (x.dim() != 2 || x.size(0) != y.rows() || x.size(1) != y.cols()) return INFINITY;
  return (matrix(x) - y).norm() / y.norm();
}

}  // namespace tiny
