// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/batch_probe.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "ops/adamw.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/train/clip.hpp"

namespace qlorapp {
namespace {

/// Clears the gradients when the probe ends, also by an exception.
struct ZeroGradients {
  AdapterArena& arena;
  ~ZeroGradients() { arena.zero_grad(); }
};

/// Counted, not random: a user's seed stays where it was, and values do not matter to memory.
Batch batch_of(const CausalLM& model, int64_t rows, int64_t length) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(model.device());
  return Batch::of_equal_rows(at::arange(rows * length, options).remainder_(model.config().vocab_size).view({rows, length}));
}

void take_steps_as(CausalLM& model, const PlanSettings& settings) {
  if (!settings.segments.empty()) model.settings().set_segments(settings.segments);
  model.settings().set_memory(settings.memory);
  model.settings().set_deterministic(settings.deterministic);
  model.settings().set_float8(settings.float8);
}

}  // namespace

void probe_micro_batch(CausalLM& model, const Batch& batch) {
  const at::NoGradGuard no_grad;
  const ZeroGradients zero{model.arena()};
  static_cast<void>(model.forward_backward(batch, at::ones({}, model.arena().values().options()), {}));
  ops::mark_phase(ops::MemoryPhase::kOptimizer);
  static_cast<void>(gradient_norm(model.arena(), {}, 0));
}

Bytes resident_bytes(const CausalLM& model) {
  Bytes total = model.decoder().weight_bytes();
  for (const std::string& name : model.adapters().names()) {
    const AdapterArena& arena = model.adapters().at(name).arena;
    for (const at::Tensor* tensor : {&arena.values(), &arena.gradients()}) {
      if (tensor->defined()) total += Bytes{static_cast<int64_t>(tensor->nbytes())};
    }
  }
  return total;
}

Probe probe_step(CausalLM& model, const ProbeOptions& options) {
  QLORAPP_CHECK_VALUE(options.batch >= 1 && options.accumulation >= 1 && options.eval_batch >= 0,
                      "[find_max_batch_size] the batch must be at least 1; got {}, accumulation {} and {} rows in evaluation.",
                      options.batch, options.accumulation, options.eval_batch);
  QLORAPP_CHECK_VALUE(options.length >= 2, "[find_max_batch_size] max_seq_length must be at least 2; got {}.", options.length);
  QLORAPP_CHECK_VALUE(!model.adapters().empty(),
                      "[find_max_batch_size] the model has no adapters. Add them first: they and their optimizer use memory, too.");
  const at::NoGradGuard no_grad;
  const MeasuredMemory memory({model.device().type(), resident_bytes(model), options.records});
  const ZeroGradients zero{model.arena()};
  ops::mark_phase(ops::MemoryPhase::kForward);
  if (!model.device().is_cpu())
    static_cast<void>(at::empty({1}, at::TensorOptions().device(model.device())));  // and live() is true
  const Bytes before{memory.live()};
  {
    const auto moments = ops::adamw_moments(model.arena().values(), options.optimizer_is_8bit);
    std::vector<Batch> window;
    for (int64_t i = 0; i < options.accumulation; ++i) window.push_back(batch_of(model, options.batch, options.length));
    probe_micro_batch(model, window.front());
    window.clear();
    if (options.eval_batch > 0) {
      ops::mark_phase(ops::MemoryPhase::kEvaluation);
      const Batch batch = batch_of(model, options.eval_batch, options.length);
      static_cast<void>(model.loss_of(model.hidden_states(batch, /*training=*/false, 0, 0), batch));
    }
  }
  return {{memory.peak()}, Bytes{memory.peak()} - before, memory.moments()};
}

Probe probe_planned(CausalLM& model, const PlanSettings& settings, bool records) {
  const PlanSettings before = settings_of(model);
  try {
    take_steps_as(model, settings);
    Probe probe = probe_step(
        model, {settings.batch, settings.length, settings.accumulation, settings.eval_batch, settings.optimizer_is_8bit, records});
    take_steps_as(model, before);
    return probe;
  } catch (...) {
    take_steps_as(model, before);
    throw;
  }
}

}  // namespace qlorapp
