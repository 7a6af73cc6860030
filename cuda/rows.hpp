// SPDX-License-Identifier: Apache-2.0
/// Rows picked out of a matrix, and put back: the embedding of tokens, and the rows of a batch that have a target. Plain
/// copies.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// out[i] = source[index[i]] for i < rows; strides in elements. An index outside [0, source_rows) fills its row with NaN.
cudaError_t gather_rows(Float type, const void* source, int64_t source_stride, int64_t source_rows, const int64_t* index, void* out,
                        int64_t out_stride, int64_t rows, int64_t width, Stream stream);

/// target[index[i]] = source[i] for i < rows; an index outside [0, target_rows) is passed over. Indices must differ.
cudaError_t scatter_rows(Float type, const void* source, int64_t source_stride, const int64_t* index, void* target,
                         int64_t target_stride, int64_t target_rows, int64_t rows, int64_t width, Stream stream);

}  // namespace qlorapp::cuda
