// SPDX-License-Identifier: Apache-2.0
/// One true step of the worst case, to see whether a plan holds, that leaves everything as it was.
#pragma once

#include <cstdint>
#include <vector>

#include "qlorapp/core/units.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct ProbeOptions {
  int64_t batch = 1;         ///< Rows, >= 1.
  int64_t length = 512;      ///< Tokens of every row, >= 2.
  int64_t accumulation = 1;  ///< Batches that wait on the device together, >= 1; one of them is trained on.
  int64_t eval_batch = 0;    ///< Rows of a batch in evaluation; 0: there is none.
  bool optimizer_is_8bit = false;
  bool records = false;  ///< Keep every moment, for memory/timeline_svg.hpp.
};

struct Probe {
  Bytes peak;                                   ///< In use at most, the model included.
  Bytes taken;                                  ///< The same without what was there.
  std::vector<MeasuredMemory::Moment> moments;  ///< Empty unless options.records.
};

/// Forward, backward, the optimizer's moments and the norm, and a batch in evaluation, over rows of made-up tokens. No
/// parameter changes; gradients are zero afterwards.
/// @throws ValueError if there are no adapters or a size is not positive; c10::OutOfMemoryError from a GPU that is too small.
[[nodiscard]] Probe probe_step(CausalLM& model, const ProbeOptions& options);

/// The same of the step that was planned: what blocks keep, memory settings, determinism and eight bits are as in the settings for that
/// long, whatever its setting was before.
[[nodiscard]] Probe probe_planned(CausalLM& model, const PlanSettings& settings, bool records);

/// A model's weights and its adapters' values and gradients, on its device.
[[nodiscard]] Bytes resident_bytes(const CausalLM& model);

/// Forward, backward and the norm over a batch. No parameter changes; gradients are zero afterwards.
void probe_micro_batch(CausalLM& model, const Batch& batch);

}  // namespace qlorapp
