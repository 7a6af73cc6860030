// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/planner.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/input_offload.hpp"
#include "ops/adamw.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "rehearse_load.hpp"
#include "rehearse_merge.hpp"
#include "replay.hpp"

namespace qlorapp {
namespace {

using ops::MemoryPhase;
using ops::MemoryTape;
using ops::MemoryUse;

void check(const PlanSettings& settings) {
  const auto positive = [](const char* name, int64_t value, int64_t least = 1) {
    QLORAPP_CHECK_VALUE(value >= least, "[plan] {} must be at least {}; got {}.", name, least, value);
  };
  positive("batch", settings.batch);
  positive("length", settings.length, 2);
  positive("accumulation", settings.accumulation);
  positive("eval_batch", settings.eval_batch, 0);
  // The largest tensor of a step has batch · length rows of at most 2 · intermediate_size or vocab_size elements of four bytes.
  const int64_t widest =
      std::max({settings.model.vocab_size, 4 * settings.model.intermediate_size, 4 * settings.model.hidden_size});
  int64_t bytes = 0;
  QLORAPP_CHECK_VALUE(!settings.float8 || settings.device.type != at::kCUDA || settings.device.architecture >= 89,
                      "[plan] fp8 needs a GPU that multiplies eight bits: sm_89 (L4, RTX 40), sm_90 (H100) or newer; this one is "
                      "sm_{}. Leave it out.",
                      settings.device.architecture);
  QLORAPP_CHECK_VALUE(
      !settings.float8 || settings.device.type != at::kCUDA || settings.compute_dtype == at::kBFloat16,
      "[plan] fp8 computes the rest of the step in bfloat16 on a GPU; got a plan in {}. Give bf16, or leave fp8 out.",
      settings.compute_dtype == at::kHalf ? "float16" : "float32");
  for (const int64_t rows : {settings.batch, settings.eval_batch}) {
    const bool overflows = __builtin_mul_overflow(rows, settings.length, &bytes) || __builtin_mul_overflow(bytes, widest, &bytes) ||
                           __builtin_mul_overflow(bytes, settings.accumulation, &bytes) ||
                           __builtin_mul_overflow(bytes, 8 * settings.model.num_hidden_layers, &bytes);
    QLORAPP_CHECK_VALUE(!overflows,
                        "[plan] the bytes of a batch must fit in 64 bits; got {} rows of {} tokens (times {}). Give smaller sizes.",
                        rows, settings.length, settings.accumulation);
  }
  settings.lora.validate();
}

/// Runs everything once and keeps the tape.
class Rehearsal {
 public:
  Rehearsal(const PlanSettings& settings, bool optimizer_on_host) : settings_(settings), optimizer_on_host_(optimizer_on_host) {
    const MemoryTape::Recording recording(tape, settings.device);
    const at::NoGradGuard no_grad;
    CausalLM model = rehearse_load(settings_, tape);
    base_parameters = model.decoder().parameter_count();
    model.settings().set_memory(settings_.memory);
    model.settings().set_deterministic(settings_.deterministic);
    if (model.decoder().embedding_on_host()) pinned_host += Bytes{static_cast<int64_t>(model.decoder().embed_tokens().nbytes())};
    if (model.decoder().residency() == Residency::kHost) {
      for (const DecoderBlock& block : model.blocks()) pinned_host += Bytes{static_cast<int64_t>(block.weights().piece.nbytes())};
    }
    ops::mark_phase(MemoryPhase::kForward);  // what is there before the first step counts with it
    loaded_events = tape.events().size();
    model.add_adapters(settings_.lora, 0);
    tape.label(model.arena().values(), MemoryUse::kAdapters);
    tape.label(model.arena().gradients(), MemoryUse::kGradients);
    trainable_parameters = model.arena().numel();
    if (!settings_.segments.empty()) model.settings().set_segments(settings_.segments);
    if (settings_.float8) model.settings().set_float8(true);
    const std::vector<at::Tensor> moments = make_moments(model.arena().values());
    std::vector<Batch> window;
    for (int64_t i = 0; i < settings_.accumulation; ++i) window.push_back(batch_of(settings_.batch));
    const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte).device(kNowhere);
    const at::Tensor library = rehearse_library(settings_.device, tape);

    const auto first = static_cast<int64_t>(tape.allocations().size());
    const LossSum loss = model.forward_backward(window.front(), at::empty({}, bytes.dtype(at::kFloat)), {});
    label_kept(first);
    ops::mark_phase(MemoryPhase::kOptimizer);
    optimizer_step(model, moments);
    if (model.settings().pinned_ring()) pinned_host += model.settings().pinned_ring()->nbytes();
    window.clear();
    if (settings_.eval_batch > 0) {
      ops::mark_phase(MemoryPhase::kEvaluation);
      const Batch batch = batch_of(settings_.eval_batch);
      const at::Tensor hidden = model.hidden_states(batch, /*training=*/false, 0, 0);
      static_cast<void>(model.loss_of(hidden, batch));
    }
    events = tape.events().size();  // memory freed from here on belongs to the end of the rehearsal
  }

  MemoryTape tape;
  size_t loaded_events = 0, events = 0;
  Bytes pinned_host;
  int64_t trainable_parameters = 0, base_parameters = 0;

 private:
  /// Every position but each row's last a target: the worst case of its size.
  Batch batch_of(int64_t rows) {
    Batch batch = Batch::of_equal_rows(at::empty({rows, settings_.length}, at::TensorOptions().dtype(at::kLong).device(kNowhere)));
    for (const at::Tensor* tensor : {&batch.tokens, &batch.targets, &batch.positions}) tape.label(*tensor, MemoryUse::kBatch);
    return batch;
  }

  std::vector<at::Tensor> make_moments(const at::Tensor& values) {
    std::vector<at::Tensor> moments = ops::adamw_moments(values, settings_.optimizer_is_8bit);
    for (const at::Tensor& moment : moments) {
      tape.label(moment, MemoryUse::kOptimizer);
      if (optimizer_on_host_) pinned_host += Bytes{static_cast<int64_t>(moment.nbytes())};
    }
    if (optimizer_on_host_) moments.clear();
    return moments;
  }

  void optimizer_step(CausalLM& model, const std::vector<at::Tensor>& moments) {
    AdapterArena& arena = model.arena();
    const auto norm = ops::gradient_norm(arena.gradients(), std::nullopt, 1.0);
    const int64_t elements = arena.values().numel(), chunk = moments.empty() ? ops::kPagedMomentsChunk : elements;
    for (int64_t begin = 0; begin < elements; begin += chunk) {
      const int64_t count = std::min(chunk, elements - begin);
      at::Tensor values = arena.values().narrow(0, begin, count);
      const at::Tensor gradients = arena.gradients().narrow(0, begin, count);
      std::vector<at::Tensor> here = moments.empty() ? ops::adamw_moments(values, settings_.optimizer_is_8bit) : moments;
      if (moments.empty()) {
        for (const at::Tensor& moment : here) tape.label(moment, MemoryUse::kOptimizer);
      }
      if (settings_.optimizer_is_8bit) {
        ops::adamw_8bit_(values, gradients, here[0], here[1], here[2], here[3], 1, 1e-4, 0.9, 0.999, 1e-8, 0);
      } else {
        ops::adamw_(values, gradients, here[0], here[1], 1, 1e-4, 0.9, 0.999, 1e-8, 0);
      }
    }
  }

  /// Activations made in the forward pass that are still there when the loss begins.
  void label_kept(int64_t first) {
    std::vector<bool> alive(tape.allocations().size(), false);
    for (const MemoryTape::Event& event : tape.events()) {
      if (event.phase > MemoryPhase::kForward) break;
      alive[static_cast<size_t>(event.allocation)] = event.begins;
    }
    for (size_t i = static_cast<size_t>(first); i < alive.size(); ++i) {
      if (alive[i] && tape.allocations()[i].use == MemoryUse::kActivation) tape.label(static_cast<int64_t>(i), MemoryUse::kKept);
    }
  }

  const PlanSettings& settings_;
  const bool optimizer_on_host_;
};

static_assert(static_cast<size_t>(MemoryPhase::kMerge) ==
              ops::kMemoryPhaseCount - 1);  // so that a run's phases are those before it

}  // namespace

Bytes sum(const MemoryParts& parts) {
  Bytes total;
  for (const Bytes part : parts) total += part;
  return total;
}

MemoryPhase MemoryPlan::fullest() const {
  const auto found = std::max_element(phases.begin(), phases.end() - 1,
                                      [](const PhasePlan& a, const PhasePlan& b) { return a.allocated < b.allocated; });
  return static_cast<MemoryPhase>(found - phases.begin());
}

MemoryPhase MemoryPlan::fullest_of_training() const {
  const auto found = std::max_element(phases.begin() + 1, phases.end() - 1,
                                      [](const PhasePlan& a, const PhasePlan& b) { return a.allocated < b.allocated; });
  return static_cast<MemoryPhase>(found - phases.begin());
}

Bytes MemoryPlan::peak_reserved() const {
  Bytes most;
  for (size_t i = 0; i < static_cast<size_t>(MemoryPhase::kMerge); ++i) most = std::max(most, phases[i].reserved);
  return most;
}

namespace {

MemoryPlan plan_with(const PlanSettings& settings, std::optional<Bytes> room, bool optimizer_on_host) {
  const Rehearsal rehearsal(settings, optimizer_on_host);
  MemoryPlan plan = replay(rehearsal.tape, rehearsal.loaded_events, rehearsal.events, settings.device, room);
  plan.optimizer_on_host = optimizer_on_host;
  plan.pinned_host = rehearsal.pinned_host;
  plan.trainable_parameters = rehearsal.trainable_parameters;
  plan.base_parameters = rehearsal.base_parameters;
  plan.phases[static_cast<size_t>(MemoryPhase::kMerge)] = rehearse_merge(settings);
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const PlanSettings& settings, std::optional<Bytes> room) {
  check(settings);
  MemoryPlan plan = plan_with(settings, room, /*optimizer_on_host=*/false);
  if (plan.fits || !settings.optimizer_is_paged || settings.device.type != at::kCUDA) return plan;
  MemoryPlan paged = plan_with(settings, room, /*optimizer_on_host=*/true);
  return paged.fits ? paged : plan;
}

MemoryPlan plan_memory_in(const PlanSettings& settings, Bytes room) {
  MemoryPlan plan = plan_memory(settings, room);
  if (plan.fits) return plan;
  plan = plan_memory(settings);
  plan.fits = false;
  return plan;
}

}  // namespace qlorapp
