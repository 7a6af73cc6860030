// SPDX-License-Identifier: Apache-2.0
/// Heads that are normalized before they turn, on the GPU: src/ops/rope.hpp's rms_norm_rope and its backward pass.
///
/// A warp a head; a head is read once and stays in registers. Sums are those of a warp, always in one order.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "norm.hpp"
#include "rope.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

/// Weights (2·half) of the first q_heads heads and of the others.
struct HeadNorm {
  const void *q_weight, *k_weight;
  int64_t q_heads;
  float eps;
  NormRule rule;
};

/// y = turned normed x; y (tokens, heads, 2·half), contiguous. half <= 256.
cudaError_t rms_norm_rope(Float type, Heads x, void* y, HeadNorm norm, Rotation rotation, int64_t tokens, int64_t half,
                          Stream stream);

/// out[m] = [N(R(dq[m])) | N(R(dk[m])) | dv[m]], rows out_stride elements apart: R turns back by `rotation`, N is the backward pass of the
/// norm at x, (tokens, q and k heads, 2·half).
cudaError_t rms_norm_rope_backward(Float type, Heads dq, Heads dk, Heads dv, Heads x, void* out, int64_t out_stride, HeadNorm norm,
                                   Rotation rotation, int64_t tokens, int64_t half, Stream stream);

}  // namespace qlorapp::cuda
