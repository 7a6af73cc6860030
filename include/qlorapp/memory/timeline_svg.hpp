// SPDX-License-Identifier: Apache-2.0
/// A plan as a picture: memory by part, stacked, from the end of the load through one step, with the phases named.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

/// What was measured beside it, a number of bytes at equal distances through the same phases.
struct MeasuredTimeline {
  std::vector<Bytes> allocated;
};

/// @param title  one line; escaped.  @param budget  drawn as a line if given.
/// @returns a complete SVG document without scripts, links or fonts of its own.
[[nodiscard]] std::string timeline_svg(const MemoryPlan& plan, const std::string& title, std::optional<Bytes> budget = std::nullopt,
                                       const std::optional<MeasuredTimeline>& measured = std::nullopt);

}  // namespace qlorapp
