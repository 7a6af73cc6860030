// SPDX-License-Identifier: Apache-2.0
/// The denominator of a window of micro-batches, counted before the first of them runs.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"

namespace qlorapp {

/// The mean loss over a big batch is (sum of the losses of all its targets) / (number of its targets). Averaging the means of
/// k micro-batches is something else as soon as they differ in targets, and so is dividing by k when the last window of an
/// epoch has fewer. Hence: count the targets of the whole window first, weigh each micro-batch's *summed* loss by
///
///     weight = 1 / (targets in the window, over all ranks)
///
/// and k micro-batches give the loss and the gradients of one big batch, on ragged rows and on the last, partial window. A
/// window without a single target has weight 0: it contributes nothing, and never 0/0.
///
///     Accumulator accumulator(target_counts);                       // of every micro-batch of the window
///     for (const Rows& rows : window) accumulator.share_of(loss_sum(rows)).backward();
///     const at::Tensor loss = accumulator.mean_loss();
///
/// Each micro-batch's loss is given once: to share_of(), or to add() where the model scales its gradients by weight_tensor() itself.
///
/// Source: the definition; transformers calls the count `num_items_in_batch`. Lives for one window.
class Accumulator {
 public:
  struct Options {
    /// Also counts the rows whose first token carries a label, though nothing predicts it: the denominator of transformers
    /// 4.46 to some 5.x, for parity with runs of that time. The loss comes out low by rows / tokens.
    bool count_position_zero = false;
    /// Turns this rank's count into that of all ranks (a sum), once, in the constructor. Empty: there is one rank.
    std::function<int64_t(int64_t)> sum_over_ranks{};
  };

  /// @param target_counts  targets of each micro-batch of the window (Batch::target_count).
  /// @throws ValueError if a count is negative.
  explicit Accumulator(std::span<const int64_t> target_counts, const Options& options);
  explicit Accumulator(std::span<const int64_t> target_counts) : Accumulator(target_counts, Options{}) {}
  /// Of the batches themselves.
  explicit Accumulator(std::span<const Batch> window, const Options& options);
  explicit Accumulator(std::span<const Batch> window) : Accumulator(window, Options{}) {}

  /// 1 / tokens(), or 0 without targets: for a model that scales its gradients itself.
  [[nodiscard]] double weight() const { return tokens_ == 0 ? 0.0 : 1.0 / static_cast<double>(tokens_); }

  /// weight() as () float32 on `device`, ready for GradScaler::scale(): what a model multiplies its gradients by. Does not
  /// synchronize.
  [[nodiscard]] at::Tensor weight_tensor(at::Device device) const;

  /// @param loss_sum  one floating number: a micro-batch's loss, summed over its targets. @throws ValueError if it is anything else.
  ///        Also ValueError if the window has no micro-batch left.
  /// @returns loss_sum / tokens() on the same graph; backward through it adds this micro-batch's part of the gradients.
  ///          Counts the loss in mean_loss(). Does not synchronize.
  [[nodiscard]] at::Tensor share_of(const at::Tensor& loss_sum);

  /// Counts a micro-batch's summed loss in mean_loss(), in double, on its device. @throws ValueError as share_of(). Does not synchronize.
  void add(const at::Tensor& loss_sum);

  /// @returns (), float64: the losses / tokens(), 0 without targets. This rank's share: sum it over ranks for the mean of
  ///          all. Does not synchronize; reading it does. @throws ValueError if a micro-batch of the window is missing.
  [[nodiscard]] at::Tensor mean_loss() const;

  /// The denominator: targets in the window over all ranks.
  [[nodiscard]] int64_t tokens() const { return tokens_; }

 private:
  int64_t tokens_ = 0;
  int64_t size_ = 0;     // micro-batches in the window
  int64_t added_ = 0;    // and those whose loss is counted
  at::Tensor loss_sum_;  // () float64, undefined before the first add()
};

}  // namespace qlorapp
