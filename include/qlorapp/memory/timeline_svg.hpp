// SPDX-License-Identifier: Apache-2.0
/// A plan as a picture: memory by part, stacked, from the end of the load through one step, with the phases named.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

/// A point of a measured curve.
struct MeasuredPoint {
  double at = 0;  ///< In points of the plan's timeline.
  Bytes most;     ///< Of the moments that it stands for.
};

/// A step that was really taken (train/batch_probe.hpp) over the timeline of its plan: each phase over the same phase, its requests and
/// releases at equal distances, no finer than the plan, and with every peak in it. Phases before the plan's first are left out.
[[nodiscard]] std::vector<MeasuredPoint> measured_curve(const MemoryPlan& plan, std::span<const MeasuredMemory::Moment> moments);

/// "llama-3-8b, 1 x 2048 tokens in float16, on T4".  @param model  may be empty.  @param card  a name, or an amount of memory.
[[nodiscard]] std::string timeline_title(std::string_view model, const PlanSettings& settings, std::string_view card);

/// @param title  one line; escaped.
/// @param limit  the memory that torch may allocate: a line, or a text if it is more than three times what the step needs.
/// @param measured  of a step that was really taken; drawn as measured_curve().
/// @returns a complete SVG document without scripts, links or fonts of its own.
[[nodiscard]] std::string timeline_svg(const MemoryPlan& plan, const std::string& title, std::optional<Bytes> limit = std::nullopt,
                                       std::span<const MeasuredMemory::Moment> measured = {});

}  // namespace qlorapp
