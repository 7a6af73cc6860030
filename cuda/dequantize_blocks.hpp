// SPDX-License-Identifier: Apache-2.0
/// Weights in ggml's blocks (format/ggml_blocks.hpp) to dense ones, stacked by rows as dequantize_4bit.hpp does, which calls this.
///
///     value = round_to_dtype(fp32 of the block's formula)        products and sums each rounded: bit-equal to the CPU's
#pragma once

#include "dequantize_4bit.hpp"

namespace qlorapp::cuda {

/// @param work  segments without scales of their own; rows of whole blocks; borders are left out. Fast where every output row is aligned to 16
///              bytes. Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t dequantize_blocks(const DequantizeFourBit& work, Stream stream);

}  // namespace qlorapp::cuda
