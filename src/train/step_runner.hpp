// SPDX-License-Identifier: Apache-2.0
/// Computes the steps of another loop: gradients() of a window that the loop has read, then update().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/step.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/loss_trend.hpp"
#include "train/unread_losses.hpp"
#include "train/window_runner.hpp"

namespace qlorapp {

/// For one model with an active adapter. A step has the numbers of Trainer's. Of several ranks each has its own part of a window, of as many
/// micro-batches as the others', and makes the same calls.
class StepRunner {
 public:
  struct Options {
    bool token_statistics = false;                  ///< found() has them, of gradients().
    std::shared_ptr<Communicator> ranks = nullptr;  ///< Null: one process, or the ranks of a base that is divided.
    int64_t longest_row = 0;                        ///< In tokens, for plans; 0: args.max_length.
  };
  /// Sets the model up as the options say. Ranks begin with rank 0's adapter.
  /// @throws ValueError as Trainer; on all ranks if versions, arguments, device types or adapters differ.
  StepRunner(std::shared_ptr<CausalLM> model, TrainingArguments args, Options options);

  /// Forward and backward of a step's micro-batches, on the host or the model's device, each weighed by the targets of all. A window that
  /// ran out of memory is taken again in smaller parts. Leaves gradients, times the loss scale, in the arena: those of a window that had no
  /// update stay in them, as in a loop over torch's.
  /// @param stop_now  asked between two micro-batches; may be empty.
  /// @returns false if it was true, on one rank: the state is that before the window.
  bool gradients(std::span<const Batch> window, const std::function<bool()>& stop_now = {});
  /// The same for gradients, times scale(), that another backward pass has left in the arena, of this rank.
  /// @param mean_loss  (), this rank's part of the window's.  @param micro_batches  of this rank, for the key of dropout masks.
  void take_gradients(const at::Tensor& mean_loss, int64_t micro_batches);
  /// The last window had no update so far.
  [[nodiscard]] bool is_open() const { return is_open_; }
  /// The results of the last window. Tensors are on the device.
  [[nodiscard]] const WindowGradients& found() const { return found_; }

  /// Clips and updates.  @returns false if the loss scale found an overflow: then nothing has changed.
  /// @throws TrainingDiverged as read(), which is called here if must_read(), never with on_non_finite=rollback; ValueError without a window.
  bool update(double rate);
  /// Sums over the ranks; `values` as they are for one process. Synchronizes.
  [[nodiscard]] std::vector<int64_t> sum(std::vector<int64_t> values);
  /// @throws ValueError on all ranks if the value differs between them.
  void check_same(const std::string& what, const std::string& value);
  /// Tells the other ranks why this one ends.
  void report_failure(const std::string& why);

  /// @throws TrainingDiverged if gradients of a step since the last call were not finite; LossScaleExhausted. Synchronizes.
  void read();
  /// So many steps were not read that read() is due, or the last one found that training cannot go on.
  [[nodiscard]] bool must_read() const { return !model_->device().is_cuda() || unread_.full() || !exhausted_.empty(); }

  /// Those that were given; a budget has replaced some.
  [[nodiscard]] const TrainingArguments& arguments() const { return args_; }
  /// Forward and backward of the largest micro-batch that can come, without an update: memory runs out here if it ever does.
  /// @throws OutOfMemoryError as gradients().
  void run_worst_case(const Batch& largest) { runner_.run_worst_case(largest); }

  /// Goes on from a checkpoint that Trainer wrote, whose adapter is loaded: moments, loss scale, counters. Rows are not compared.
  /// @returns whether options that affect the results differ, which args.resume_with_changes allows.
  /// @throws FormatError if base or options differ, or a file is missing or malformed.
  bool load_state(const std::string& folder);

  /// Micro-batches of windows that had their update: a checkpoint between two micro-batches begins its window again.
  [[nodiscard]] uint32_t whole_micro_steps() const { return is_open_ ? first_micro_step_ : state_.micro_step; }

  /// Frees the recorded steps of cuda_graphs.
  void clear_graphs() { runner_.clear_graphs(); }

  /// (), what losses are multiplied by before a backward pass.
  [[nodiscard]] at::Tensor scale();
  [[nodiscard]] TrainState& state() { return state_; }

 private:
  [[nodiscard]] GradientNorm norm() const;
  [[nodiscard]] int64_t rank_count() const { return state_.ranks ? state_.ranks->size() : 1; }

  std::shared_ptr<CausalLM> model_;
  TrainingArguments args_;
  TrainState state_;
  WindowRunner runner_;
  bool token_statistics_;
  std::vector<Batch> window_;  ///< On the host, for the diagnosis.
  WindowGradients found_;
  uint32_t first_micro_step_ = 0;  ///< Of the window.
  bool is_open_ = false;
  UnreadLosses unread_;
  std::string exhausted_;  ///< Why the loss scale gave up, until read() says so.
  LossTrend trend_;
};

}  // namespace qlorapp
