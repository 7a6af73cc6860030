// SPDX-License-Identifier: Apache-2.0
/// comparison.svg: the base against the adapter (docs/formats/run_report.md).
#pragma once

#include <string>

#include "qlorapp/train/comparison.hpp"

namespace qlorapp {

inline constexpr std::string_view kComparisonPicture = "comparison.svg";

/// Two bars for each measured number: losses on one scale, shares of the answers on another. @returns a complete SVG document.
[[nodiscard]] std::string comparison_svg(const Comparison& comparison);

/// Writes the file into a folder, whole or not at all. @throws IoError
void write_comparison_svg(const std::string& folder, const Comparison& comparison);

}  // namespace qlorapp
