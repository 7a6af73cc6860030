// SPDX-License-Identifier: Apache-2.0
/// Typed calls of the registered quantization operators (src/ops/library.cpp), through the dispatcher: any device that has
/// them.
///
/// Formats: format/nf4.hpp (four bits), format/double_quant.hpp (eight bits). None is differentiable: a weight that requires a
/// gradient is refused while gradients are recorded. None synchronises except to report non-finite input.
/// @throws c10::ValueError, c10::TypeError  naming the argument that breaks a rule below.
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/double_quant.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// @param weight      any shape and strides; float32, float16 or bfloat16; finite (an error names the first element that is
/// not).
/// @param block_size  32, 64, 128, … 4096.
/// @returns packed (ceil(n / 2), 1) uint8, absmax (ceil(n / block_size)) float32.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_4bit(const at::Tensor& weight, int64_t block_size = kDefaultBlockSize,
                                                               QuantType quant_type = QuantType::kNf4);

/// As quantize_4bit, with bitsandbytes' behavior at the edges: the absmax of a short last block is at least 1e-38, NaN gives
/// its block code 15 and absmax NaN, infinity gives absmax infinity.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_4bit_bnb(const at::Tensor& weight,
                                                                   int64_t block_size = kDefaultBlockSize,
                                                                   QuantType quant_type = QuantType::kNf4);

/// @param packed  uint8, ceil(n / 2) elements, n the product of `shape`.
/// @param absmax  float32, ceil(n / block_size).
/// @param dtype   float32, float16, bfloat16 or float64 (the float32 values, widened).
[[nodiscard]] at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax, at::IntArrayRef shape,
                                         int64_t block_size, QuantType quant_type, at::ScalarType dtype);

/// @param absmax         uint8, ceil(n / block_size).
/// @param nested_absmax  float32, one for each nested_block_size of those.
/// @param nested_offset  float32, ().
[[nodiscard]] at::Tensor dequantize_4bit_nested(const at::Tensor& packed, const at::Tensor& absmax,
                                                const at::Tensor& nested_absmax, const at::Tensor& nested_offset,
                                                at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size,
                                                QuantType quant_type, at::ScalarType dtype);

/// Eight bits through the dynamic map, exactly nearest.
/// @param x  any shape; float32, float16 or bfloat16; finite.
/// @param block_size  any number above 0.
/// @returns codes uint8 in the shape of x, absmax (ceil(n / block_size)) float32.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& x,
                                                                    int64_t block_size = kDefaultNestedBlockSize,
                                                                    bool is_signed = true);

/// As quantize_blockwise with the codes of bitsandbytes' CPU library (DynamicRounding::kBnbCpu); NaN is not refused.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_blockwise_bnb(const at::Tensor& x,
                                                                        int64_t block_size = kDefaultNestedBlockSize,
                                                                        bool is_signed = true);

[[nodiscard]] at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax,
                                              int64_t block_size = kDefaultNestedBlockSize, bool is_signed = true,
                                              at::ScalarType dtype = at::ScalarType::Float);

}  // namespace qlorapp::ops
