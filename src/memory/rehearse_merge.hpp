// SPDX-License-Identifier: Apache-2.0
/// Merging an adapter into its base (io/merge.hpp) without either: each of the layers once, by the function that merges.
#pragma once

#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

/// The fullest moment, in host memory. @pre This thread records no tape.
[[nodiscard]] PhasePlan rehearse_merge(const PlanSettings& settings);

}  // namespace qlorapp
