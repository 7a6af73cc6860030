// SPDX-License-Identifier: Apache-2.0
#include "quant/linear.hpp"

#include <optional>

#include "ops/linear.hpp"

namespace qlorapp {
namespace {

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace

at::Tensor linear_4bit(const at::Tensor& x, const QuantizedTensor& weight, bool transpose) {
  return ops::linear_4bit(x, weight.packed, weight.absmax, if_defined(weight.nested_absmax), if_defined(weight.nested_offset),
                          weight.shape, weight.block_size, weight.nested_block_size, weight.quant_type, transpose);
}

void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const QuantizedTensor& weight, bool transpose, bool accumulate) {
  ops::linear_4bit_out(y, x, weight.packed, weight.absmax, if_defined(weight.nested_absmax), if_defined(weight.nested_offset),
                       weight.shape, weight.block_size, weight.nested_block_size, weight.quant_type, transpose, accumulate);
}

}  // namespace qlorapp
