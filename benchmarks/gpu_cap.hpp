// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

namespace qlorapp::bench {

/// GiB that torch's allocator may hold on the current GPU; 0: all.
inline void set_cap(double gib) {
  const auto device = c10::cuda::current_device();
  const double total = static_cast<double>(at::cuda::getDeviceProperties(device)->totalGlobalMem) / (1 << 30);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(gib > 0 ? std::min(gib / total, 1.0) : 1.0, device);
}

}  // namespace qlorapp::bench
