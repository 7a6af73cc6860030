// SPDX-License-Identifier: Apache-2.0
// What the operators of float8.hpp ask of their arguments, for every device.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "four_bit_stack.hpp"
#include "ops/float8.hpp"

namespace qlorapp::ops {

constexpr int64_t kFloat8Step = 16, kMostFloat8Columns = 32768;

/// @returns the sum of rows.
inline int64_t check_float8_weights(const FourBitStack& stack, int64_t columns, const at::Tensor& weight_scale) {
  constexpr const char* kOp = "dequantize_4bit_float8";
  TORCH_CHECK_VALUE(
      !stack.packed.empty() && stack.absmax.size() == stack.size() && stack.rows.size() == stack.size() &&
          (!stack.nested() || (stack.nested_absmax.size() == stack.size() && stack.nested_offset.size() == stack.size())),
      "[", kOp, "] packed, absmax, rows and the nested lists must have one entry a weight; got ", stack.size(), ", ",
      stack.absmax.size(), ", ", stack.rows.size(), ", ", stack.nested_absmax.size(), " and ", stack.nested_offset.size(), ".");
  TORCH_CHECK_VALUE(columns > 0 && columns % kFloat8WeightStep == 0, "[", kOp, "] columns must be a multiple of ",
                    kFloat8WeightStep, "; got ", columns, ".");
  TORCH_CHECK_VALUE(
      weight_scale.numel() == 1 && weight_scale.scalar_type() == at::kFloat && weight_scale.device() == stack.packed[0].device(),
      "[", kOp, "] weight_scale must be one float32 on ", stack.packed[0].device(), "; got ", weight_scale.sizes(), " of ",
      weight_scale.scalar_type(), " on ", weight_scale.device(), ".");
  int64_t rows = 0;
  for (size_t i = 0; i < stack.size(); ++i) {
    TORCH_CHECK_VALUE(stack.rows[i] > 0 && stack.rows[i] % kFloat8WeightStep == 0, "[", kOp, "] rows must be multiples of ",
                      kFloat8WeightStep, "; got ", stack.rows, ".");
    const FourBitStack::Entry entry = stack.entry(i, columns);
    check_four_bit(kOp, entry.arguments(stack));
    rows += stack.rows[i];
  }
  return rows;
}

inline void check_float8_rows(const at::Tensor& x, const std::optional<at::Tensor>& weight_scale) {
  constexpr const char* kOp = "quantize_rows_float8";
  check_weight_dtype(kOp, "x", x.scalar_type());
  TORCH_CHECK_VALUE(
      x.dim() == 2 && x.size(1) % kFloat8Step == 0 && x.size(1) <= kMostFloat8Columns && (x.numel() == 0 || x.stride(1) == 1), "[",
      kOp, "] x must be (M, K) with contiguous rows, K a multiple of ", kFloat8Step, " up to ", kMostFloat8Columns, "; got ",
      x.sizes(), " with strides ", x.strides(), ".");
  TORCH_CHECK_VALUE(!weight_scale || (weight_scale->numel() == 1 && weight_scale->scalar_type() == at::kFloat &&
                                      weight_scale->device() == x.device()),
                    "[", kOp, "] weight_scale must be one float32 on ", x.device(), ".");
}

inline void check_float8_product(const at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w,
                                 const at::Tensor& ones) {
  constexpr const char* kOp = "float8_product_out";
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat8_e4m3fn && w.scalar_type() == at::kFloat8_e4m3fn &&
                       scale.scalar_type() == at::kFloat && ones.scalar_type() == at::kFloat,
                   "[", kOp, "] x and w must be float8_e4m3fn, scale and ones float32; got ", x.scalar_type(), ", ",
                   w.scalar_type(), ", ", scale.scalar_type(), " and ", ones.scalar_type(), ".");
  TORCH_CHECK_VALUE(x.dim() == 2 && w.dim() == 2 && y.dim() == 2 && x.size(1) == w.size(1) && y.size(0) == x.size(0) &&
                        y.size(1) == w.size(0) && x.is_contiguous() && w.is_contiguous() && scale.numel() == x.size(0) &&
                        ones.numel() >= w.size(0) && scale.is_contiguous() && ones.is_contiguous(),
                    "[", kOp, "] x must be (M, K), scale (M, 1), w (N, K), y (M, N) and ones of N or more; got ", x.sizes(), ", ",
                    scale.sizes(), ", ", w.sizes(), ", ", y.sizes(), " and ", ones.sizes(), ".");
  TORCH_CHECK_VALUE(
      x.device() == y.device() && w.device() == y.device() && scale.device() == y.device() && ones.device() == y.device(), "[", kOp,
      "] all must be on ", y.device(), ", where y is. Move them.");
}

}  // namespace qlorapp::ops
