// SPDX-License-Identifier: Apache-2.0
/// The values of a workspace's borders, n neighbors of one row at a time: for the kernel that writes nothing else, and for the
/// one that dequantizes the weights between them.
#pragma once

#include "cuda/lora_augment.hpp"

namespace qlorapp::cuda {
namespace {

__device__ __forceinline__ bool within(int i, int first, int count) {
  return static_cast<unsigned>(i - first) < static_cast<unsigned>(count);
}

/// s·B beside the weights: ranks [rank, rank + n) of `row`.
template <int n>
__device__ __forceinline__ void border_at_the_right(const Augmentation& borders, int row, int rank, float (&values)[n]) {
#pragma unroll
  for (int j = 0; j < n; ++j) values[j] = 0;
  for (int p = 0; p < borders.count; ++p) {
    const auto& own = borders.projections[p];
    if (!within(row, own.first_row, own.rows)) continue;
    const float* const b = own.b + int64_t{row - own.first_row} * own.rank - own.first_rank;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (within(rank + j, own.first_rank, own.rank)) values[j] = __fmul_rn(b[rank + j], own.scaling);
    }
  }
}

/// A below them: columns [column, column + n) of `rank`.
template <int n>
__device__ __forceinline__ void border_below(const Augmentation& borders, int rank, int column, float (&values)[n]) {
#pragma unroll
  for (int j = 0; j < n; ++j) values[j] = 0;
  for (int p = 0; p < borders.count; ++p) {
    const auto& own = borders.projections[p];
    if (!within(rank, own.first_rank, own.rank)) continue;
    const float* const a = own.a + int64_t{rank - own.first_rank} * borders.in + column;
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = a[j];
  }
}

}  // namespace
}  // namespace qlorapp::cuda
