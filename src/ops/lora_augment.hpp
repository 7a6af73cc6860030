// SPDX-License-Identifier: Apache-2.0
/// The adapters of stacked projections, laid beside and under their weights (nn/projection_stack.hpp).
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

/// Writes the borders of a workspace (N + P, K + P) whose first N rows and K columns hold the weights: s_i·B_i from column K on, each
/// beside its projection's rows and to the right of the ranks before it; the A_i from row N on, below each other; zero elsewhere. The
/// last P columns of the last P rows are left as they are: no product reads them.
/// @param workspace  float32, float16, bfloat16 or float64 (the CPU's); rows may be longer than K + P.
/// @param a, b       (r_i, K) and (N_i, r_i), float32 (float64 may be with a float64 workspace), contiguous; r_i = 0 where a projection has no adapter. At most 8.
/// @param scaling    s_i; s_i·B_i is formed in float32 and rounded once.
/// @throws ValueError, TypeError if shapes or dtypes contradict each other. Does not synchronize.
void lora_augment_(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling);

/// The borders alone, where no weights stand between them: s_i·B_i and the A_i as above, zero elsewhere.
/// @param right  (N, P).  @param below  (P, K). Of one dtype, as workspace above; rows may be longer.
void lora_borders_(at::Tensor& right, at::Tensor& below, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling);

/// dequantize_4bit_stack_ (ops/quantize.hpp) into the first N rows and K columns of the workspace, and lora_augment_ around
/// them, with the same bits; one launch on a GPU.
/// @param rows  N_i, those of b.
void dequantize_4bit_augmented_(at::Tensor& workspace, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                                at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                                QuantType quant_type, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling);

}  // namespace qlorapp::ops
