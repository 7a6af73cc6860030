// SPDX-License-Identifier: Apache-2.0
/// The largest micro-batch that fits, by plan: no trial, nothing allocated.
#pragma once

#include <cstdint>

#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// @param room  for all that torch reserves.  @param most  the largest batch to consider.
/// @returns 0 if not even one row fits.
[[nodiscard]] int64_t largest_batch(PlanSettings settings, Bytes room, int64_t most);

/// The settings of a model that exists, with its adapters, its segments and its device; batch, length and optimizer are the
/// caller's.
/// @throws ValueError if it has no adapters.
[[nodiscard]] PlanSettings settings_of(const CausalLM& model);

}  // namespace qlorapp
