// SPDX-License-Identifier: Apache-2.0
/// One optimizer step over an accumulation window. Read it top-down: each line is one header.
#pragma once

#include <span>

#include "qlorapp/nn/batch.hpp"          // tokens, targets, row boundaries
#include "qlorapp/nn/causal_lm.hpp"      // embed → blocks → norm → chunked loss
#include "qlorapp/train/accumulator.hpp" // the denominator: target tokens of the whole window
#include "qlorapp/train/clip.hpp"        // global norm over the arena
#include "qlorapp/train/grad_scaler.hpp" // dynamic loss scaling for fp16
#include "qlorapp/train/optimizer.hpp"   // AdamW, fp32 or 8-bit moments, one arena
#include "qlorapp/train/train_state.hpp" // all that a resumed run needs

namespace qlorapp {

/// What a step has to say. Tensors stay on the device; reading one synchronizes.
struct StepReport {
  at::Tensor mean_loss;       ///< () float32: summed loss over the window's target tokens.
  at::Tensor grad_norm;       ///< () float32, before clipping; inf or nan on a skipped step.
  double learning_rate = 0;   ///< The one this step used.
  int64_t target_tokens = 0;
  bool stepped = true;        ///< false when the scaler found an overflow and nothing was changed.
};

/// @param window  the micro-batches of one step, on the model's device; the last one of an epoch may be short.
/// Model: forward_backward(batch, grad_scale, seed, micro_step) adds its gradients to run.arena().
template <class Model>
StepReport train_step(Model& model, TrainState& run, std::span<const Batch> window) {
  run.arena().zero_grad();
  Accumulator accumulator = run.make_accumulator(window);          // counts target tokens of the whole window first
  for (const Batch& batch : window) {
    const at::Tensor grad_scale = run.scaler.scale(accumulator.weight_tensor(run.device()));  // loss scale / window tokens
    accumulator.add(model.forward_backward(batch, grad_scale, run.seed, run.micro_step++).loss);
  }
  run.scaler.unscale_(run.optimizer_id(), {run.arena().gradients()});  // clipping must see true magnitudes
  const at::Tensor norm = clip_grad_norm_(run.arena(), run.max_grad_norm);
  const double learning_rate = run.schedule.learning_rate(run.optimizer.step_count());
  const bool stepped = run.scaler.step(run.optimizer_id(), [&] { run.optimizer.step(learning_rate); });  // skips on overflow
  run.scaler.update();
  ++run.global_step;                                               // counts skipped steps too, as transformers does
  return {accumulator.mean_loss(), norm, learning_rate, accumulator.tokens(), stepped};
}

}  // namespace qlorapp
