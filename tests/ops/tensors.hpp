// SPDX-License-Identifier: Apache-2.0
/// Random tensors, their values in double precision, and the relative error of a result against those.
#pragma once

#include <cmath>
#include <initializer_list>

#include <ATen/ATen.h>

#include "reference/layers.hpp"

namespace tests {

namespace reference = qlorapp::reference;

inline at::Tensor randn(std::initializer_list<int64_t> shape, at::ScalarType dtype, double scale = 1.0) {
  return (at::randn(at::IntArrayRef(shape), at::kDouble) * scale).to(dtype);
}

/// The values that the operator really sees: after rounding to its dtype.
inline reference::Values values(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

/// ‖got − want‖ / ‖want‖; of the plain difference where want is zero.
inline double relative_error(const at::Tensor& got, const reference::Values& want) {
  const auto have = values(got);
  if (have.size() != want.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (have[i] - want[i]) * (have[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(norm > 0 ? difference / norm : difference);
}

/// What a few roundings of a dtype amount to.
inline double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-13;
    case at::kFloat:
      return 5e-7;
    case at::kHalf:
      return 1e-3;
    default:
      return 8e-3;
  }
}

}  // namespace tests
