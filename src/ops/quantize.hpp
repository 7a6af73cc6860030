// SPDX-License-Identifier: Apache-2.0
/// Typed calls of the registered quantization operators (src/ops/library.cpp), through the dispatcher: any device that has
/// them.
///
/// Formats: format/nf4.hpp (four bits), format/double_quant.hpp (eight bits). None is differentiable: a weight that requires a
/// gradient is refused while gradients are recorded. None synchronizes except to report non-finite input.
/// @throws ValueError, TypeError  naming the argument that breaks a rule below.
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "format/double_quant.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// @param weight      any shape and strides; float32, float16 or bfloat16; finite (an error names the first element that is
/// not).
/// @param block_size  32, 64, 128, … 4096.
/// @returns packed (ceil(n / 2), 1) uint8, absmax (ceil(n / block_size)) float32.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_4bit(const at::Tensor& weight, int64_t block_size = kDefaultBlockSize,
                                                               QuantType quant_type = QuantType::kNf4);

/// As quantize_4bit, bit-equal to bitsandbytes on the same kind of device. On the CPU it differs at the edges: the absmax of a
/// short last block is at least 1e-38, NaN gives its block code 15 and absmax NaN, infinity gives absmax infinity. On a GPU:
/// cuda/quantize_4bit.hpp.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_4bit_bnb(const at::Tensor& weight, int64_t block_size = kDefaultBlockSize,
                                                                   QuantType quant_type = QuantType::kNf4);

/// @param packed  uint8, ceil(n / 2) elements, n the product of `shape`.
/// @param absmax  float32, ceil(n / block_size).
/// @param dtype   float32, float16, bfloat16 or float64 (the float32 values, widened).
[[nodiscard]] at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax, at::IntArrayRef shape,
                                         int64_t block_size, QuantType quant_type, at::ScalarType dtype);

/// @param absmax         uint8, ceil(n / block_size).
/// @param nested_absmax  float32, one for each nested_block_size of those.
/// @param nested_offset  float32, ().
[[nodiscard]] at::Tensor dequantize_4bit_nested(const at::Tensor& packed, const at::Tensor& absmax, const at::Tensor& nested_absmax,
                                                const at::Tensor& nested_offset, at::IntArrayRef shape, int64_t block_size,
                                                int64_t nested_block_size, QuantType quant_type, at::ScalarType dtype);

/// Writes several weights of as many columns below each other: the operand of one product instead of several. On a GPU that is
/// one launch for eight weights; nothing is allocated and nothing synchronized.
/// @param out            (sum of rows, columns), float32, float16 or bfloat16; stride(1) is 1, stride(0) any from columns on,
/// so
///                       that each row may have room for more behind it. Written.
/// @param packed         uint8, of rows[i] · columns elements; each weight has blocks of its own.
/// @param absmax         float32, or uint8 with
/// @param nested_absmax  float32 and
/// @param nested_offset  float32 (); both lists are empty where absmax is float32.
void dequantize_4bit_stack_(const at::Tensor& out, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                            at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                            QuantType quant_type);

/// Eight bits through the dynamic map, exactly nearest.
/// @param x  any shape; float32, float16 or bfloat16; finite.
/// @param block_size  any number above 0.
/// @returns codes uint8 in the shape of x, absmax (ceil(n / block_size)) float32.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& x,
                                                                    int64_t block_size = kDefaultNestedBlockSize,
                                                                    bool is_signed = true);

/// As quantize_blockwise with the codes of bitsandbytes' library for the device (DynamicRounding::kBnbCpu; on a GPU
/// cuda/blockwise.hpp); NaN is not refused.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> quantize_blockwise_bnb(const at::Tensor& x,
                                                                        int64_t block_size = kDefaultNestedBlockSize,
                                                                        bool is_signed = true);

[[nodiscard]] at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax,
                                              int64_t block_size = kDefaultNestedBlockSize, bool is_signed = true,
                                              at::ScalarType dtype = at::ScalarType::Float);

}  // namespace qlorapp::ops
