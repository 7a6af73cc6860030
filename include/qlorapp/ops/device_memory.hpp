// SPDX-License-Identifier: Apache-2.0
/// How much memory a GPU has left, and who gives some back before more is taken.
///
/// torch's caching allocator calls its free-memory callbacks at every request that its cache cannot serve, before it asks the
/// driver, and looks into its cache again if one says that it freed something. One of them is ours; it passes the question on.
///
/// What a relief may do there (torch 2.11, c10/cuda/CUDACachingAllocator.cpp, malloc and trigger_free_memory_callbacks): the
/// callback runs on the requesting thread, under that device's allocator lock, with nothing of the allocator changed yet. The
/// lock is recursive, so freeing device tensors is allowed, and what such callbacks are for (torch's own, cuda_ipc_collect,
/// does it). Not allowed: waiting for a lock that another thread may hold while it allocates on the device (hence try, do not
/// wait), and device allocations. While the current stream is being captured into a graph nobody is asked, as nothing may be
/// moved then. The size of the request is not told.
#pragma once

#include <exception>
#include <optional>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp::ops {

struct DeviceRoom {
  Bytes free;   ///< What the allocator may still take: free on the device, and below the cap of this process.
  Bytes total;  ///< Of the device, or the cap (torch.cuda.set_per_process_memory_fraction).
  Bytes held;   ///< What the allocator has taken: in use, or cached.
};

/// @returns nothing for a CPU. Asks the driver; does not synchronize.
[[nodiscard]] std::optional<DeviceRoom> device_room(at::Device device);

/// Whether an allocation failed: of a GPU's allocator (c10::OutOfMemoryError), of the C++ library, or of those that have only words for it
/// (torch's for CPUs, the CUDA driver, cuBLAS).
[[nodiscard]] bool is_out_of_memory(const std::exception& error);

/// Gives what torch's allocator holds and nobody uses back to the device; nothing on a CPU.
void release_cached_memory(at::Device device);

class MemoryRelief {
 public:
  /// Asked before more is taken from the device. The rules stand above.
  /// @returns whether device memory was freed.
  virtual bool relieve(at::Device device, const DeviceRoom& room) noexcept = 0;

 protected:
  ~MemoryRelief() = default;
};

/// `relief` is asked until it is removed; removing waits for a question under way.
void add_memory_relief(MemoryRelief* relief);
void remove_memory_relief(MemoryRelief* relief);

namespace detail {

/// What the code for a kind of GPU says of itself when the library is loaded.
using RoomOf = DeviceRoom (*)(at::Device device);
void set_room_of(RoomOf room_of);
[[nodiscard]] bool has_memory_relief() noexcept;
/// Asks everybody. @returns whether anything was freed.
[[nodiscard]] bool relieve_memory(at::Device device) noexcept;

}  // namespace detail
}  // namespace qlorapp::ops
