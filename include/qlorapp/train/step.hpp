// SPDX-License-Identifier: Apache-2.0
/// One optimizer step over an accumulation window. Read it top-down: each line is one header.
#pragma once

#include <functional>
#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"           // tokens, targets, row boundaries
#include "qlorapp/train/accumulator.hpp"  // the denominator: target tokens of the whole window
#include "qlorapp/train/clip.hpp"         // global norm over the arena
#include "qlorapp/train/grad_scaler.hpp"  // dynamic loss scaling for fp16
#include "qlorapp/train/optimizer.hpp"    // AdamW, fp32 or 8-bit moments, one arena
#include "qlorapp/train/shared_step.hpp"  // what the ranks of a run do together
#include "qlorapp/train/step_report.hpp"  // what the step measured
#include "qlorapp/train/train_state.hpp"  // all that a resumed run needs

namespace qlorapp {

/// @param window  the micro-batches of one step, on the model's device; the last one of an epoch may be short. With run.ranks: those of
///                this rank, which may have none.
/// @param met     totals learned from the other ranks. Pass the same object when you retry a window, so that they are asked once. Null: no retry.
/// @tparam Model  forward_backward(batch, grad_scale, seed, micro_step[, on_block_done]) → LossSum adds its gradients to run.arena;
///                before_exchange() is called, if it has it, before gradients of several ranks are summed, and before_optimizer_step()
///                and after_optimizer_step() around the optimizer.
template <class Model>
StepReport train_step(Model& model, TrainState& run, std::span<const Batch> window, WindowCounts* met = nullptr) {
  run.arena->zero_grad();
  SharedStep shared(run.ranks.get(), window, run.sums_in_bf16, met);
  Accumulator accumulator(window, {.count_position_zero = run.count_position_zero,  // counts the window's targets first
                                   .sum_over_ranks = [&](int64_t targets) { return shared.meet(targets); }});
  const at::Tensor grad_scale = run.scaler.scale(accumulator.weight_tensor(run.arena->values().device()));  // loss scale / targets

  for (const Batch& batch : window) {
    const uint32_t micro_step = run.micro_step + static_cast<uint32_t>(shared.place_of(batch));  // parts of one share it
    if constexpr (requires { model.forward_backward(batch, grad_scale, run.seed, micro_step, std::function<void(int64_t)>()); }) {
      const auto done = shared.on_block_done(*run.arena, &batch == &window.back());  // several GPUs: sums begin block by block
      accumulator.add(model.forward_backward(batch, grad_scale, run.seed, micro_step, done).loss);
    } else {
      accumulator.add(model.forward_backward(batch, grad_scale, run.seed, micro_step).loss);
    }
  }
  run.micro_step += static_cast<uint32_t>(shared.counts().micro_batches);

  at::Tensor mean_loss = accumulator.mean_loss();  // here: nothing is allocated between the update and the end
  if constexpr (requires { model.before_exchange(); }) model.before_exchange();
  shared.sum(*run.arena, mean_loss);
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

  return {.mean_loss = std::move(mean_loss),
          .grad_norm = gradients.norm,
          .learning_rate = rate,
          .target_tokens = accumulator.tokens(),
          .input_tokens = shared.counts().input_tokens,
          .stepped = stepped};
}

}  // namespace qlorapp
