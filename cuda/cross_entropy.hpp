// SPDX-License-Identifier: Apache-2.0
/// The pieces of chunked linear cross-entropy on the GPU (src/ops/cross_entropy.hpp): everything but its GEMMs.
///
/// A row of logits is read from memory once: the largest value and the sum of exponentials form as it passes, it stays on the
/// multiprocessors, and its gradient is written over it. Up to 512 KiB stay in the registers of up to eight blocks that form a
/// cluster (sm_90 and newer), up to 64 KiB in those of one block anywhere; of what is longer or not aligned to 16 bytes, shared
/// memory keeps most. Deterministic. Against a double-precision softmax of the same logits:
/// loss of a row within 2e-6 relative plus 1e-6, gradient within 4e-6 relative before its one rounding to the type of the
/// logits.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// losses[r] = −log softmax(logits[r])[targets[r]], and with `gradient` logits[r] becomes (softmax − onehot)·scale, where scale
/// is read from grad_scale (float on the device; null is 1). A row with a negative target gives loss 0 and gradient 0. One
/// whose target is not below `vocabulary` gives loss NaN and gradient 0: nothing here can throw.
/// @param stride  elements from one row of logits to the next.
/// @param logit_factor, logit_cap  what stands in `logits` is a product: a logit is z · factor, and then cap · tanh(z / cap) unless cap is
///        0. Gradients are those of the products.
cudaError_t cross_entropy(Float type, void* logits, int64_t stride, const int64_t* targets, float* losses, const float* grad_scale,
                          bool gradient, int64_t rows, int64_t vocabulary, float logit_factor, float logit_cap, Stream stream);

/// Of each row of logits, before cross_entropy() writes over them: statistics[r] = −Σ p·log p, and statistics[pitch + r] = 1 if its target is
/// the first of the highest logits, else 0. Both 0 without a target below `vocabulary`. Reads the logits once more.
cudaError_t row_statistics(Float type, const void* logits, int64_t stride, const int64_t* targets, float* statistics, int64_t pitch,
                           int64_t rows, int64_t vocabulary, float logit_factor, float logit_cap, Stream stream);

/// *total = Σ losses, added up in double in one fixed order.
cudaError_t sum_losses(const float* losses, int64_t rows, float* total, Stream stream);

/// Lists the rows that have a target, in order: index[j] and compact_targets[j] for j < count. If there are fewer than `count`,
/// the rest gets index −1 and target −1; if there are more, the first entry of compact_targets becomes INT64_MAX, which makes
/// the loss NaN: the caller counted wrong.
cudaError_t compact_targets(const int64_t* targets, int64_t rows, int64_t count, int64_t* index, int64_t* compact_targets,
                            Stream stream);

}  // namespace qlorapp::cuda
