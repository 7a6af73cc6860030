// SPDX-License-Identifier: Apache-2.0
/// The adapters of stacked projections beside and under their dequantized weights: see src/ops/lora_augment.hpp.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "cuda/types.hpp"

namespace qlorapp::cuda {

constexpr int kMostAugmented = 8;

struct Augmentation {
  struct Projection {
    const float* a = nullptr;  ///< (rank, in)
    const float* b = nullptr;  ///< (rows, rank)
    float scaling = 1;
    int rows = 0, rank = 0;
    int first_row = 0, first_rank = 0;  ///< Where its rows and ranks begin in the stack.
  };
  Projection projections[kMostAugmented];
  int count = 0;
  int out = 0, in = 0, spare = 0;  ///< N, K, P.
  int64_t row_stride = 0;          ///< Elements.
};

/// One launch; bit-equal to rounding scaling·B and A from float32.
cudaError_t lora_augment(void* workspace, Float dtype, const Augmentation& borders, Stream stream);

/// Rows of a matrix, so many elements apart.
struct BorderRows {
  void* data;
  int64_t row_stride;
};
/// The same where no weights stand between them: s·B (N, P) and A (P, K) in matrices of their own.
cudaError_t lora_borders(BorderRows right, BorderRows below, Float dtype, const Augmentation& borders, Stream stream);

}  // namespace qlorapp::cuda
