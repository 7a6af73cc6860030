// SPDX-License-Identifier: Apache-2.0
#include "quantize_arguments.hpp"

#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include "four_bit_stack.hpp"

namespace qlorapp::ops {
namespace {

void check_length(const char* op, const char* name, const at::Tensor& tensor, int64_t length, const char* why) {
  TORCH_CHECK_VALUE(tensor.sym_numel() == length, "[", op, "] ", name, " must hold ", length, " elements (", why, "); got ",
                    tensor.sym_numel(), ". Pass the tensors that quantizing returned, with the same shape and block sizes.");
}
void check_dtype(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "[", op, "] ", name, " must be ", dtype, "; got ", tensor.scalar_type(), ".");
}

}  // namespace

int64_t checked_numel(const char* op, at::IntArrayRef shape) {
  int64_t n = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0, "[", op, "] shape must not be negative; got ", shape, ".");
    empty = empty || size == 0;
  }
  for (const int64_t size : shape)
    TORCH_CHECK_VALUE(empty || !__builtin_mul_overflow(n, size, &n), "[", op, "] shape must have fewer than 2^63 elements; got ",
                      shape, ".");
  return empty ? 0 : n;
}

void check_block_size(const char* op, int64_t block_size) {
  TORCH_CHECK_VALUE(is_block_size(block_size), "[", op, "] block_size must be one of ", at::IntArrayRef(kBlockSizes), "; got ",
                    block_size, ".");
}

QuantType checked_quant_type(const char* op, std::string_view quant_type) {
  for (size_t i = 0; i < kBlockLayouts.size(); ++i) {
    if (quant_type == kBlockLayouts[i].name) return static_cast<QuantType>(static_cast<size_t>(QuantType::kQ4_0) + i);
  }
  return checked_code_book(op, quant_type);
}

QuantType checked_code_book(const char* op, std::string_view quant_type) {
  TORCH_CHECK_VALUE(quant_type == "nf4" || quant_type == "fp4", "[", op, "] quant_type must be nf4 or fp4; got ", quant_type, ".");
  return quant_type == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
}

void check_weight_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "[", op, "] ", name,
                   " must be float32, float16 or bfloat16; got ", dtype, ". Convert it first.");
}

void check_dense_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble, "[", op, "] ", name,
                   " must be float32, float16, bfloat16 or float64; got ", dtype, ".");
}

void check_nested_block_size(const char* op, const char* name, int64_t block_size) {
  TORCH_CHECK_VALUE(block_size > 0, "[", op, "] ", name, " must be above 0; got ", block_size, ".");
}

void check_blockwise_codes(const char* op, const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size,
                           at::ScalarType dtype) {
  check_weight_dtype(op, "dtype", dtype);
  check_nested_block_size(op, "block_size", block_size);
  check_dtype(op, "codes", codes, at::kByte);
  check_dtype(op, "absmax", absmax, at::kFloat);
  const c10::SymInt blocks = (codes.sym_numel() + (block_size - 1)) / block_size;
  TORCH_CHECK_VALUE(absmax.sym_numel() == blocks, "[", op, "] absmax must hold ", blocks, " elements (one a block); got ",
                    absmax.sym_numel(), ".");
  TORCH_CHECK_VALUE(absmax.device() == codes.device(), "[", op, "] absmax must be on ", codes.device(), ", where codes is; got ",
                    absmax.device(), ".");
}

int64_t check_four_bit(const char* op, const FourBitArguments& weight) {
  check_block_size(op, weight.block_size);
  const QuantType type = checked_quant_type(op, weight.quant_type);
  const int64_t n = checked_numel(op, weight.shape);
  const int64_t blocks = scale_count(type, n, weight.block_size);
  TORCH_CHECK_VALUE(has_code_book(type) || (!weight.shape.empty() && weight.shape.back() % block_elements(type) == 0), "[", op,
                    "] rows must be whole blocks of ", has_code_book(type) ? 1 : block_elements(type), " elements; got shape ",
                    weight.shape, ".");
  check_dtype(op, "packed", weight.packed, at::kByte);
  check_length(op, "packed", weight.packed, packed_bytes(type, n), has_code_book(type) ? "two elements a byte" : "whole blocks");
  check_dtype(op, "absmax", weight.absmax, weight.nested() ? at::kByte : at::kFloat);
  check_length(op, "absmax", weight.absmax, blocks, "one a block");
  TORCH_CHECK_VALUE(weight.absmax.device() == weight.packed.device(), "[", op, "] absmax must be on ", weight.packed.device(),
                    ", where packed is; got ", weight.absmax.device(), ".");
  if (!weight.nested()) return n;
  check_nested_block_size(op, "nested_block_size", weight.nested_block_size);
  TORCH_CHECK_VALUE(weight.nested_offset.has_value() && weight.nested_offset->defined(), "[", op,
                    "] nested_absmax comes with nested_offset; got none.");
  check_dtype(op, "nested_absmax", *weight.nested_absmax, at::kFloat);
  check_length(op, "nested_absmax", *weight.nested_absmax, block_count(blocks, weight.nested_block_size), "one a nested block");
  check_dtype(op, "nested_offset", *weight.nested_offset, at::kFloat);
  check_length(op, "nested_offset", *weight.nested_offset, 1, "the mean of the scales");
  TORCH_CHECK_VALUE(
      weight.nested_absmax->device() == weight.packed.device() && weight.nested_offset->device() == weight.packed.device(), "[", op,
      "] nested_absmax and nested_offset must be on ", weight.packed.device(), ", where packed is; got ",
      weight.nested_absmax->device(), " and ", weight.nested_offset->device(), ".");
  return n;
}

at::SymDimVector check_linear_4bit(const char* op, const at::Tensor& x, const FourBitArguments& weight, bool transpose) {
  static_cast<void>(check_four_bit(op, weight));
  check_dense_dtype(op, "x", x.scalar_type());
  TORCH_CHECK_VALUE(weight.shape.size() == 2, "[", op, "] shape must be (out, in); got ", weight.shape, ".");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == weight.shape[transpose ? 0 : 1], "[", op,
                    "] the last dimension of x must be ", weight.shape[transpose ? 0 : 1], "; got x of ", x.sym_sizes(), ".");
  TORCH_CHECK_VALUE(x.device() == weight.packed.device(), "[", op, "] x must be on ", weight.packed.device(),
                    ", where the weight is; got ", x.device(), ".");
  at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.shape[transpose ? 1 : 0];
  return sizes;
}

void check_linear_4bit_out(const char* op, const at::Tensor& y, const at::Tensor& x, const FourBitArguments& weight,
                           bool transpose) {
  const at::SymDimVector sizes = check_linear_4bit(op, x, weight, transpose);
  TORCH_CHECK_VALUE(y.sym_sizes() == c10::SymIntArrayRef(sizes), "[", op, "] y must be ", c10::SymIntArrayRef(sizes), "; got ",
                    y.sym_sizes(), ".");
  TORCH_CHECK_TYPE(y.scalar_type() == x.scalar_type(), "[", op, "] y must have the dtype of x, ", x.scalar_type(), "; got ",
                   y.scalar_type(), ".");
  TORCH_CHECK_VALUE(y.device() == x.device(), "[", op, "] y must be on ", x.device(), ", where x is; got ", y.device(), ".");
}

void check_four_bit_stack(const char* op, const at::Tensor& out, const FourBitStack& stack) {
  check_weight_dtype(op, "out", out.scalar_type());
  TORCH_CHECK_VALUE(
      out.dim() == 2 && (out.size(1) <= 1 || out.stride(1) == 1) && (out.size(0) <= 1 || out.stride(0) >= out.size(1)), "[", op,
      "] out must be (rows, columns), its columns side by side; got sizes ", out.sizes(), ", strides ", out.strides(), ".");
  const size_t count = stack.size();
  TORCH_CHECK_VALUE(stack.absmax.size() == count && stack.rows.size() == count, "[", op,
                    "] packed, absmax and rows must be lists of one length; got ", count, ", ", stack.absmax.size(), " and ",
                    stack.rows.size(), ".");
  TORCH_CHECK_VALUE(stack.nested_absmax.size() == stack.nested_offset.size() &&
                        (stack.nested_absmax.empty() || stack.nested_absmax.size() == count),
                    "[", op, "] nested_absmax and nested_offset must be empty or as long as packed, ", count, "; got ",
                    stack.nested_absmax.size(), " and ", stack.nested_offset.size(), ".");
  int64_t rows = 0;
  for (size_t i = 0; i < count; ++i) {
    const FourBitStack::Entry entry = stack.entry(i, out.size(1));
    check_four_bit(op, entry.arguments(stack));
    TORCH_CHECK_VALUE(entry.packed.device() == out.device(), "[", op, "] packed must be on ", out.device(), ", where out is; got ",
                      entry.packed.device(), ".");
    rows += stack.rows[i];
  }
  TORCH_CHECK_VALUE(rows == out.size(0), "[", op, "] out must have ", rows, " rows, those of all weights; got ", out.size(0), ".");
}

}  // namespace qlorapp::ops
