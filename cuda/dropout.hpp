// SPDX-License-Identifier: Apache-2.0
/// Dropout from a counter (src/core/philox.hpp) on the GPU: the mask and the values of the CPU operator, bit for
/// bit. The generator is written once more here, on registers: std::array's members are not device functions.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// Names a mask, as qlorapp::DropoutKey does.
struct MaskKey {
  uint64_t seed;
  uint32_t micro_step, site;
  uint64_t first;  ///< Of x in the mask, a multiple of four.
};

/// y = x · mask · keep_scale over n elements, which lie together; y may be x. An element is kept if its 32 bits reach
/// `threshold`.
cudaError_t seeded_dropout(Float type, const void* x, void* y, int64_t n, MaskKey key, uint32_t threshold, float keep_scale,
                           Stream stream);

}  // namespace qlorapp::cuda
