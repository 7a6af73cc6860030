// SPDX-License-Identifier: Apache-2.0
// What linear_4bit and linear_4bit_out do on every device: check, gather the weight, and let the device's own product write.
#pragma once

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "quantize_arguments.hpp"

namespace qlorapp::ops {

/// @tparam into  (y, x, weight, transpose, accumulate): writes x · Wᵀ or x · W into y, or adds it.
template <auto into>
at::Tensor linear_4bit_entry(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                             const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                             at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                             bool transpose) {
  const FourBitArguments weight{packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type};
  const at::SymDimVector sizes = check_linear_4bit("linear_4bit", x, weight, transpose);
  at::Tensor y = at::empty(C10_AS_INTARRAYREF_SLOW(sizes), x.options());
  into(y, x, weight, transpose, /*accumulate=*/false);
  return y;
}

template <auto into>
void linear_4bit_out_entry(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                           const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                           at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                           bool transpose, bool accumulate) {
  const FourBitArguments weight{packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type};
  check_linear_4bit_out("linear_4bit_out", y, x, weight, transpose);
  into(y, x, weight, transpose, accumulate);
}

}  // namespace qlorapp::ops
