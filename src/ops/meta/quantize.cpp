// SPDX-License-Identifier: Apache-2.0
/// Shapes without data, for tracing and planning.
#include <string_view>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "../four_bit_stack.hpp"
#include "../quantize_arguments.hpp"
#include "kernel_memory.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

c10::SymInt divide_up(const c10::SymInt& n, int64_t by) { return (n + (by - 1)) / by; }

Pair quantize_4bit(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  check_weight_dtype("quantize_4bit", "weight", weight.scalar_type());
  check_block_size("quantize_4bit", block_size);
  static_cast<void>(checked_code_book("quantize_4bit", quant_type));
  const c10::SymInt n = weight.sym_numel();
  return {at::empty_symint({divide_up(n, 2), 1}, weight.options().dtype(at::kByte)),
          at::empty_symint({divide_up(n, block_size)}, weight.options().dtype(at::kFloat))};
}

Pair quantize_blockwise(const at::Tensor& x, int64_t block_size, bool /*is_signed*/) {
  check_weight_dtype("quantize_blockwise", "x", x.scalar_type());
  check_nested_block_size("quantize_blockwise", "block_size", block_size);
  return {at::empty_symint(x.sym_sizes(), x.options().dtype(at::kByte)),
          at::empty_symint({divide_up(x.sym_numel(), block_size)}, x.options().dtype(at::kFloat))};
}

at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax, at::IntArrayRef shape, int64_t block_size,
                           std::string_view quant_type, at::ScalarType dtype) {
  check_dense_dtype("dequantize_4bit", "dtype", dtype);
  check_four_bit("dequantize_4bit", {packed, absmax, std::nullopt, std::nullopt, shape, block_size, 0, quant_type});
  return at::empty(shape, packed.options().dtype(dtype));
}

at::Tensor dequantize_4bit_nested(const at::Tensor& packed, const at::Tensor& absmax, const at::Tensor& nested_absmax,
                                  const at::Tensor& nested_offset, at::IntArrayRef shape, int64_t block_size,
                                  int64_t nested_block_size, std::string_view quant_type, at::ScalarType dtype) {
  const std::optional<at::Tensor> scales = nested_absmax;
  const std::optional<at::Tensor> offset = nested_offset;
  check_dense_dtype("dequantize_4bit_nested", "dtype", dtype);
  check_four_bit("dequantize_4bit_nested", {packed, absmax, scales, offset, shape, block_size, nested_block_size, quant_type});
  return at::empty(shape, packed.options().dtype(dtype));
}

void dequantize_4bit_stack_(at::Tensor& out, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                            at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                            std::string_view quant_type) {
  check_four_bit_stack("dequantize_4bit_stack_", out,
                       {packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type});
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size, bool /*is_signed*/,
                                at::ScalarType dtype) {
  check_blockwise_codes("dequantize_blockwise", codes, absmax, block_size, dtype);
  return at::empty_symint(codes.sym_sizes(), codes.options().dtype(dtype));
}

at::Tensor linear_4bit(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                       const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                       at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                       bool transpose) {
  const auto sizes = check_linear_4bit(
      "linear_4bit", x, {packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type},
      transpose);
  return at::empty_symint(sizes, x.options());
}

void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                     const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                     at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                     bool transpose, bool accumulate) {
  check_linear_4bit_out("linear_4bit_out", y, x,
                        {packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type},
                        transpose);
  if (planned_device()) static_cast<void>(meta::linear_4bit_scratch(y, x, shape[0], shape[1], accumulate));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("quantize_4bit", quantize_4bit);
  m.impl("quantize_4bit_bnb", quantize_4bit);
  m.impl("quantize_blockwise", quantize_blockwise);
  m.impl("quantize_blockwise_bnb", quantize_blockwise);
  m.impl("dequantize_4bit", dequantize_4bit);
  m.impl("dequantize_4bit_nested", dequantize_4bit_nested);
  m.impl("dequantize_4bit_stack_", dequantize_4bit_stack_);
  m.impl("dequantize_blockwise", dequantize_blockwise);
  m.impl("linear_4bit", linear_4bit);
  m.impl("linear_4bit_out", linear_4bit_out);
}

}  // namespace qlorapp::ops
