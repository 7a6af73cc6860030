// SPDX-License-Identifier: Apache-2.0
/// What the ranks of a run do together in one optimizer step: the denominator, the gradients, the loss. Alone it does nothing.
///
/// Rank r computes the micro-batches r, r + R, r + 2R … of the window of all R ranks. A micro-batch keeps the number that it has in one
/// process, so it has the same dropout masks. R ranks × k micro-batches give the sums of one rank × R·k; only the order of the additions
/// differs.
///
/// Gradients lie in one arena and are summed once a step. On a GPU the sum of a block's gradients begins when the backward pass of the last
/// micro-batch has left the block, beside the backward pass of the blocks before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/nn/batch.hpp"

namespace qlorapp {

/// Totals of a step over all ranks.
struct WindowCounts {
  int64_t targets = -1;  ///< Below 0: not known yet.
  int64_t micro_batches = 0, input_tokens = 0;
};

class SharedStep {
 public:
  /// @param ranks  null: one process.  @param window  this rank's micro-batches, in their order.  @param in_bf16  sums gradients in bfloat16:
  ///        half the bytes, and three digits.
  /// @param met     what an earlier attempt at this window has learned; gets what this one learns. Null: there is no other attempt.
  SharedStep(Communicator* ranks, std::span<const Batch> window, bool in_bf16, WindowCounts* met = nullptr);

  /// Meets the other ranks, once for a window: the host waits for theirs, and no GPU does.
  /// @param targets  of this rank's micro-batches.  @returns those of all ranks.
  int64_t meet(int64_t targets);
  [[nodiscard]] const WindowCounts& counts() const { return counts_; }

  /// The number of this rank's next micro-batch within the window of all ranks; parts of one share it.
  [[nodiscard]] int64_t place_of(const Batch& batch);

  /// Called by a backward pass when the gradients of a block and of those behind it are whole. Empty but for the last micro-batch on a GPU.
  [[nodiscard]] std::function<void(int64_t block)> on_block_done(const AdapterArena& arena, bool is_last);

  /// The gradients and the loss become sums over the ranks. On a GPU the current stream waits for them, and the host does not.
  void sum(const AdapterArena& arena, at::Tensor& mean_loss);

 private:
  void begin(const AdapterArena& arena, int64_t first_element);

  Communicator* ranks_;
  bool in_bf16_;
  WindowCounts* met_;
  WindowCounts counts_;
  int64_t begun_ = 0;                    ///< Micro-batches of this rank.
  int64_t summed_from_ = -1;             ///< Elements from here on are being summed; -1: none.
  std::vector<int64_t> first_elements_;  ///< Of each block's gradients, where blocks follow each other.
  std::vector<Exchange> exchanges_;
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded_;  ///< A slice and its sum in bfloat16.
};

/// The first element of each decoder block's gradients. Empty if the blocks do not follow each other in the arena.
[[nodiscard]] std::vector<int64_t> block_starts(const AdapterArena& arena);

}  // namespace qlorapp
