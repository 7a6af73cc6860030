// SPDX-License-Identifier: Apache-2.0
#include "ops/device_memory.hpp"

#include "core/check.hpp"
#include "qlorapp/core/error.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace qlorapp::ops {
namespace {

std::mutex mutex;
std::vector<MemoryRelief*> reliefs;
std::atomic<size_t> relief_count{0};
constinit std::atomic<const detail::DeviceMemory*> memory_of_gpu{nullptr};  // set by another file's static initializer
constinit std::atomic<bool> prepared{false};
constinit thread_local bool asking = false;

Bytes kilobytes_in(const char* file, const char* name) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name)) return Bytes{std::strtoll(line.c_str() + std::strlen(name), nullptr, 10) * 1024};
  }
  throw IoError(message("{} must have a line '{}'; it has none. Give the memory instead of auto.", file, name), ENOENT);
}

}  // namespace

at::Tensor empty_for_weight(at::IntArrayRef shape, const at::TensorOptions& options) {
  at::Tensor weight = at::empty(shape, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (weight.is_cpu()) {  // whole pages alone: others may lie on the first and the last
    static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto memory = reinterpret_cast<uintptr_t>(weight.mutable_data_ptr());
    const uintptr_t begin = (memory + page - 1) / page * page, end = (memory + weight.nbytes()) / page * page;
    if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return weight;
}

std::optional<DeviceRoom> device_room(at::Device device) {
  const detail::DeviceMemory* const memory = memory_of_gpu.load();
  if (device.is_cpu() || memory == nullptr) return std::nullopt;
  return memory->room_of(device);
}

Bytes free_memory(at::Device device) {
  if (const auto room = device_room(device)) return room->free;
  return kilobytes_in("/proc/meminfo", "MemAvailable:");
}

Bytes usable_memory(at::Device device) {
  if (const auto room = device_room(device)) return room->free + room->held;
  return free_memory(device) + kilobytes_in("/proc/self/status", "VmRSS:");
}

void prepare_device_memory() {
  if (prepared.load(std::memory_order_acquire)) return;
  const detail::DeviceMemory* const memory = memory_of_gpu.load();
  if (memory == nullptr) return;
  static std::once_flag once;
  static thread_local bool preparing = false;  // its probe allocates, which may ask for room
  if (preparing) return;
  preparing = true;
  std::call_once(once, [memory] { memory->prepare(); });
  preparing = false;
  prepared.store(true, std::memory_order_release);
}

bool uses_expandable_segments() {
  const detail::DeviceMemory* const memory = memory_of_gpu.load();
  if (memory != nullptr && prepared.load(std::memory_order_acquire)) return memory->is_expandable();
  return detail::segments_by_environment().value_or(true);
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  if (dynamic_cast<const OutOfMemoryError*>(&error) != nullptr) return true;
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  // Torch's allocator for CPUs (c10/core/impl/alloc_cpu.cpp), the driver, which is asked directly for pinned memory and tables, and cuBLAS.
  static constexpr std::array<std::string_view, 3> kWords{"DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory",
                                                          "CUBLAS_STATUS_ALLOC_FAILED"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [text = std::string_view(error.what())](std::string_view words) { return text.find(words) != text.npos; });
}

at::Tensor empty_on_host(at::IntArrayRef shape, at::ScalarType dtype, at::Device beside) {
  const at::TensorOptions options = at::TensorOptions().dtype(dtype);
  if (beside.is_meta()) return at::from_blob(nullptr, shape, options);
  const detail::DeviceMemory* const memory = memory_of_gpu.load();
  if (beside.is_cpu() || memory == nullptr) return at::empty(shape, options.pinned_memory(!beside.is_cpu()));
  const auto bytes = static_cast<size_t>(c10::multiply_integers(shape)) * c10::elementSize(dtype);
  return at::from_blob(memory->lock_host(bytes, beside), shape, memory->unlock_host, options);
}

void release_cached_memory(at::Device device) {
  if (!device.is_cpu()) at::getDeviceAllocator(device.type())->emptyCache();
}

void bound_primitive_cache() {
  static const int set = [] {
    if (std::getenv("DNNL_PRIMITIVE_CACHE_CAPACITY") != nullptr) return 0;  // the older name
    return setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64", /*overwrite=*/0);
  }();
  static_cast<void>(set);
}

void add_memory_relief(MemoryRelief* relief) {
  const std::lock_guard lock(mutex);
  reliefs.push_back(relief);
  relief_count = reliefs.size();
}

void remove_memory_relief(MemoryRelief* relief) {
  const std::lock_guard lock(mutex);
  std::erase(reliefs, relief);
  relief_count = reliefs.size();
}

namespace detail {

void set_device_memory(const DeviceMemory* memory) { memory_of_gpu = memory; }

std::optional<bool> segments_by_environment() {
  // In the order in which torch's CUDA allocator looks (c10/cuda/CUDAAllocatorConfig.h, instance()).
  for (const char* const name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    std::string settings = value;
    std::erase_if(settings, [](char c) { return c == ' '; });
    return settings.find("expandable_segments:True") != std::string::npos;
  }
  return std::nullopt;
}

bool has_memory_relief() noexcept { return relief_count > 0; }

bool relieve_memory(at::Device device) noexcept {
  if (asking) return false;  // a relief allocates, against the rules; do not ask it again
  asking = true;
  bool freed = false;
  try {
    const std::lock_guard lock(mutex);
    if (const auto room = device_room(device)) {
      for (MemoryRelief* relief : reliefs) freed = relief->relieve(device, *room) || freed;
    }
  } catch (const std::exception&) {
    // The driver did not answer; the allocation that follows will say why.
  }
  asking = false;
  return freed;
}

}  // namespace detail
}  // namespace qlorapp::ops
