// SPDX-License-Identifier: Apache-2.0
/// The rules that arguments of the four-bit operators obey, checked once, alike on every device.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// A four-bit weight as operators receive it.
struct FourBitArguments {
  const at::Tensor& packed;
  const at::Tensor& absmax;
  const std::optional<at::Tensor>& nested_absmax;
  const std::optional<at::Tensor>& nested_offset;
  at::IntArrayRef shape;
  int64_t block_size;
  int64_t nested_block_size;
  std::string_view quant_type;

  [[nodiscard]] bool nested() const { return nested_absmax.has_value() && nested_absmax->defined(); }
};

/// Product of a shape, refusing negative sizes and products above 2^63 - 1.
[[nodiscard]] int64_t checked_numel(const char* op, at::IntArrayRef shape);
void check_block_size(const char* op, int64_t block_size);
[[nodiscard]] QuantType checked_quant_type(const char* op, std::string_view quant_type);
/// nf4 or fp4.
[[nodiscard]] QuantType checked_code_book(const char* op, std::string_view quant_type);
/// @returns the number of elements of the weight.
int64_t check_four_bit(const char* op, const FourBitArguments& weight);
/// float32, float16 or bfloat16.
void check_weight_dtype(const char* op, const char* name, at::ScalarType dtype);
/// Those and float64.
void check_dense_dtype(const char* op, const char* name, at::ScalarType dtype);
void check_nested_block_size(const char* op, const char* name, int64_t block_size);
void check_blockwise_codes(const char* op, const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size,
                           at::ScalarType dtype);
/// Shape of the result of linear_4bit, after checking x against the weight.
[[nodiscard]] at::SymDimVector check_linear_4bit(const char* op, const at::Tensor& x, const FourBitArguments& weight,
                                                 bool transpose);
/// The same with the place of the result.
void check_linear_4bit_out(const char* op, const at::Tensor& y, const at::Tensor& x, const FourBitArguments& weight,
                           bool transpose);

}  // namespace qlorapp::ops
