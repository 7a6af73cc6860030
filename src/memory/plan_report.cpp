// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/plan_report.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "report_text.hpp"

namespace qlorapp {

using namespace report;

Bytes room_on(const Gpu& gpu, const DeviceAllowance& allowance) {
  const Bytes context = allowance.on(gpu);
  QLORAPP_CHECK_VALUE(context < gpu.memory,
                      "[gpu] memory must exceed the CUDA context; got {} of memory and {} of context. Give a larger --gpu, or the "
                      "measured size of the context as --context.",
                      to_string(gpu.memory), to_string(context));
  return gpu.memory - context;
}

std::string bus_text(const PlanSettings& settings, const Gpu& gpu) {
  const bool on_host = settings.memory.base_on_host;
  if ((!on_host && settings.base_shards == 1) || settings.device.type != at::kCUDA || !rates_are_known(settings, gpu)) return {};
  const StepTime time = step_time(settings, gpu, static_cast<double>(settings.length));
  const double rate = on_host ? gpu.host_rate() : gpu.peer_rate();
  return message(
      "{}: {} per micro-batch take {} at {} GB/s, computing {}. {}.\n",
      on_host ? std::string("Base on the host") : message("Base divided over {} ranks", settings.base_shards),
      gib({static_cast<int64_t>(time.copies * rate)}) + (on_host ? " copied" : " received"), duration(time.copies),
      fixed(rate * 1e-9, 0), duration(time.computation()),
      time.waits() > 0.01 * time.computation()
          ? message("{} is the limit: the GPU waits {}, {} % of the time; a larger batch waits less",
                    on_host ? "The bus" : "The exchange", duration(time.waits()), fixed(100 * time.waits() / time.micro_batch(), 0))
          : std::string("They run beside the computation and cost nothing"));
}

std::string phase_table(const MemoryPlan& plan) {
  Table table;
  table.row({"phase", "tensors", "allocated", "reserved", "fullest part"});
  for (size_t i = 0; i < ops::kMemoryPhaseCount; ++i) {
    const PhasePlan& phase = plan.phases[i];
    if (!phase.planned) continue;
    const auto most = std::max_element(phase.parts.begin(), phase.parts.end());
    table.row({std::string(ops::to_string(static_cast<MemoryPhase>(i))), gib(phase.tensors), gib(phase.allocated),
               gib(phase.reserved),
               message("{} {}{}", ops::to_string(static_cast<MemoryUse>(most - phase.parts.begin())), gib(*most),
                       static_cast<MemoryPhase>(i) == MemoryPhase::kMerge ? "; host memory, after the run" : "")});
  }
  return table.text();
}

std::string checklist(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  const PhasePlan& fullest = plan.of(plan.fullest_of_training());
  const Bytes base = parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense});
  const auto parameters = static_cast<double>(plan.base_parameters), trainable = static_cast<double>(plan.trainable_parameters);
  const auto rule = [&](double bytes) { return gib({static_cast<int64_t>(bytes)}); };
  const double hidden = static_cast<double>(settings.model.hidden_size),
               layers = static_cast<double>(settings.model.num_hidden_layers);
  const double tokens = static_cast<double>(settings.batch) * static_cast<double>(settings.length);
  Table table;
  table.row({"component", "rule of thumb", "planned", "contents"});
  table.row(
      {"base model (4-bit)", rule(parameters * 0.5), gib(base),
       message("codes {}, scales {}, embedding, head and norms in {} {}", gib(part(parts, MemoryUse::kCodes)),
               gib(part(parts, MemoryUse::kScales)), dtype_name(settings.compute_dtype), gib(part(parts, MemoryUse::kDense)))});
  table.row({"LoRA adapters", rule(static_cast<double>(settings.lora.r) * 7 * hidden * layers * 4),
             gib(part(parts, MemoryUse::kAdapters)), message("{} parameters, float32", plan.trainable_parameters)});
  table.row({"gradients (LoRA only)", rule(trainable * 4), gib(part(parts, MemoryUse::kGradients)), "float32, in one arena"});
  table.row({"optimizer states", rule(trainable * 8), gib(part(parts, MemoryUse::kOptimizer)),
             plan.optimizer_on_host       ? "in host memory"
             : settings.optimizer_is_8bit ? "two moments in eight bits"
                                          : "two moments in float32"});
  table.row(
      {"activations", rule(tokens * hidden * layers * 2), gib(parts_of(parts, {MemoryUse::kKept, MemoryUse::kActivation})),
       message("kept for backward {}, in use {}", gib(part(parts, MemoryUse::kKept)), gib(part(parts, MemoryUse::kActivation)))});
  table.row({"logits", "-", gib(part(parts, MemoryUse::kLogits)),
             message("at this moment; {} in the loss, a chunk of rows; all at once would be {}",
                     gib(part(plan.of(MemoryPhase::kLoss).parts, MemoryUse::kLogits)),
                     rule(tokens * static_cast<double>(settings.model.vocab_size) *
                          static_cast<double>(c10::elementSize(settings.compute_dtype))))});
  table.row({"workspaces", "-", gib(parts_of(parts, {MemoryUse::kDequantized, MemoryUse::kAttention, MemoryUse::kLibrary})),
             "a dequantized weight, attention, cuBLAS"});
  table.row({"batch", "-", gib(part(parts, MemoryUse::kBatch)), "tokens, targets, positions, rotary tables"});
  // A GPU's cache only grows, so this is what the allocator holds at the end; on a CPU the fullest moment of training.
  Bytes reserved;
  for (size_t i = 0; i < ops::kMemoryPhaseCount; ++i) {
    const auto phase = static_cast<MemoryPhase>(i);
    if (phase != MemoryPhase::kLoad && phase != MemoryPhase::kMerge) reserved = std::max(reserved, plan.of(phase).reserved);
  }
  if (settings.device.type == at::kCUDA) {
    table.row(
        {"rounding and fragmentation", "-", gib(reserved - fullest.tensors), "reserved by torch's caching allocator, not in use"});
  }
  table.row({"total", "", gib(reserved),
             message("fullest in: {}{}", ops::to_string(plan.fullest_of_training()),
                     settings.device.type == at::kCUDA ? "; without the CUDA context" : "")});
  if (const Bytes load = plan.of(MemoryPhase::kLoad).reserved; load > reserved) {
    table.row({"load, before training", "-", gib(load), "one weight at a time, with its load buffers"});
  }
  table.row({"merge, after training", "-", gib(plan.of(MemoryPhase::kMerge).allocated),
             "host memory: qlorapp merge, one weight at a time"});
  return table.text();
}

std::string summary_line(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryPhase phase = plan.fullest_of_training();
  const PhasePlan& fullest = plan.of(phase);
  const MemoryParts& parts = fullest.parts;
  const bool recomputes = std::any_of(settings.segments.begin(), settings.segments.end(),
                                      [](const Segment& segment) { return segment.keep != Keep::kEverything; });
  return message(
      "plan: {} at most in {}, in {} (base {}, adapters with gradients and optimizer {}, kept for backward {}{}, logits {}, "
      "other {}) for {} x {} tokens",
      to_string(fullest.allocated), dtype_name(settings.compute_dtype), ops::to_string(phase),
      to_string(parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense})),
      to_string(parts_of(parts, {MemoryUse::kAdapters, MemoryUse::kGradients, MemoryUse::kOptimizer})),
      to_string(part(parts, MemoryUse::kKept)), recomputes ? "" : " without checkpointing",
      to_string(part(parts, MemoryUse::kLogits)),
      to_string(fullest.allocated - sum(parts) +
                parts_of(parts, {MemoryUse::kLibrary, MemoryUse::kBatch, MemoryUse::kActivation, MemoryUse::kDequantized,
                                 MemoryUse::kAttention})),
      settings.batch, settings.length);
}

std::string verdict(const MemoryPlan& plan, Bytes room) {
  return message("{} of {}{}", to_string(plan.peak_reserved()), to_string(room), plan.fits ? ": fits" : ": does not fit");
}

}  // namespace qlorapp
