// SPDX-License-Identifier: Apache-2.0
/// Rotary position embedding on the GPU: the rule and rounding points of src/ops/rope.hpp, bit-equal to the CPU.
///
/// A block a token: its cosines and sines are read once and serve every head. Positions are trusted.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// (tokens, heads, d): the elements of a head lie together; strides in elements.
struct Heads {
  const void* data;
  int64_t token_stride, head_stride, heads;
};

/// cos, sin: float (positions, half); position: int64 (tokens). The first 2·half elements of a head turn, in pairs from its two halves, or of
/// neighbors.
struct Rotation {
  const float *cos, *sin;
  const int64_t* position;
  int64_t half;
  bool inverse, interleaved;
};

/// y = rotated x; y may be x itself, in the same strides.
cudaError_t rope(Float type, Heads x, void* y, int64_t y_token_stride, int64_t y_head_stride, Rotation rotation, int64_t tokens,
                 int64_t head_dim, Stream stream);

/// Gathers three gradients into the packed layout of their projection, q and k turned by `rotation` on the way:
///     out[m] = [R(q[m]) | R(k[m]) | v[m]],  rows out_stride elements apart.
/// Attention's backward pass returns dq, dk and dv apart; this is RoPE's backward pass and their concatenation in one.
cudaError_t rope_packed(Float type, Heads q, Heads k, Heads v, void* out, int64_t out_stride, Rotation rotation, int64_t tokens,
                        int64_t head_dim, Stream stream);

}  // namespace qlorapp::cuda
