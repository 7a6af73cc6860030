// SPDX-License-Identifier: Apache-2.0
/// A GPU's free memory, the layout of torch's allocator, and callbacks that free memory before it allocates more.
///
/// Expandable segments: a card must have the memory that the allocator reserves. With segments of fixed sizes a tenth of it is
/// holes that fit no request. The library therefore sets expandable_segments:True when it first uses a GPU, unless the user has
/// set PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF (to anything, the empty text included), the program has given torch settings
/// of its own, the allocator is not torch's own, or the GPU cannot map memory (some virtual GPUs). Segments that exist stay
/// as they are. docs/adr/0018 has the reasons.
///
/// torch's caching allocator calls its free-memory callbacks at every request that its cache cannot serve, before it asks the
/// driver, and looks into its cache again if one says that it freed something. One of them is ours; it passes the question on.
///
/// What a relief may do there (torch 2.11, c10/cuda/CUDACachingAllocator.cpp, malloc and trigger_free_memory_callbacks): the
/// callback runs on the requesting thread, under that device's allocator lock, with nothing of the allocator changed yet. The
/// lock is recursive, so freeing device tensors is allowed; such callbacks exist for it (torch's own, cuda_ipc_collect,
/// does it). Not allowed: waiting for a lock that another thread may hold while it allocates on the device (hence try, do not
/// wait), and device allocations. While the current stream is being captured into a graph no relief is called, because
/// nothing may move then. The size of the request is unknown.
#pragma once

#include <exception>
#include <optional>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp::ops {

struct DeviceRoom {
  Bytes free;   ///< What the allocator may still take: free on the device, and below the cap of this process.
  Bytes total;  ///< Of the device, or the cap (torch.cuda.set_per_process_memory_fraction).
  Bytes held;   ///< Held by the allocator: in use, or cached.
};

/// @returns nothing for a CPU. Asks the driver; does not synchronize.
[[nodiscard]] std::optional<DeviceRoom> device_room(at::Device device);

/// What a program may still allocate: on a GPU DeviceRoom::free, on a CPU what the system says is available to it.
/// @throws IoError where the system does not say.
[[nodiscard]] Bytes free_memory(at::Device device);
/// All that this process has or may allocate there.
[[nodiscard]] Bytes usable_memory(at::Device device);

/// Sets expandable segments by the rule above, once in a process; later calls cost one load. Code that runs on a GPU calls it before
/// it allocates. Nothing without a GPU. Logs at debug level what it did.
void prepare_device_memory();

/// Whether torch's allocator uses expandable segments, or will once prepare_device_memory() has run: what plans count with. Without
/// a GPU the environment's variables decide, as they would where a run has their values.
[[nodiscard]] bool uses_expandable_segments();

/// On a CPU: bounds the products that oneDNN keeps compiled, which it does by shape, up to a MiB each and 1,024 of them by default.
/// Rows of mixed lengths bring new shapes with every step, while those of one step repeat in every block: 64 keep the hits. To be
/// called before the first product in 16 bits: oneDNN reads its variable, ONEDNN_PRIMITIVE_CACHE_CAPACITY, when it makes its first
/// primitive, and torch exports no function for it. A user's value stays.
void bound_primitive_cache();

/// Whether an allocation failed: of a GPU's allocator (c10::OutOfMemoryError), of the C++ library, or of those that state it in a message only
/// (torch's for CPUs, the CUDA driver, cuBLAS).
[[nodiscard]] bool is_out_of_memory(const std::exception& error);

/// Host memory for a tensor that a GPU reads, page-locked, not filled. Torch's allocator of such memory rounds up to a power of two;
/// this does not. Freeing it waits until the GPU is idle.
/// @param beside  the GPU; Meta: a tensor without memory, for a plan; a CPU: ordinary memory.
[[nodiscard]] at::Tensor empty_on_host(at::IntArrayRef shape, at::ScalarType dtype, at::Device beside);

/// at::empty for a weight. On a CPU its memory asks for huge pages, where the system gives them on request (Linux, madvise): each
/// token that is decoded reads all weights, about a seventh faster so. Nothing depends on whether it gets them.
[[nodiscard]] at::Tensor empty_for_weight(at::IntArrayRef shape, const at::TensorOptions& options);

/// Returns the unused memory of torch's allocator to the device. Does nothing on a CPU.
void release_cached_memory(at::Device device);

class MemoryRelief {
 public:
  /// Called before the allocator asks the device for more memory. The rules are above.
  /// @returns whether device memory was freed.
  virtual bool relieve(at::Device device, const DeviceRoom& room) noexcept = 0;

 protected:
  ~MemoryRelief() = default;
};

/// `relief` is asked until it is removed; removing waits for a question under way.
void add_memory_relief(MemoryRelief* relief);
void remove_memory_relief(MemoryRelief* relief);

namespace detail {

/// Registered by the code for a kind of GPU when the library is loaded.
struct DeviceMemory {
  DeviceRoom (*room_of)(at::Device device);
  void (*prepare)();
  bool (*is_expandable)();                              ///< The allocator's present mode.
  void* (*lock_host)(size_t bytes, at::Device device);  ///< Page-locked host memory.
  void (*unlock_host)(void* memory);
};
void set_device_memory(const DeviceMemory* memory);

/// Whether the environment has settings for torch's allocator, and whether they ask for expandable segments; none: no settings.
[[nodiscard]] std::optional<bool> segments_by_environment();
[[nodiscard]] bool has_memory_relief() noexcept;
/// Asks everybody. @returns whether anything was freed.
[[nodiscard]] bool relieve_memory(at::Device device) noexcept;

}  // namespace detail
}  // namespace qlorapp::ops
