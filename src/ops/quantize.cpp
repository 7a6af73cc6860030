// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include <string>
#include <string_view>

#include "ops/operator.hpp"

namespace qlorapp::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using Quantize4bitOp = Pair(const at::Tensor&, int64_t, std::string_view);
using QuantizeBlockwiseOp = Pair(const at::Tensor&, int64_t, bool);

}  // namespace

Pair quantize_4bit(const at::Tensor& weight, int64_t block_size, QuantType quant_type) {
  static const auto op = Operator<Quantize4bitOp>("qlorapp::quantize_4bit");
  return op.call(weight, block_size, to_string(quant_type));
}

Pair quantize_4bit_bnb(const at::Tensor& weight, int64_t block_size, QuantType quant_type) {
  static const auto op = Operator<Quantize4bitOp>("qlorapp::quantize_4bit_bnb");
  return op.call(weight, block_size, to_string(quant_type));
}

at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax, at::IntArrayRef shape, int64_t block_size,
                           QuantType quant_type, at::ScalarType dtype) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef, int64_t, std::string_view, at::ScalarType)>(
          "qlorapp::dequantize_4bit");
  return op.call(packed, absmax, shape, block_size, to_string(quant_type), dtype);
}

at::Tensor dequantize_4bit_nested(const at::Tensor& packed, const at::Tensor& absmax, const at::Tensor& nested_absmax,
                                  const at::Tensor& nested_offset, at::IntArrayRef shape, int64_t block_size,
                                  int64_t nested_block_size, QuantType quant_type, at::ScalarType dtype) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, at::IntArrayRef, int64_t,
                          int64_t, std::string_view, at::ScalarType)>("qlorapp::dequantize_4bit_nested");
  return op.call(packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, to_string(quant_type), dtype);
}

void dequantize_4bit_stack_(const at::Tensor& out, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                            at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                            QuantType quant_type) {
  static const auto op = Operator<void(at::Tensor&, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef,
                                       int64_t, int64_t, std::string_view)>("qlorapp::dequantize_4bit_stack_");
  at::Tensor into = out;
  op.call(into, packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, to_string(quant_type));
}

Pair quantize_blockwise(const at::Tensor& x, int64_t block_size, bool is_signed) {
  static const auto op = Operator<QuantizeBlockwiseOp>("qlorapp::quantize_blockwise");
  return op.call(x, block_size, is_signed);
}

Pair quantize_blockwise_bnb(const at::Tensor& x, int64_t block_size, bool is_signed) {
  static const auto op = Operator<QuantizeBlockwiseOp>("qlorapp::quantize_blockwise_bnb");
  return op.call(x, block_size, is_signed);
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size, bool is_signed,
                                at::ScalarType dtype) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, bool, at::ScalarType)>("qlorapp::dequantize_blockwise");
  return op.call(codes, absmax, block_size, is_signed, dtype);
}

}  // namespace qlorapp::ops
