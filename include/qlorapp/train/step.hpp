// SPDX-License-Identifier: Apache-2.0
/// One optimizer step over an accumulation window. Read it top-down: each line is one header.
#pragma once

#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"                // tokens, targets, row boundaries
#include "qlorapp/nn/micro_step.hpp"           // the call that trains a model
#include "qlorapp/train/accumulator.hpp"       // the denominator: target tokens of the whole window
#include "qlorapp/train/clip.hpp"              // global norm over the arena
#include "qlorapp/train/grad_scaler.hpp"       // dynamic loss scaling for fp16
#include "qlorapp/train/optimizer.hpp"         // AdamW, fp32 or 8-bit moments, one arena
#include "qlorapp/train/shared_step.hpp"       // what the ranks of a run do together; alone it does nothing
#include "qlorapp/train/step_hooks.hpp"        // functions that the caller runs within the step
#include "qlorapp/train/step_report.hpp"       // what the step measured
#include "qlorapp/train/token_statistics.hpp"  // entropy and accuracy, where they are asked for
#include "qlorapp/train/train_state.hpp"       // all that a resumed run needs

namespace qlorapp {

/// The result of window_gradients(), beside the gradients in run.arena. Tensors stay on the device.
struct WindowGradients {
  at::Tensor mean_loss;  ///< () floating, over all ranks: summed loss over the window's target tokens.
  GradientNorm norm;     ///< Of the unscaled gradients.
  int64_t target_tokens = 0, input_tokens = 0;
  at::Tensor token_statistics = {};  ///< TokenStatistics::table() of this rank.
};

/// The first half of a step: forward and backward of each micro-batch, the sum over the ranks, and the norm.
/// @param model   adds its gradients to run.arena.
/// @param window  the micro-batches of one step, on the model's device; the last one of an epoch may be short. With run.ranks: those of
///                this rank, which may have none.
template <Trainable Model>
WindowGradients window_gradients(Model& model, TrainState& run, std::span<const Batch> window, const StepHooks& hooks = {}) {
  run.arena->zero_grad();
  SharedStep shared(run, window, hooks.sum_counts);
  Accumulator accumulator(window, {.count_position_zero = run.count_position_zero,  // counts the window's targets first
                                   .sum_over_ranks = [&](int64_t targets) { return shared.meet(targets); }});
  const at::Tensor grad_scale = run.scaler.scale(accumulator.weight_tensor(run.arena->values().device()));  // loss scale / targets
  TokenStatistics statistics;
  for (const Batch& batch : window) {
    const LossSum sum = model.forward_backward(batch, grad_scale, shared.next_key(batch), shared.on_block_done(batch));
    accumulator.add(sum.loss);
    statistics.add(batch, sum);
  }
  run.micro_step += static_cast<uint32_t>(shared.counts().micro_batches);
  at::Tensor mean_loss = accumulator.mean_loss();  // here: nothing is allocated between the update and the end

  if (hooks.before_exchange) hooks.before_exchange();
  shared.sum_gradients_and(mean_loss);
  GradientNorm norm = gradient_norm(*run.arena, run.scaler.inverse_scale(), run.max_grad_norm);  // of unscaled ones
  return {std::move(mean_loss), std::move(norm), accumulator.tokens(), shared.counts().input_tokens, statistics.table()};
}

/// The second half: clipping and the update, or a skip. Nothing has changed if memory runs out here.
/// @param rate  the step's learning rate.
inline StepReport apply_gradients(TrainState& run, const WindowGradients& gradients, double rate, const StepHooks& hooks = {}) {
  run.scaler.record(gradients.norm.found_inf);
  if (hooks.before_optimizer_step) hooks.before_optimizer_step();
  const bool stepped = run.scaler.step([&] {  // with fp16 the one host read; skips on overflow
    run.optimizer.step(rate, gradients.norm.multiplier, gradients.norm.found_inf);  // unscales and clips as it reads them
  });
  if (hooks.after_optimizer_step) hooks.after_optimizer_step();
  run.scaler.update();
  ++run.global_step;  // counts skipped steps too, as transformers does; the schedule does not
  return {gradients.mean_loss, gradients.norm.norm, rate, gradients.target_tokens, gradients.input_tokens, stepped};
}

/// Both halves, at the schedule's rate. Parameters as for window_gradients().
template <Trainable Model>
StepReport train_step(Model& model, TrainState& run, std::span<const Batch> window, const StepHooks& hooks = {}) {
  const WindowGradients gradients = window_gradients(model, run, window, hooks);
  return apply_gradients(run, gradients, run.schedule.learning_rate(run.base_learning_rate, run.optimizer.step_count()), hooks);
}

}  // namespace qlorapp
