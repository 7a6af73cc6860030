// SPDX-License-Identifier: Apache-2.0
/// Loading a checkpoint without one: by the arrangement and the buffers of those who load (nn/arriving_weights.hpp).
#pragma once

#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/ops/memory_tape.hpp"

namespace qlorapp {

/// Tensors of the planner have shapes alone.
constexpr at::DeviceType kNowhere = at::kMeta;

/// @pre `tape` records on this thread, for settings.device.
[[nodiscard]] CausalLM rehearse_load(const PlanSettings& settings, ops::MemoryTape& tape);

}  // namespace qlorapp
