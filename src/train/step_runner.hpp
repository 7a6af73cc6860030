// SPDX-License-Identifier: Apache-2.0
/// Computes the steps of another loop: gradients() of a window that the loop has read, then update().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/step.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/loss_trend.hpp"
#include "train/unread_losses.hpp"
#include "train/window_runner.hpp"

namespace qlorapp {

/// For one process and one model with an active adapter. A step has the numbers of Trainer's.
class StepRunner {
 public:
  /// Sets the model up as the options say.  @throws ValueError as Trainer.
  StepRunner(std::shared_ptr<CausalLM> model, TrainingArguments args);

  /// Forward and backward of a step's micro-batches, on the host or the model's device, each weighed by the targets of all. A window that
  /// ran out of memory is taken again in smaller parts. Leaves gradients, times the loss scale, in the arena: those of a window that had no
  /// update stay in them, as in a loop over torch's.
  void gradients(std::span<const Batch> window);
  /// The same for gradients, times scale(), that another backward pass has left in the arena.
  /// @param mean_loss  (), of the window.  @param micro_batches  that it had, for the key of dropout masks.
  void take_gradients(const at::Tensor& mean_loss, int64_t micro_batches);
  /// The last window had no update so far.
  [[nodiscard]] bool is_open() const { return is_open_; }
  /// The results of the last window. Tensors are on the device.
  [[nodiscard]] const WindowGradients& found() const { return found_; }

  /// Clips and updates.  @returns false if the loss scale found an overflow: then nothing has changed.
  /// @throws TrainingDiverged as read(): on a CPU here, on a GPU at every 256th step; LossScaleExhausted; ValueError without a window.
  bool update(double rate);
  /// @throws TrainingDiverged if gradients of a step since the last call were not finite. Synchronizes.
  void read();

  /// Frees the recorded steps of cuda_graphs.
  void clear_graphs() { runner_.clear_graphs(); }

  /// (), what losses are multiplied by before a backward pass.
  [[nodiscard]] at::Tensor scale();
  [[nodiscard]] TrainState& state() { return state_; }

 private:
  [[nodiscard]] GradientNorm norm() const;

  std::shared_ptr<CausalLM> model_;
  TrainingArguments args_;
  TrainState state_;
  WindowRunner runner_;
  std::vector<Batch> window_;  ///< On the host, for the diagnosis.
  WindowGradients found_;
  uint32_t first_micro_step_ = 0;  ///< Of the window.
  bool is_open_ = false;
  UnreadLosses unread_;
  LossTrend trend_;
};

}  // namespace qlorapp
