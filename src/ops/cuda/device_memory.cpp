// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/device_memory.hpp"

#include <dlfcn.h>

#include <algorithm>

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>
#if __has_include(<c10/core/AllocatorConfig.h>)
#include <c10/core/AllocatorConfig.h>
#endif

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::ops {
namespace {

DeviceRoom room_of(at::Device device) {
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

/// The driver's own calls: the runtime has none for mapped memory.
struct Driver {
  Driver() : library_(dlopen("libcuda.so.1", RTLD_LAZY)) {
    if (library_ == nullptr) return;
    find(attribute, "cuDeviceGetAttribute");
    find(create, "cuMemCreate");
    find(release, "cuMemRelease");
  }
  ~Driver() {
    if (library_ != nullptr) dlclose(library_);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  [[nodiscard]] bool is_complete() const { return attribute != nullptr && create != nullptr && release != nullptr; }

  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }
  void* library_;
};

/// Whether a GPU can map memory in the way that torch asks for. A page is taken and given back: some virtual GPUs and sandboxes
/// claim that they can, and refuse.
bool can_map_memory(const Driver& driver, CUdevice device) {
  for (const auto needed :
       {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    int value = 0;
    if (driver.attribute(&value, needed, device) != CUDA_SUCCESS || value == 0) return false;
  }
  CUmemAllocationProp page{};
  page.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  page.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  page.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  constexpr size_t kPage = size_t{2} << 20;
  CUmemGenericAllocationHandle handle{};
  const CUresult taken = driver.create(&handle, kPage, &page, 0);
  if (taken == CUDA_SUCCESS) static_cast<void>(driver.release(handle));
  return taken == CUDA_SUCCESS || taken == CUDA_ERROR_OUT_OF_MEMORY || taken == CUDA_ERROR_INVALID_CONTEXT;
}

bool can_map_memory() {
  const int count = c10::cuda::device_count();  // initializes the driver
  const Driver driver;
  bool all = count > 0 && driver.is_complete();
  for (int device = 0; device < count && all; ++device) all = can_map_memory(driver, device);
  return all;
}

/// What torch's allocator was last told, by the environment or by the program.
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
    log_debug(concat("torch's CUDA allocator: its settings are left as they are (", why, ")"));
  };
  if (detail::segments_by_environment()) return leave("PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set");
  if (!last_settings().empty()) return leave("the program has set some");
  if (allocator::get()->name() != "native") return leave("it is not torch's own");
  if (!can_map_memory()) return leave("this GPU cannot map memory");
  allocator::setAllocatorSettings("expandable_segments:True");
  log_debug("torch's CUDA allocator: expandable_segments:True is set; PYTORCH_ALLOC_CONF overrides");
}

/// CUDAAllocatorConfig::expandable_segments() answers false to everybody but torch: its inline body depends on a macro of torch's build.
bool is_expandable() {
  if (c10::cuda::CUDACachingAllocator::get()->name() != "native") return false;
#if __has_include(<c10/core/AllocatorConfig.h>)
  return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
#else
  return last_settings().find("expandable_segments:True") != std::string::npos;
#endif
}

constexpr detail::DeviceMemory kMemory{room_of, prepare, is_expandable};
[[maybe_unused]] const bool told = (detail::set_device_memory(&kMemory), true);

}  // namespace
}  // namespace qlorapp::ops

namespace c10 {
namespace {
using qlorapp::ops::FreeMemory;
REGISTER_FREE_MEMORY_CALLBACK("qlorapp", FreeMemory)
}  // namespace
}  // namespace c10
