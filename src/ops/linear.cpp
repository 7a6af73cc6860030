// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <string_view>

#include "ops/operator.hpp"

namespace qlorapp::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

}  // namespace

at::Tensor linear_4bit(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax, const OptionalTensor& nested_absmax,
                       const OptionalTensor& nested_offset, at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size,
                       QuantType quant_type, bool transpose) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                          at::IntArrayRef, int64_t, int64_t, std::string_view, bool)>("qlorapp::linear_4bit");
  return op.call(x, packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, to_string(quant_type),
                 transpose);
}

void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                     const OptionalTensor& nested_absmax, const OptionalTensor& nested_offset, at::IntArrayRef shape,
                     int64_t block_size, int64_t nested_block_size, QuantType quant_type, bool transpose, bool accumulate) {
  static const auto op = Operator<void(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                       const OptionalTensor&, at::IntArrayRef, int64_t, int64_t, std::string_view, bool, bool)>(
      "qlorapp::linear_4bit_out");
  op.call(y, x, packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, to_string(quant_type),
          transpose, accumulate);
}

}  // namespace qlorapp::ops
