// SPDX-License-Identifier: Apache-2.0
#include "ops/device_memory.hpp"

#include <algorithm>

#include <ATen/Context.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#if __has_include(<c10/core/AllocatorConfig.h>)
#include <c10/core/AllocatorConfig.h>
#endif

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::ops {
namespace {

/// torch makes its allocator with the first tensor on a GPU, and asks of it fail before.
void make_allocator() { at::globalContext().lazyInitDevice(at::kCUDA); }

DeviceRoom room_of(at::Device device) {
  make_allocator();
  prepare_device_memory();
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

/// Whether torch's allocator gets memory with expandable segments, which some virtual GPUs and sandboxes refuse: a page is taken on the current
/// device and goes into the allocator's cache.
bool can_map_memory() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  make_allocator();
  try {
    allocator::raw_delete(allocator::raw_alloc(1));
  } catch (const c10::OutOfMemoryError&) {  // the GPU is full, and could
  } catch (const c10::Error&) { return false; }
  return true;
}

/// The last settings of torch's allocator, from the environment or the program.
std::string last_settings() {
#if __has_include(<c10/core/AllocatorConfig.h>)
  return c10::CachingAllocator::getAllocatorSettings();
#else  // torch 2.8
  return c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::last_allocator_settings();
#endif
}

void prepare() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto leave = [](const char* why) {
    log_debug(message("torch's CUDA allocator: its settings are left as they are ({})", why));
  };
  if (detail::segments_by_environment()) return leave("PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set");
  if (!last_settings().empty()) return leave("the program has set some");
  if (allocator::get()->name() != "native") return leave("it is not torch's own");
  if (c10::cuda::device_count() == 0) return leave("there is no GPU");
  allocator::setAllocatorSettings("expandable_segments:True");
  if (!can_map_memory()) {
    allocator::setAllocatorSettings("expandable_segments:False");
    return leave("this GPU cannot map memory");
  }
  log_debug("torch's CUDA allocator: expandable_segments:True is set; PYTORCH_ALLOC_CONF overrides");
}

/// CUDAAllocatorConfig::expandable_segments() is no help: it answers false to code that is compiled outside of torch.
bool is_expandable() {
#if __has_include(<c10/core/AllocatorConfig.h>)
  const bool set = c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
#else  // torch 2.8
  const bool set = last_settings().find("expandable_segments:True") != std::string::npos;
#endif
  return set && c10::cuda::CUDACachingAllocator::get()->name() == "native";
}

void* lock_host(size_t bytes, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw OutOfMemoryError(message(
        "[memory] {} of host memory could not be page-locked for base_on_host or embedding_on_host. Free host memory, raise the "
        "container's limit, or leave both out.",
        to_string(Bytes{static_cast<int64_t>(bytes)})));
  }
  C10_CUDA_CHECK(error);
  return memory;
}

void unlock_host(void* memory) { C10_CUDA_CHECK_WARN(cudaFreeHost(memory)); }

constexpr detail::DeviceMemory kMemory{room_of, prepare, is_expandable, lock_host, unlock_host};
[[maybe_unused]] const bool memory_registered = (detail::set_device_memory(&kMemory), true);

}  // namespace
}  // namespace qlorapp::ops

namespace c10 {
namespace {
using qlorapp::ops::FreeMemory;
REGISTER_FREE_MEMORY_CALLBACK("qlorapp", FreeMemory)
}  // namespace
}  // namespace c10
