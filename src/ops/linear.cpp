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

void linear_4bit_group_(at::Tensor& y, const at::Tensor& x, at::TensorList packed, at::TensorList absmax,
                        at::TensorList nested_absmax, at::TensorList nested_offset, at::IntArrayRef heights, int64_t block_size,
                        int64_t nested_block_size, QuantType quant_type, const OptionalTensor& bias, const OptionalTensor& a,
                        at::TensorList b, at::ArrayRef<double> scaling) {
  static const auto op = Operator<void(at::Tensor&, const at::Tensor&, at::TensorList, at::TensorList, at::TensorList,
                                       at::TensorList, at::IntArrayRef, int64_t, int64_t, std::string_view, const OptionalTensor&,
                                       const OptionalTensor&, at::TensorList, at::ArrayRef<double>)>("qlorapp::linear_4bit_group_");
  op.call(y, x, packed, absmax, nested_absmax, nested_offset, heights, block_size, nested_block_size, to_string(quant_type), bias,
          a, b, scaling);
}

bool has_linear_4bit_group(at::Device device, at::ScalarType dtype, int64_t rows, int64_t columns, int64_t block_size,
                           int64_t nested_block_size) {
  if (!device.is_cuda()) return false;
  static const auto op =
      Operator<bool(at::ScalarType, int64_t, int64_t, int64_t, int64_t, int64_t)>("qlorapp::has_linear_4bit_group");
  return op.call(dtype, rows, columns, block_size, nested_block_size, device.index());
}

}  // namespace qlorapp::ops
