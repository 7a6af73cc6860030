// SPDX-License-Identifier: Apache-2.0
#include "ops/float8.hpp"

#include <string_view>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "float8_shapes.hpp"
#include "four_bit_stack.hpp"
#include "ops/operator.hpp"
#include "ops/quantize.hpp"

namespace qlorapp::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using DequantizeOp = at::Tensor(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef, int64_t, int64_t,
                                int64_t, std::string_view, const at::Tensor&, bool);
using QuantizeRowsOp = Pair(const at::Tensor&, const std::optional<at::Tensor>&);
using ProductOp = void(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);

// On a CPU: by what the numbers mean. A reference for the GPU's kernels, which round alike, and a way to try them without one.

at::Tensor dequantize_cpu(at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax, at::TensorList nested_offset,
                          at::IntArrayRef rows, int64_t columns, int64_t block_size, int64_t nested_block_size,
                          std::string_view quant_type, const at::Tensor& weight_scale, bool transpose) {
  const FourBitStack stack{packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type};
  const at::Tensor dense = at::empty({check_float8_weights(stack, columns, weight_scale), columns}, weight_scale.options());
  dequantize_4bit_stack_(dense, packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size,
                         checked_code_book("dequantize_4bit_float8", quant_type));
  const at::Tensor values = dense.mul_(weight_scale.reciprocal()).clamp_(-kLargestFloat8, kLargestFloat8);
  return (transpose ? values.t() : values).contiguous().to(at::kFloat8_e4m3fn);
}

Pair quantize_rows_cpu(const at::Tensor& x, const std::optional<at::Tensor>& weight_scale) {
  check_float8_rows(x, weight_scale);
  const at::Tensor wide = x.to(at::kFloat);
  if (x.numel() == 0) return {wide.to(at::kFloat8_e4m3fn), at::ones({x.size(0), 1}, wide.options())};
  const at::Tensor largest = wide.abs().amax(1, /*keepdim=*/true), zero = largest < kSmallestFloat8Row;
  const at::Tensor factor = (kLargestFloat8 / largest).masked_fill(zero, 0),
                   scale = (largest / kLargestFloat8).masked_fill(zero, 1);
  return {(wide * factor).clamp(-kLargestFloat8, kLargestFloat8).to(at::kFloat8_e4m3fn),
          weight_scale ? scale * *weight_scale : scale};
}

void product_cpu(at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w, const at::Tensor& ones) {
  check_float8_product(y, x, scale, w, ones);
  y.copy_(x.to(at::kFloat).mm(w.to(at::kFloat).t()) * scale.view({-1, 1}));
}

at::Tensor dequantize_meta(at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax, at::TensorList nested_offset,
                           at::IntArrayRef rows, int64_t columns, int64_t block_size, int64_t nested_block_size,
                           std::string_view quant_type, const at::Tensor& weight_scale, bool transpose) {
  const FourBitStack stack{packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type};
  const int64_t height = check_float8_weights(stack, columns, weight_scale);
  return at::empty({transpose ? columns : height, transpose ? height : columns}, packed[0].options().dtype(at::kFloat8_e4m3fn));
}

Pair quantize_rows_meta(const at::Tensor& x, const std::optional<at::Tensor>& weight_scale) {
  check_float8_rows(x, weight_scale);
  return {at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn)), at::empty({x.size(0), 1}, x.options().dtype(at::kFloat))};
}

void product_meta(at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w, const at::Tensor& ones) {
  check_float8_product(y, x, scale, w, ones);
}

}  // namespace

at::Tensor dequantize_4bit_float8(at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                                  at::TensorList nested_offset, at::IntArrayRef rows, int64_t columns, int64_t block_size,
                                  int64_t nested_block_size, QuantType quant_type, const at::Tensor& weight_scale, bool transpose) {
  static const auto op = Operator<DequantizeOp>("qlorapp::dequantize_4bit_float8");
  return op.call(packed, absmax, nested_absmax, nested_offset, rows, columns, block_size, nested_block_size, to_string(quant_type),
                 weight_scale, transpose);
}

Pair quantize_rows_float8(const at::Tensor& x, const std::optional<at::Tensor>& weight_scale) {
  static const auto op = Operator<QuantizeRowsOp>("qlorapp::quantize_rows_float8");
  return op.call(x, weight_scale);
}

void float8_product_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w, const at::Tensor& ones) {
  static const auto op = Operator<ProductOp>("qlorapp::float8_product_out");
  op.call(y, x, scale, w, ones);
}

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("dequantize_4bit_float8", dequantize_cpu);
  m.impl("quantize_rows_float8", quantize_rows_cpu);
  m.impl("float8_product_out", product_cpu);
}
TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("dequantize_4bit_float8", dequantize_meta);
  m.impl("quantize_rows_float8", quantize_rows_meta);
  m.impl("float8_product_out", product_meta);
}

}  // namespace qlorapp::ops
