// SPDX-License-Identifier: Apache-2.0
/// One optimizer step over an accumulation window. Read it top-down: each line is one header.
#pragma once

#include <span>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"           // tokens, targets, row boundaries
#include "qlorapp/train/accumulator.hpp"  // the denominator: target tokens of the whole window
#include "qlorapp/train/clip.hpp"         // global norm over the arena
#include "qlorapp/train/grad_scaler.hpp"  // dynamic loss scaling for fp16
#include "qlorapp/train/optimizer.hpp"    // AdamW, fp32 or 8-bit moments, one arena
#include "qlorapp/train/train_state.hpp"  // all that a resumed run needs

namespace qlorapp {

/// What a step has to say. Tensors stay on the device; reading one synchronizes.
struct StepReport {
  at::Tensor mean_loss;      ///< () float64: summed loss over the window's target tokens.
  at::Tensor grad_norm;      ///< () float32, before clipping. Not finite: nothing was changed, whoever noticed.
  double learning_rate = 0;  ///< The one this step used.
  int64_t target_tokens = 0;
  bool stepped = true;  ///< false when the scaler found an overflow. Without a scaler the host asks for nothing: see grad_norm.
};

/// @param window  the micro-batches of one step, on the model's device; the last one of an epoch may be short.
/// @tparam Model  forward_backward(batch, grad_scale, seed, micro_step) → LossSum adds its gradients to run.arena.
template <class Model>
StepReport train_step(Model& model, TrainState& run, std::span<const Batch> window) {
  run.arena->zero_grad();
  Accumulator accumulator(window, {.count_position_zero = run.count_position_zero});  // counts the window's targets first
  const at::Tensor grad_scale = run.scaler.scale(accumulator.weight_tensor(run.arena->values().device()));  // loss scale / targets

  for (const Batch& batch : window) { accumulator.add(model.forward_backward(batch, grad_scale, run.seed, run.micro_step++).loss); }

  const GradientNorm gradients = gradient_norm(*run.arena, run.scaler.inverse_scale(), run.max_grad_norm);  // of unscaled ones
  run.scaler.record(gradients.found_inf);
  const double rate = run.schedule.learning_rate(run.base_learning_rate, run.optimizer.step_count());
  const bool stepped = run.scaler.step([&] {                              // with fp16 the one host read; skips on overflow
    run.optimizer.step(rate, gradients.multiplier, gradients.found_inf);  // unscales and clips as it reads them
  });
  run.scaler.update();
  ++run.global_step;  // counts skipped steps too, as transformers does; the schedule does not

  return {accumulator.mean_loss(), gradients.norm, rate, accumulator.tokens(), stepped};
}

}  // namespace qlorapp
