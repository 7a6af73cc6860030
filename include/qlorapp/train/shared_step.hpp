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
#include "qlorapp/nn/micro_step.hpp"
#include "qlorapp/train/train_state.hpp"

namespace qlorapp {

/// Counts of a step's window: those of one rank, or their sums over all ranks.
struct WindowCounts {
  int64_t targets = 0, micro_batches = 0, input_tokens = 0;
};

/// Turns a rank's own counts into those of all ranks.
using SumCounts = std::function<WindowCounts(Communicator& ranks, const WindowCounts& own)>;

/// Asks the other ranks: the host waits for theirs, and no GPU does.
[[nodiscard]] WindowCounts sum_counts(Communicator& ranks, const WindowCounts& own);

/// Asks at the first call, and returns that answer at the later ones. For a window that is retried: the other ranks, which go on, answer
/// once. Copies share the answer. If asking throws, the next call asks again.
[[nodiscard]] SumCounts sum_counts_once();

class SharedStep {
 public:
  /// For one attempt at one window. `run` and `window` must outlive it.
  /// @param run     its ranks, seed, micro_step and arena are read. Its sums_in_bf16 halves the bytes of gradients, and leaves three digits.
  /// @param window  this rank's micro-batches, in their order.  @param sum  empty: sum_counts().
  SharedStep(const TrainState& run, std::span<const Batch> window, SumCounts sum = {});

  /// Sums the window's counts over the ranks, by `sum`.  @param targets  of this rank's micro-batches.  @returns those of all ranks.
  int64_t meet(int64_t targets);
  /// Those of all ranks, after meet().
  [[nodiscard]] const WindowCounts& counts() const { return counts_; }

  /// The key of the window's next batch, counted over all ranks. Call it once per batch, in their order.
  [[nodiscard]] StepKey next_key(const Batch& batch);

  /// Begins the sum of a block's gradients. Empty except for the last batch of the window, with several ranks on a GPU.
  [[nodiscard]] BlockDone on_block_done(const Batch& batch);

  /// The gradients and the loss become sums over the ranks. On a GPU the current stream waits for them, and the host does not.
  void sum_gradients_and(at::Tensor& mean_loss);

 private:
  void begin(int64_t first_element);

  const TrainState& run_;
  std::span<const Batch> window_;
  Communicator* ranks_;  ///< Null: one process.
  SumCounts sum_;
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
