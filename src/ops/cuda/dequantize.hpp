// SPDX-License-Identifier: Apache-2.0
/// From checked tensors to the dequantizing kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "../four_bit_stack.hpp"
#include "cuda/dequantize_4bit.hpp"

namespace qlorapp::ops::gpu {

/// A four-bit weight in memory that a kernel can read; keeps alive what `segment` points into.
struct FourBitMemory {
  at::Tensor packed, absmax, nested_absmax, nested_offset;
  cuda::FourBitSegment segment;  ///< Without rows.
};
[[nodiscard]] FourBitMemory four_bit_memory(const FourBitArguments& weight);

/// Checks and dequantizes.
/// @param out  (rows, columns), stride(1) == 1; float32, float16 or bfloat16.
/// @param borders  adapters around it, checked; none by default.
void dequantize_stack(const char* op, const at::Tensor& out, const FourBitStack& stack, const cuda::Augmentation& borders = {});

/// The whole weight as a new tensor of float32, float16 or bfloat16 in its shape. Its device is current.
[[nodiscard]] at::Tensor dequantized(const char* op, const FourBitArguments& weight, at::ScalarType dtype);

}  // namespace qlorapp::ops::gpu
