// SPDX-License-Identifier: Apache-2.0
/// Several four-bit weights of as many columns, stacked by rows, as dequantize_4bit_stack_ receives them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "quantize_arguments.hpp"

namespace qlorapp::ops {

struct FourBitStack {
  at::TensorList packed, absmax;
  at::TensorList nested_absmax, nested_offset;  ///< Empty unless double-quantized.
  at::IntArrayRef rows;
  int64_t block_size;
  int64_t nested_block_size;
  std::string_view quant_type;

  [[nodiscard]] size_t size() const { return packed.size(); }
  [[nodiscard]] bool nested() const { return !nested_absmax.empty(); }

  /// What FourBitArguments of one weight refers to.
  struct Entry {
    at::Tensor packed, absmax;
    std::optional<at::Tensor> nested_absmax, nested_offset;
    std::array<int64_t, 2> shape;

    [[nodiscard]] FourBitArguments arguments(const FourBitStack& stack) const {
      return {packed, absmax, nested_absmax, nested_offset, shape, stack.block_size, stack.nested_block_size, stack.quant_type};
    }
  };
  [[nodiscard]] Entry entry(size_t i, int64_t columns) const {
    Entry result{packed[i], absmax[i], std::nullopt, std::nullopt, {rows[i], columns}};
    if (nested()) {
      result.nested_absmax = nested_absmax[i];
      result.nested_offset = nested_offset[i];
    }
    return result;
  }
};

/// @param out  (sum of rows, columns) of float32, float16 or bfloat16; rows may be apart, columns not.
void check_four_bit_stack(const char* op, const at::Tensor& out, const FourBitStack& stack);

}  // namespace qlorapp::ops
