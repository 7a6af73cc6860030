// SPDX-License-Identifier: Apache-2.0
/// Optimizer moments that live on a GPU while there is room and in pinned host memory while there is not.
///
///     out   when something else is to be allocated and the device's room is below an eighth of it (at most 2 GiB)
///     back  before a step, when the room without them is twice that
///     step  where they are; on the host in chunks: host → device, update, device → host, in the order of the stream
///
/// bitsandbytes pages with managed memory, which moves at about half the rate and behind the stream's back; here nothing is
/// managed. The update of a chunk is elementwise or by blocks that no chunk cuts, so where the moments are changes no bit of
/// them.
///
/// Moving out happens inside the allocator's free-memory callback (ops/device_memory.hpp has its rules). That is
/// safe because it allocates nothing on the device, takes no lock that it would have to wait for (moments that a step is using,
/// or that have another owner, stay), and because the freed memory is used again in the order of the stream in
/// which the copy runs; another stream gets it only through the driver or an event. The alternative, a flag that the next step
/// reads, would come too late: the peak of a step is in its forward and backward passes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "ops/adamw.hpp"
#include "ops/device_memory.hpp"

namespace qlorapp {

/// Stays where it is in memory: the allocator knows it by its address.
class PagedState final : ops::MemoryRelief {
 public:
  /// Elements of a parameter that a step on the host takes at a time.
  static constexpr int64_t kChunk = ops::kPagedMomentsChunk;

  /// @param moments  on one GPU, one-dimensional, without another owner; their sizes divide `elements`.
  PagedState(std::vector<at::Tensor> moments, int64_t elements);
  ~PagedState();
  PagedState(const PagedState&) = delete;
  PagedState& operator=(const PagedState&) = delete;

  /// Moments of parameters [begin, begin + count) on the device, to be changed in place.
  using Update = std::function<void(std::vector<at::Tensor>& moments, int64_t begin, int64_t count)>;
  /// Calls update once for all, or chunk by chunk. Does not synchronize.
  void step(const Update& update);

  /// The moments where they are; they stay there while the result is held. On the host: waits until copies in flight have
  /// arrived.
  [[nodiscard]] std::vector<at::Tensor> tensors();
  [[nodiscard]] bool on_host() const { return on_host_; }
  [[nodiscard]] Bytes nbytes() const { return bytes_; }
  /// Moves by hand, as pressure and room do by themselves. @returns whether anything moved.
  bool move_to_host();
  bool move_to_device();

 private:
  class Busy;
  bool relieve(at::Device device, const ops::DeviceRoom& room) noexcept override;
  void to_host();
  void to_device();
  [[nodiscard]] bool held_elsewhere() const;
  void follow_current_stream();

  at::Device device_;
  int64_t elements_;
  Bytes bytes_;
  std::vector<at::Tensor> moments_;
  c10::Stream allocated_on_;  ///< Stream that the device tensors belong to.
  c10::Stream used_on_;       ///< Stream of their last use.
  c10::Event last_use_;
  std::atomic<bool> on_host_{false};
  std::atomic<bool> busy_{false};
};

}  // namespace qlorapp
