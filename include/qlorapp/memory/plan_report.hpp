// SPDX-License-Identifier: Apache-2.0
/// The output of `qlorapp plan`: tables and answers in words, from plans and times alone. Text, for a terminal and for
/// docs/memory.md.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/memory/roofline.hpp"

namespace qlorapp {

/// Memory of a device that torch must leave free.
struct DeviceAllowance {
  /// CUDA context, driver and cuBLAS/cuDNN code on the card. benchmarks/plan_accuracy_cuda.py measures it, --context states it; none:
  /// the figure of the table of cards.
  std::optional<Bytes> context;

  [[nodiscard]] Bytes on(const Gpu& gpu) const { return context.value_or(gpu.context()); }
};

/// @returns the memory that a card leaves to torch.  @throws ValueError if the allowance is all of it.
[[nodiscard]] Bytes room_on(const Gpu& gpu, const DeviceAllowance& allowance);

/// Phases and their fullest moments, by part.
[[nodiscard]] std::string phase_table(const MemoryPlan& plan);

/// "Memory Budget Checklist": the customary rows with the customary rules of thumb beside the planned sizes, and the rows
/// that are usually missing.
[[nodiscard]] std::string checklist(const MemoryPlan& plan, const PlanSettings& settings);

/// Which limits the step of a base in host memory, its computation or the bus; empty for another base, and if the rates are not known.
[[nodiscard]] std::string bus_text(const PlanSettings& settings, const Gpu& gpu);

/// "7.9 GiB of 14.5 GiB: fits".
[[nodiscard]] std::string verdict(const MemoryPlan& plan, Bytes room);

/// Memory of the same run in transformers, peft and bitsandbytes, by the terms that are known here. Against their peaks in
/// docs/performance.md ("HF stack", checkpointing, without `prepared`, which those runs leave out) the sum is 3 % off at most
/// (tests/memory/plan_report_test.cpp); where nothing is computed again it is a lower bound.
struct PeerMemory {
  Bytes base;      ///< Codes, scales, and the rest in 16 bits.
  Bytes prepared;  ///< The rest is float32 after prepare_model_for_kbit_training (peft/utils/other.py).
  Bytes adapters;  ///< With gradients and moments.
  Bytes kept;      ///< Inputs of blocks, of checkpointing, else what a block of ours keeps.
  Bytes working;   ///< Of the block that is computed.
  Bytes logits;  ///< All of them: in 16 bits, a float32 copy, and its gradient (transformers/loss/loss_utils.py, ForCausalLMLoss).

  [[nodiscard]] Bytes total() const { return base + prepared + adapters + kept + working + logits; }
};
/// Memory of the same run with transformers, PEFT and bitsandbytes, derived from their source.
[[nodiscard]] PeerMemory hugging_face_memory(const MemoryPlan& plan, const PlanSettings& settings);

/// Step by step for one configuration that ran out of memory: the parts of its memory, whether it fits here, and the first change to make.
[[nodiscard]] std::string explain(const PlanSettings& settings, const Gpu& gpu, const DeviceAllowance& allowance);

/// Two ways to the same effective batch on two cards: speed, memory, quality.
struct Contender {
  Gpu gpu;
  int64_t batch = 1, accumulation = 1;
};
/// The second table is of the fastest way to the same update on each card, as memory_budget finds it: it may keep more, and split
/// the rows otherwise.
/// @param settings  all but batch and accumulation; for a card without bfloat16 the plan uses float16 and says so.
/// @param budget    what the second table may use of each card; none: all of it.
[[nodiscard]] std::string compare(const PlanSettings& settings, const std::vector<Contender>& contenders,
                                  const DeviceAllowance& allowance, std::optional<Bytes> budget = std::nullopt);

}  // namespace qlorapp
