// SPDX-License-Identifier: Apache-2.0
/// One optimizer step over an accumulation window. Read it top-down: each line is one header.
#pragma once

#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"           // tokens, targets, row boundaries
#include "qlorapp/train/accumulator.hpp"  // the denominator: target tokens of the whole window
#include "qlorapp/train/clip.hpp"         // global norm over the arena
#include "qlorapp/train/grad_scaler.hpp"  // dynamic loss scaling for fp16
#include "qlorapp/train/optimizer.hpp"    // AdamW, fp32 or 8-bit moments, one arena
#include "qlorapp/train/step_report.hpp"  // what the step has to say
#include "qlorapp/train/train_state.hpp"  // all that a resumed run needs

namespace qlorapp {

/// @param window  the micro-batches of one step, on the model's device; the last one of an epoch may be short.
/// @tparam Model  forward_backward(batch, grad_scale, seed, micro_step) → LossSum adds its gradients to run.arena;
///                before_optimizer_step() and after_optimizer_step(), if it has them, are called around the optimizer.
template <class Model>
StepReport train_step(Model& model, TrainState& run, std::span<const Batch> window) {
  run.arena->zero_grad();
  Accumulator accumulator(window, {.count_position_zero = run.count_position_zero});  // counts the window's targets first
  const at::Tensor grad_scale = run.scaler.scale(accumulator.weight_tensor(run.arena->values().device()));  // loss scale / targets

  int64_t input_tokens = 0;
  for (const Batch& batch : window) {
    input_tokens += batch.token_count();
    const uint32_t micro_step = batch.first_token == 0 ? run.micro_step++ : run.micro_step - 1;  // parts of one share it
    accumulator.add(model.forward_backward(batch, grad_scale, run.seed, micro_step).loss);
  }

  at::Tensor mean_loss = accumulator.mean_loss();  // here: nothing is allocated between the update and the end
  const GradientNorm gradients = gradient_norm(*run.arena, run.scaler.inverse_scale(), run.max_grad_norm);  // of unscaled ones
  run.scaler.record(gradients.found_inf);
  const double rate = run.schedule.learning_rate(run.base_learning_rate, run.optimizer.step_count());
  if constexpr (requires { model.before_optimizer_step(); }) model.before_optimizer_step();
  const bool stepped = run.scaler.step([&] {                              // with fp16 the one host read; skips on overflow
    run.optimizer.step(rate, gradients.multiplier, gradients.found_inf);  // unscales and clips as it reads them
  });
  if constexpr (requires { model.after_optimizer_step(); }) model.after_optimizer_step();
  run.scaler.update();
  ++run.global_step;  // counts skipped steps too, as transformers does; the schedule does not

  return {std::move(mean_loss), gradients.norm, rate, accumulator.tokens(), input_tokens, stepped};
}

}  // namespace qlorapp
