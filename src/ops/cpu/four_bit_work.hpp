// SPDX-License-Identifier: Apache-2.0
/// From an operator's tensors to the plain memory that kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include "../quantize_arguments.hpp"
#include "dequantize_4bit_kernel.hpp"

namespace qlorapp::ops {

/// Keeps alive what `work` points into.
struct FourBitWork {
  at::Tensor packed, absmax, nested_absmax;
  cpu::Dequantize4bit work;
};

/// @param weight  checked already.
[[nodiscard]] FourBitWork four_bit_work(const FourBitArguments& weight, cpu::DenseType dense_type);

/// The kernels' name of float32, float16, bfloat16 and float64.
[[nodiscard]] cpu::DenseType dense_type_of(at::ScalarType dtype);

}  // namespace qlorapp::ops
