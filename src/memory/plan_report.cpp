// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/plan_report.hpp"

#include <algorithm>

#include "qlorapp/core/check.hpp"
#include "report_text.hpp"

namespace qlorapp {

using namespace report;

Bytes room_on(const Gpu& gpu, const DeviceAllowance& allowance) {
  const Bytes context = allowance.on(gpu);
  QLORAPP_CHECK_VALUE(context < gpu.memory, "[gpu] of its memory, ", to_string(gpu.memory),
                      ", nothing is left beside the CUDA context, ", to_string(context),
                      ". Give a larger --gpu, or what the context really takes as --context.");
  return gpu.memory - context;
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
               concat(ops::to_string(static_cast<MemoryUse>(most - phase.parts.begin())), " ", gib(*most),
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
  table.row({"component", "rule of thumb", "planned", "what it is"});
  table.row(
      {"base model (4-bit)", rule(parameters * 0.5), gib(base),
       concat("codes ", gib(part(parts, MemoryUse::kCodes)), ", scales ", gib(part(parts, MemoryUse::kScales)),
              ", embedding, head and norms in ", dtype_name(settings.compute_dtype), " ", gib(part(parts, MemoryUse::kDense)))});
  table.row({"LoRA adapters", rule(static_cast<double>(settings.lora.r) * 7 * hidden * layers * 4),
             gib(part(parts, MemoryUse::kAdapters)), concat(plan.trainable_parameters, " parameters, float32")});
  table.row({"gradients (LoRA only)", rule(trainable * 4), gib(part(parts, MemoryUse::kGradients)), "float32, in one arena"});
  table.row({"optimizer states", rule(trainable * 8), gib(part(parts, MemoryUse::kOptimizer)),
             plan.optimizer_on_host       ? "in host memory"
             : settings.optimizer_is_8bit ? "two moments in eight bits"
                                          : "two moments in float32"});
  table.row(
      {"activations", rule(tokens * hidden * layers * 2), gib(parts_of(parts, {MemoryUse::kKept, MemoryUse::kActivation})),
       concat("kept for backward ", gib(part(parts, MemoryUse::kKept)), ", in use ", gib(part(parts, MemoryUse::kActivation)))});
  table.row({"logits", "-", gib(part(parts, MemoryUse::kLogits)),
             concat("at this moment; ", gib(part(plan.of(MemoryPhase::kLoss).parts, MemoryUse::kLogits)),
                    " in the loss, a chunk of rows; whole they would be ",
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
    table.row({"rounding and fragmentation", "-", gib(reserved - fullest.tensors),
               "of torch's caching allocator, reserved and not in use"});
  }
  table.row({"total", "", gib(reserved),
             concat("fullest in: ", ops::to_string(plan.fullest_of_training()),
                    settings.device.type == at::kCUDA ? "; without the CUDA context" : "")});
  if (const Bytes load = plan.of(MemoryPhase::kLoad).reserved; load > reserved) {
    table.row({"load, before training", "-", gib(load), "one weight at a time, with the buffers that it comes through"});
  }
  table.row({"merge, after training", "-", gib(plan.of(MemoryPhase::kMerge).allocated),
             "host memory: qlorapp merge, one weight at a time"});
  return table.text();
}

std::string summary_line(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryPhase phase = plan.fullest_of_training();
  const PhasePlan& fullest = plan.of(phase);
  const MemoryParts& parts = fullest.parts;
  return concat(
      "plan: ", to_string(fullest.allocated), " at most in ", dtype_name(settings.compute_dtype), ", in ", ops::to_string(phase),
      " (base ", to_string(parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense})),
      ", adapters with gradients and optimizer ",
      to_string(parts_of(parts, {MemoryUse::kAdapters, MemoryUse::kGradients, MemoryUse::kOptimizer})), ", kept for backward ",
      to_string(part(parts, MemoryUse::kKept)), ", logits ", to_string(part(parts, MemoryUse::kLogits)), ", other ",
      to_string(fullest.allocated - sum(parts) +
                parts_of(parts, {MemoryUse::kLibrary, MemoryUse::kBatch, MemoryUse::kActivation, MemoryUse::kDequantized,
                                 MemoryUse::kAttention})),
      ") for ", settings.batch, " x ", settings.length, " tokens");
}

std::string verdict(const MemoryPlan& plan, Bytes room) {
  return concat(to_string(plan.peak_reserved()), " of ", to_string(room), plan.fits ? ": fits" : ": does not fit");
}

}  // namespace qlorapp
