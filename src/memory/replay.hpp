// SPDX-License-Identifier: Apache-2.0
/// A recorded run through the rules of the planned device's allocator.
#pragma once

#include <cstddef>
#include <optional>

#include "ops/memory_tape.hpp"
#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

/// @param loaded_events  of the load, which the timeline leaves out.  @param events  of the run; later ones belong to the recording's end.
/// @param room  as in plan_memory().
/// @returns phases, timeline and whether it fits; the rest of the plan is the caller's.
[[nodiscard]] MemoryPlan replay(const ops::MemoryTape& tape, size_t loaded_events, size_t events, const ops::PlannedDevice& device,
                                std::optional<Bytes> room);

}  // namespace qlorapp
