// SPDX-License-Identifier: Apache-2.0
/// What an optimizer step must know of a flat arena of gradients, found on the device in two launches and one pass, so that the
/// host asks for nothing before the update.
///
///     g' = round(g · inverse_scale)       norm = ‖g'‖₂       found_inf = 1 if an element of g' is not finite, else 0
///     multiplier = inverse_scale · min(1, max_norm / (norm + 1e-6))          max_norm 0: multiplier = inverse_scale
///
/// The gradients are not changed: adamw (adamw.hpp) multiplies by `multiplier` as it reads them, and leaves everything alone if
/// found_inf says so. Squares add up in float within a thread and a block, in double across blocks; the grid does not depend on
/// the GPU, so that two machines give the same bits. Relative error of the norm below 1e-6. The norm overflows to infinity,
/// without found_inf, from 1.8e19 on.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// Bytes of workspace that gradient_norm needs.
inline constexpr int64_t kGradientNormBlocks = 1024;
inline constexpr int64_t kGradientNormWorkspace = kGradientNormBlocks * 8;

/// @param gradient  float (n).  @param inverse_scale  float () on the device; null is 1.
/// @param workspace  kGradientNormWorkspace bytes, aligned to 8.  @param norm, found_inf, multiplier  float () each, written.
cudaError_t gradient_norm(const float* gradient, int64_t n, const float* inverse_scale, float max_norm, void* workspace,
                          float* norm, float* found_inf, float* multiplier, Stream stream);

}  // namespace qlorapp::cuda
