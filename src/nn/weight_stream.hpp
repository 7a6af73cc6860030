// SPDX-License-Identifier: Apache-2.0
/// Frozen weights that wait elsewhere and pass through two places on the device, one block ahead of the computation. They wait in host
/// memory, or in shards on the ranks of a run.
///
///     forward   block   0    1    2   …   L-1      backward   L-1  L-2  L-3  …   0      next micro-batch   0    1    2
///               copy    1    2    3   …                       -    L-3  L-4  …                             -    2    3
///
/// A copy, or the exchange that gathers the shards, runs on a stream of its own while the block before it computes. At each turn both
/// blocks are there, so a micro-batch copies 2·(L - 2) blocks. Copies bind the step where a block's bytes over the bus take longer than
/// its products. Of a sharded base all ranks must ask for the same blocks in the same order.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "nn/block_weights.hpp"
#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {

class WeightStream {
 public:
  /// A block's weights (block_weights.hpp).
  struct Source {
    at::Tensor bytes;  ///< One piece of host memory, or this rank's shard of it on the device.
    BlockForms forms;
  };
  /// @param device  of the computation; a CPU copies at once; Meta copies nothing.
  /// @param blocks  in the order of the model. Kept.
  /// @param ranks   hold the shards; null: the blocks are in host memory.
  WeightStream(at::Device device, std::vector<Source> blocks, std::shared_ptr<Communicator> ranks = nullptr);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  /// A block's weights on the device, until another block's are asked for. Does not synchronize the host: the current stream waits.
  /// The following block is fetched meanwhile: the neighbor in the direction of the last two requests. Not for several threads at once.
  /// @param training  false: after the last block comes the first, as no backward pass follows.
  [[nodiscard]] const BlockWeights& at(int64_t block, bool training);

  /// Blocks that were copied so far.
  [[nodiscard]] int64_t copies() const { return copied_; }
  /// Of both places.
  [[nodiscard]] Bytes device_bytes() const;

 private:
  struct Place {
    at::Tensor bytes;
    int64_t block = -1;
    int64_t version = 0;   ///< Of the source's memory when it was copied: adapters initialized from a weight change it.
    BlockWeights weights;  ///< Views of `bytes`.
    std::optional<c10::Event> arrived;
    Exchange exchange;  ///< That gathers it, until it was waited for.
  };

  [[nodiscard]] bool holds(const Place& place, int64_t block) const;
  [[nodiscard]] int64_t after(int64_t block, int64_t before, bool training) const;
  void load(Place& place, int64_t block);
  void fill(Place& place, const at::Tensor& bytes);
  void wait_for(Place& place);

  at::Device device_;
  std::vector<Source> sources_;
  std::shared_ptr<Communicator> ranks_;
  std::array<Place, 2> places_;
  size_t current_ = 0;  ///< The place whose weights were asked for last.
  int64_t copied_ = 0;
  std::optional<c10::Stream> copies_, computation_;  ///< Of a GPU. computation_: the caller's at its last request.
  std::optional<c10::Event> forked_;
};

}  // namespace qlorapp
