// SPDX-License-Identifier: Apache-2.0
/// Which kernel takes which dtype where products are of float32 numbers.
#pragma once

#include "dequantize_4bit_loop.hpp"
#include "few_rows_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// The rounding of a weight in a dtype.
template <class Value>
constexpr Via via_of() {
  return std::is_same_v<Value, Float16> ? Via::kFloat16 : std::is_same_v<Value, BFloat16> ? Via::kBFloat16 : Via::kNothing;
}

template <template <class> class Floats, class Value>
FewRowsKernel kernel_of_value(const FewRows& work) {
  using Policy = Floats<Value>;
  if constexpr (!std::is_same_v<Value, float>) {
    if (work.dense != nullptr) return kernel_of<Policy, DenseRow<Policy>, Value>();
  }
  return kernel_of<Policy, FourBitRow<Policy>, Value>();
}

template <template <class> class Floats>
FewRowsKernel kernel_of_floats(const FewRows& work) {
  if (work.type == DenseType::kFloat16) return kernel_of_value<Floats, Float16>(work);
  if (work.type == DenseType::kBFloat16) return kernel_of_value<Floats, BFloat16>(work);
  return kernel_of_value<Floats, float>(work);
}

}  // namespace
}  // namespace qlorapp::ops::cpu
