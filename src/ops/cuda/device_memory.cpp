// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/device_memory.hpp"

#include <algorithm>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

namespace qlorapp::ops {
namespace {

DeviceRoom room_of(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto cap =
      static_cast<int64_t>(c10::cuda::CUDACachingAllocator::getMemoryFraction(device.index()) * static_cast<double>(total));
  const int64_t reserved = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).reserved_bytes[0].current;
  return {Bytes{std::clamp<int64_t>(cap - reserved, 0, static_cast<int64_t>(free))}, Bytes{cap}, Bytes{reserved}};
}

class FreeMemory final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    if (!detail::has_memory_relief()) return false;
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
    return detail::relieve_memory({at::kCUDA, c10::cuda::current_device()});
  }
};

[[maybe_unused]] const bool told = (detail::set_room_of(room_of), true);

}  // namespace
}  // namespace qlorapp::ops

namespace c10 {
namespace {
using qlorapp::ops::FreeMemory;
REGISTER_FREE_MEMORY_CALLBACK("qlorapp", FreeMemory)
}  // namespace
}  // namespace c10
